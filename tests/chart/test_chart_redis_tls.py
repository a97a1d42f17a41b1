"""The chart's Redis with TLS and the ACL user of the broker: what is rendered, and a real Redis with its scripts."""

from __future__ import annotations

import os
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import helm_python as helm
import kubernetes_validate
import pytest
import redis
from tests.redis_process import free_port, installed_servers, until

if TYPE_CHECKING:
    from tests.chart.conftest import ChartRig

ON: dict[str, Any] = {"redis": {"tls": {"enabled": True}}, "tls": {"existingSecrets": {"redis": "redis-certificate"}}}
HOST = "nouscoder-redis.here.svc"


def secret_items(pod: dict[str, Any], name: str) -> list[dict[str, str]]:
    sources = [one for volume in pod["volumes"] for one in volume.get("projected", {}).get("sources", ())]
    return [item for one in sources if one.get("secret", {}).get("name") == name for item in one["secret"]["items"]]


def test_redis_has_the_certificate_and_only_the_broker_its_authority(chart: ChartRig) -> None:
    for kind, name in (("StatefulSet", "redis"), ("StatefulSet", "learner"), ("Deployment", "broker")):
        document = chart.one(kind, f"nouscoder-{name}", ON)
        kubernetes_validate.validate(document, "1.29", strict=True)
        items = secret_items(document["spec"]["template"]["spec"], "redis-certificate")
        paths = {item["key"]: item["path"] for item in items}
        if name == "redis":
            assert paths == {"tls.crt": "tls/tls.crt", "tls.key": "tls/tls.key", "ca.crt": "tls/ca.crt"}
        else:
            assert paths == ({"ca.crt": "redis/ca.crt"} if name == "broker" else {})


def test_the_url_names_the_user_the_service_and_where_the_broker_has_the_authority(chart: ChartRig) -> None:
    url = chart.one("Secret", "nouscoder-redis", ON)["stringData"]["url"]
    wanted = rf"rediss://nouscoder:\w{{40}}@{re.escape(HOST)}:6379/0\?ssl_ca_certs=/etc/nouscoder/redis/ca\.crt"
    assert re.fullmatch(wanted, url)


def test_cert_manager_makes_the_certificate_of_redis_too(chart: ChartRig) -> None:
    issuer = {"enabled": True, "issuerRef": {"name": "company"}}
    values = {"redis": {"tls": {"enabled": True}}, "tls": {"enabled": True, "certManager": issuer}}
    made = chart.one("Certificate", "nouscoder-redis-tls", values)["spec"]
    assert made["dnsNames"] == [HOST]
    pod = chart.one("StatefulSet", "nouscoder-redis", values)["spec"]["template"]["spec"]
    assert secret_items(pod, made["secretName"])


def test_without_a_certificate_the_value_is_refused_by_name(chart: ChartRig) -> None:
    with pytest.raises(
        helm.HelmError, match=r"redis\.tls\.enabled needs tls\.existingSecret, tls\.existingSecrets\.redis"
    ):
        chart.templates({"redis": {"tls": {"enabled": True}}})


def test_nothing_of_it_is_rendered_for_the_verifier_alone(chart: ChartRig) -> None:
    values = {"redis": {"tls": {"enabled": True}}, "loop": {"enabled": False}}
    assert "redis-certificate" not in str(chart.documents({**ON, **values}))


def test_the_exporter_speaks_tls_as_the_user(chart: ChartRig) -> None:
    values = {**ON, "redis": {**ON["redis"], "exporter": {"enabled": True}}}
    pod = chart.one("StatefulSet", "nouscoder-redis", values)["spec"]["template"]["spec"]
    (exporter,) = [one for one in pod["containers"] if one["name"] == "exporter"]
    given = {one["name"]: one.get("value") for one in exporter["env"]}
    assert (given["REDIS_ADDR"], given["REDIS_USER"]) == ("rediss://localhost:6379", "nouscoder")


def with_tls() -> str | None:
    """A Redis of this machine whose redis-cli, which is built with it, speaks TLS."""
    for binary in installed_servers().values():
        client = Path(binary).with_name("redis-cli")
        if client.exists():
            told = subprocess.run([client, "--help"], capture_output=True, text=True, timeout=60, check=False)
            if "--tls" in told.stdout + told.stderr:
                return binary
    return None


def make_certificates(folder: Path, host: str) -> None:
    """An authority, and a certificate of it for `host`, in the files of a Secret of type kubernetes.io/tls."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=60)

    folder.mkdir(exist_ok=True)
    new = ("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    if not (folder / "ca.crt").exists():
        openssl(*new, "-x509", "-days", "2", "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=authority")
    (folder / "names").write_text(f"subjectAltName=DNS:{host}")
    openssl(*new, "-keyout", "new.key", "-out", "new.csr", "-subj", f"/CN={host}")
    signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
    openssl("x509", "-req", "-days", "2", "-in", "new.csr", *signed, "-out", "new.crt")
    (folder / "new.crt").replace(folder / "tls.crt")
    (folder / "new.key").replace(folder / "tls.key")


@dataclass
class TlsRedis:
    """A Redis that the chart's start.sh started."""

    port: int
    folder: Path
    password: str

    def client(self, **other: Any) -> redis.Redis:
        options: dict[str, Any] = {"username": "nouscoder", "password": self.password, "ssl": True, **other}
        if options["ssl"]:
            options["ssl_ca_certs"] = str(self.folder / "tls" / "ca.crt")
        return redis.Redis(host="localhost", port=self.port, **options)


@pytest.fixture
def server(chart: ChartRig, tmp_path: Path) -> Iterator[TlsRedis]:
    binary = with_tls()
    if binary is None or shutil.which("openssl") is None:
        pytest.skip("no Redis with TLS: apt-get install redis-server openssl, or name one in NOUSCODER_REDIS_SERVERS")
    data = chart.one("ConfigMap", "nouscoder-redis", ON)["data"]
    port, password = free_port(), "it's a 'password"
    make_certificates(tmp_path / "tls", "localhost")
    (tmp_path / "data").mkdir()
    (tmp_path / "password").write_text(password)

    def local(text: str) -> str:
        text = text.replace("/etc/redis", str(tmp_path)).replace("/tmp/redis.conf", str(tmp_path / "made.conf"))
        text = text.replace("dir /data", f"dir {tmp_path}/data").replace("6379", str(port))
        return text.replace("sleep 10", "sleep 0.2").replace("/sys/fs/cgroup", str(tmp_path))

    (tmp_path / "redis.conf").write_text(local(data["redis.conf"]))
    ready, live = local(data["ready.sh"]), local(data["live.sh"])
    environment = {**os.environ, "PATH": f"{Path(binary).parent}:{os.environ['PATH']}"}
    with subprocess.Popen(
        ["sh", "-c", local(data["start.sh"])], env=environment, stdout=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            until(lambda: subprocess.run(["sh", "-c", ready], env=environment, check=False).returncode == 0, "ready.sh")
            assert subprocess.run(["sh", "-c", live], env=environment, check=False).returncode == 0
            yield TlsRedis(port, tmp_path, password)
        finally:
            os.killpg(process.pid, 9)


@pytest.mark.heavy
def test_the_broker_may_do_its_work_and_nobody_else_anything(server: TlsRedis) -> None:
    with server.client() as broker:
        assert broker.set("nouscoder:run:x", "1")
        assert broker.eval("return redis.call('incr', KEYS[1])", 1, "nouscoder:run:x") == 2
        assert broker.xadd("nouscoder:run:s", {"a": "b"})
        assert broker.info("memory")["maxmemory_policy"] == "noeviction"
        for words in (["set", "other", "1"], ["config", "get", "*"], ["flushall"], ["acl", "list"], ["keys", "*"]):
            with pytest.raises(redis.exceptions.NoPermissionError):
                broker.execute_command(*words)
    for wrong in ({"username": None}, {"username": "default"}, {"username": "renewer"}, {"password": "guessed"}):
        with server.client(**wrong) as client, pytest.raises(redis.exceptions.AuthenticationError):
            client.ping()
    with server.client(username=None, password=None) as client, pytest.raises(redis.exceptions.AuthenticationError):
        client.ping()
    with server.client(ssl=False) as client, pytest.raises(redis.exceptions.ConnectionError):
        client.ping()
    # The password of the Secret and that of the loop that renews are only hashes in the made file.
    assert server.password not in (server.folder / "made.conf").read_text()


def test_a_renewed_certificate_is_used_without_a_restart(server: TlsRedis) -> None:
    def served() -> bytes:
        context = ssl.create_default_context(cafile=str(server.folder / "tls" / "ca.crt"))
        with (
            socket.create_connection(("localhost", server.port)) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as secured,
        ):
            return secured.getpeercert(binary_form=True) or b""

    with server.client() as open_before:
        first, number = served(), open_before.info("server")["run_id"]
        make_certificates(server.folder / "tls", "localhost")
        until(lambda: served() != first, "the renewed certificate")
        # The old connection goes on, and it is the same process.
        assert open_before.info("server")["run_id"] == number
