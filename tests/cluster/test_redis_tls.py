"""A run on the chart's own Redis with TLS and the ACL user: it commits batches, and uses a renewed certificate."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from .certificates import make_certificate
from .conftest import Release

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(900)]

HOST = "nouscoder-redis.{}.svc"
# A small run that lasts longer than the test.
VALUES = """
redis: {tls: {enabled: true}}
tls: {existingSecrets: {redis: redis-certificate}}
config:
  run: {total_batches: 500}
  evaluation: {samples: 1}
  broker: {drop_zero_variance: false}
  demo: {train_problems: 100, held_out_problems: 4, warm_start_share: 0.1}
"""


def served(release: Release) -> str:
    """The serial number of the certificate that Redis shows to a new connection in its pod."""
    program = (
        "import socket, ssl; c = ssl.create_default_context(cafile='/etc/nouscoder/redis/ca.crt');"
        f"s = c.wrap_socket(socket.create_connection(('{HOST.format(release.namespace)}', 6379)),"
        f" server_hostname='{HOST.format(release.namespace)}'); print(s.getpeercert()['serialNumber'])"
    )
    return release.kubectl("exec", "deploy/nouscoder-broker", "-c", "broker", "--", "python3", "-c", program).strip()


def test_a_run_commits_batches_over_tls_and_follows_a_renewed_certificate(release: Release, tmp_path: Path) -> None:
    begin = time.monotonic()
    files = make_certificate(tmp_path, f"DNS:{HOST.format(release.namespace)}")
    release.kubectl("create", "secret", "generic", "redis-certificate", *files)
    (tmp_path / "values.yaml").write_text(VALUES)
    release.install("-f", str(tmp_path / "values.yaml"))
    release.until(lambda: release.step() >= 2, "two batches", 600)
    print(f"\ntwo batches after {time.monotonic() - begin:.0f} s")

    # The probes leave nothing in the log.
    assert "Error accepting" not in release.kubectl("logs", "nouscoder-redis-0", "-c", "redis")
    in_redis = ("exec", "nouscoder-redis-0", "-c", "redis", "--")
    plain = subprocess.run(
        ["kubectl", "-n", release.namespace, *in_redis, "redis-cli", "-e", "ping"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert plain.returncode != 0, plain.stdout
    by_default = ("redis-cli", "--tls", "--cacert", "/etc/redis/tls/ca.crt", "ping")
    assert "NOAUTH" in release.kubectl(*in_redis, *by_default)

    first, started = served(release), release.pod("redis").uid
    new = make_certificate(tmp_path, f"DNS:{HOST.format(release.namespace)}")
    made = release.kubectl("create", "secret", "generic", "redis-certificate", *new, "--dry-run=client", "-o", "yaml")
    (tmp_path / "secret.yaml").write_text(made)
    begin = time.monotonic()
    release.kubectl("apply", "-f", str(tmp_path / "secret.yaml"))
    release.until(lambda: served(release) != first, "the renewed certificate", 240)
    print(f"the renewed certificate is served after {time.monotonic() - begin:.0f} s")
    assert release.pod("redis").uid == started
    step = release.step()
    release.until(lambda: release.step() > step, "a further batch", 240)
    assert release.status()["balanced"]
