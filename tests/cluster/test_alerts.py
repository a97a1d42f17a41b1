"""Each alert fires for a fault that is planted in a running release, and none fires in a healthy run.

The tests of this file run in order: the last one prints the table of all and checks that no rule is left out. The
expressions are the chart's; the durations are also there divided by FASTER (prometheus.py). NousCoderWorkOld and
NousCoderBackupOld have smaller limits by their values, which the table says.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.certificates import make_certificate, trusting
from tests.cluster.conftest import CHART, NAME, ROOT, SMALL_RUN, TAG, Release, installed_release
from tests.cluster.prometheus import FASTER, SCRAPE_S, Prometheus, kube_state_metrics, running

from nouscoder.client import AsyncClient, GradingFailed, Patience

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(3600)]

EVERY = set(json.loads((CHART / "values.schema.json").read_text())["properties"]["prometheusRule"]["properties"][
    "disabled"]["items"]["enum"])  # fmt: skip
NOT_HERE = {"NousCoderBackendLimited": "containers of modal.com: needs an account there"}
HEALTHY_S = 240
LIMIT_S = 600.0  # of one fault: NousCoderNoSteps looks at five minutes
PARTS = ("redis", "broker", "verifier", "verifier.sandbox.pool", "generation", "learner", "backup")
LITTLE = (*(f"{part}.resources.requests.cpu=5m" for part in PARTS), "learner.runResources.requests.cpu=5m")
RUN = (*LITTLE, "config.run.total_batches=1000", "prometheusRule.workAgeSeconds=60")
SMALL = tuple(word for value in SMALL_RUN for word in ("--set-json", value))
VOLUME_MIB = {"runs": 512, "redis": 256}
RUNNERS_GONE = ("RunnersMissing", "QueueSlow", "QueueOld", "WorkOld", "NoSteps")

table: list[tuple[str, str, float]] = []  # alert, fault, seconds


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with running(tmp_path_factory.mktemp("prometheus")) as one:
        yield one


class Faults:
    """Faults of one release, and the alerts that each must raise."""

    def __init__(self, prometheus: Prometheus, release: Release) -> None:
        self.prometheus, self.release = prometheus, release
        self.pending: dict[str, tuple[str, float]] = {}  # alert -> fault, when it was planted
        self.alerts = prometheus.follow(release)

    def expect(self, fault: str, *names: str) -> None:
        """A fault is planted now, for which these alerts must fire. They must not fire before."""
        wanted = {f"NousCoder{name}" for name in names}
        assert not wanted & self.prometheus.firing(self.release), fault
        self.pending |= {name: (fault, time.monotonic()) for name in wanted}

    def wait(self, limit_s: float = LIMIT_S) -> None:
        """Wait until all alerts of the planted faults fire."""

        def all_fire() -> bool:
            for name in self.prometheus.firing(self.release) & self.pending.keys():
                fault, planted_s = self.pending.pop(name)
                table.append((name, fault, time.monotonic() - planted_s))
                print(f"\n{row(*table[-1])}", flush=True)
            return not self.pending

        self.release.until(all_fire, f"an alert of {self.pending}", limit_s, every_s=0.5)

    def silent(self, *names: str) -> None:
        """Wait until these alerts do not fire any more."""
        wanted = {f"NousCoder{name}" for name in names}
        self.release.until(lambda: not wanted & self.prometheus.firing(self.release), f"{names} are over", 300)

    def upgrade(self, *sets: str, more: tuple[str, ...] = ()) -> None:
        words = (word for each in sets for word in ("--set", each))
        self.release.helm("upgrade", NAME, str(CHART), "--reset-then-reuse-values", *words, *more)
        self.prometheus.follow(self.release)


def row(name: str, fault: str, seconds: float) -> str:
    return f"| {name} | {fault} | {seconds:.0f} |"


@contextlib.contextmanager
def small_claims(release: Release) -> Iterator[dict[str, Path]]:
    """Claims of few MiB, as local volumes in this machine's memory. Yields their folders."""
    (node,) = release.kubectl(
        "get", "nodes", "-l", "!nouscoder.io/kwok", "-o", "jsonpath={.items[*].metadata.name}"
    ).split()
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    made: dict[str, Path] = {}
    try:
        for name, size in VOLUME_MIB.items():
            made[name] = Path("/var/lib/k8s-cluster") / f"{release.namespace}-{name}"
            made[name].mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}m", "tmpfs", str(made[name])], check=True)
            common: dict[str, Any] = {"accessModes": ["ReadWriteOnce"], "storageClassName": ""}
            volume = {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": f"{release.namespace}-{name}"},
                "spec": common | {
                    "capacity": {"storage": f"{size}Mi"},
                    "persistentVolumeReclaimPolicy": "Retain",
                    "local": {"path": str(made[name])},
                    "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
                },
            }  # fmt: skip
            claim = {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": f"{NAME}-{name}"},
                "spec": common | {
                    "volumeName": f"{release.namespace}-{name}",
                    "resources": {"requests": {"storage": f"{size}Mi"}},
                },
            }  # fmt: skip
            release.kubectl("apply", "-f", "-", given=yaml.safe_dump_all([volume, claim]))
        yield made
    finally:
        release.helm("uninstall", NAME, "--ignore-not-found", "--wait")
        release.kubectl("delete", "pvc", "--all", limit_s=120)
        for name, place in made.items():
            release.kubectl("delete", "pv", f"{release.namespace}-{name}", "--ignore-not-found", limit_s=120)
            subprocess.run(["umount", str(place)], check=True)
            place.rmdir()


def test_a_healthy_run_raises_none_and_every_fault_of_a_run_raises_its_own(
    prometheus: Prometheus,
) -> None:
    with kube_state_metrics(prometheus), installed_release() as release, small_claims(release) as claims:
        given = (f"learner.persistence.existingClaim={NAME}-runs", f"redis.persistence.existingClaim={NAME}-redis")
        release.install(*(word for each in (*RUN, *given) for word in ("--set", each)), *SMALL)
        faults = Faults(prometheus, release)
        parts = {"redis", "broker", "verifier", "sandbox", "generation", "learner"}
        release.until(lambda: release.all_ready(parts) and release.step() >= 1, "the run trains", 900)
        ready_s = time.monotonic()
        release.until(lambda: time.monotonic() - ready_s > HEALTHY_S, "the healthy time", HEALTHY_S + 60)
        assert prometheus.firing(release, over=f"[{HEALTHY_S}s]") == set()
        assert prometheus.firing(release, "real", over="[1h]") == set()
        print(f"\nno alert in {HEALTHY_S} healthy seconds to batch {release.step()}, with the short durations too")
        pods_fail(faults, release)
        redis_fails(faults, release, claims["redis"])
        volume_is_full(faults, claims["runs"])
        runners_do_not_come(faults, release)
        run_ends(faults, release)


def pods_fail(faults: Faults, release: Release) -> None:
    broker = f"deployment/{NAME}-broker"
    sleeps = {"spec": {"template": {"spec": {"containers": [{"name": "broker", "command": ["sleep", "3600"]}]}}}}
    faults.expect("the broker's program only sleeps", "ServiceDown")
    release.kubectl("patch", broker, "-p", json.dumps(sleeps))
    faults.wait()
    release.kubectl("rollout", "undo", broker)
    release.kubectl("rollout", "status", broker, "--timeout=300s", limit_s=320)
    faults.silent("ServiceDown", "PodsMissing")
    faults.expect("the broker is scaled to 0", "PodsMissing")
    release.kubectl("scale", broker, "--replicas=0")
    faults.wait()
    release.kubectl("scale", broker, "--replicas=1")
    release.kubectl("rollout", "status", broker, "--timeout=300s", limit_s=320)


def redis_fails(faults: Faults, release: Release, claim: Path) -> None:
    inside = ("exec", f"{NAME}-redis-0", "-c", "redis", "--", "sh", "-c")

    def redis(command: str) -> str:
        return release.kubectl(*inside, f"REDISCLI_AUTH=$(cat /etc/redis/password) redis-cli -e {command}")

    limit = int(redis("config get maxmemory").split()[-1])
    assert limit > 0, "Redis refuses nothing before the kernel kills it"
    faults.expect("76 % of Redis' memory is taken", "RedisFull")
    redis(f"setrange filler {int(limit * 0.76)} x")
    faults.wait()
    redis("del filler")
    faults.expect("somebody writes one rollout more to Redis", "LedgerUnbalanced")
    redis("hincrby nouscoder:{demo}:meta admitted 1")
    faults.wait()
    redis("hincrby nouscoder:{demo}:meta admitted -1")
    faults.expect("Redis' claim is 95 % full", "VolumeNearlyFull")
    fill(claim, 0.95)
    faults.wait()
    (claim / "filler").unlink()
    broken = {"spec": {"template": {"spec": {"containers": [{"name": "redis", "command": ["false"]}]}}}}
    name = f"statefulset/{NAME}-redis"
    faults.expect("Redis cannot start: its program ends at once", "RedisDown")
    release.kubectl("patch", name, "-p", json.dumps(broken))
    faults.wait()
    release.kubectl("rollout", "undo", name)
    release.kubectl("delete", "pod", f"{NAME}-redis-0", limit_s=120)
    faults.silent("RedisDown", "VolumeNearlyFull", "ServiceDown", "PodsMissing")


def fill(folder: Path, share: float) -> None:
    """Take so much of the whole space, as a file."""
    space = os.statvfs(folder)
    free = space.f_bavail - int((1 - share) * space.f_blocks)
    with (folder / "filler").open("wb") as file, contextlib.suppress(OSError):
        for _ in range(max(free, 0)):
            file.write(bytes(space.f_frsize))


def volume_is_full(faults: Faults, claim: Path) -> None:
    faults.expect("the run's claim is full", "VolumeNearlyFull", "CheckpointsFail")
    fill(claim, 1.0)
    faults.wait()
    (claim / "filler").unlink()
    faults.silent("VolumeNearlyFull")


def runners_do_not_come(faults: Faults, release: Release) -> None:
    """A quota keeps the runners away; meanwhile the pod of the backup finds no node."""
    step = release.step()
    release.until(lambda: release.step() > step, "a further batch", 300)
    soon = datetime.now(UTC) + timedelta(minutes=2)
    backup = (
        *(f"backup.schedule={soon.minute} {soon.hour} * * *", "backup.deadlineSeconds=60"),
        *("backup.resources.requests.cpu=500", "prometheusRule.backupHours=0.02", "backup.persistence.size=1Gi"),
    )
    faults.expect("no node has room for the backup (backupHours 0.02)", "BackupOld", "BackupFailed")
    faults.upgrade(*backup)
    faults.expect("a quota admits no runner pod (workAgeSeconds 60)", *RUNNERS_GONE)
    release.kubectl("create", "quota", "none", "--hard=pods=0", "-n", release.runners)
    release.kubectl("delete", "pods", "--all", "--force", "-n", release.runners, limit_s=120)
    token = release.secret(f"{NAME}-verifier-tokens", "token")
    with release.forward(f"svc/{NAME}-verifier", 8080) as port:

        async def wait_for_runners() -> None:
            tests = {"type": "stdin", "cases": [{"input": "4", "output": "8"}]}
            async with AsyncClient(f"http://127.0.0.1:{port}", token=token) as client:
                asked = asyncio.create_task(client.grade(code="print(8)", tests=tests))
                await asyncio.to_thread(faults.wait, 900)
                release.kubectl("delete", "quota", "none", "-n", release.runners)
                with contextlib.suppress(GradingFailed):
                    await asked

        asyncio.run(wait_for_runners())
    faults.silent(*RUNNERS_GONE)


def run_ends(faults: Faults, release: Release) -> None:
    step = release.step()
    release.until(lambda: release.step() > step, "a further batch", 600)
    last = f"config.run.total_batches={release.step() + 2}"
    faults.expect("the run makes its last batch", "RunFinished")
    faults.upgrade(last)
    faults.wait(900)
    # The rule is another one where the end of the run must release its pods.
    faults.upgrade("whenFinished=release", "ttlSeconds=60")
    release.kubectl("delete", "role", f"{NAME}-learner")
    faults.silent("RunFinished")
    faults.expect("whenFinished is release, and the right to do it is gone", "RunFinished")
    faults.wait(900)


def test_every_fault_of_the_grading_service_raises_its_own(prometheus: Prometheus, tmp_path: Path) -> None:
    with installed_release() as release:
        host = f"{NAME}-verifier.{release.namespace}.svc"
        files = make_certificate(tmp_path, f"DNS:{host}", "IP:127.0.0.1")  # for two days
        release.kubectl("create", "secret", "generic", "short", *files)
        encrypted = ("--set", "tls.enabled=true,tls.existingSecret=short")
        release.install("-f", str(CHART / "values-verifier.yaml"), *encrypted)
        faults = Faults(prometheus, release)
        faults.expect("a certificate ends in two days", "CertificateExpires")
        release.until(lambda: release.all_ready({"verifier", "sandbox"}), "the verifier is ready", 300)
        token = release.secret(f"{NAME}-verifier-tokens", "token")
        with release.forward(f"svc/{NAME}-verifier", 8080) as port:
            patience, tls = Patience(internal_retries=0), trusting(tmp_path)
            asyncio.run(judges_crash(faults, AsyncClient(f"https://127.0.0.1:{port}", patience, token=token, tls=tls)))
        faults.wait()
        image = f"localhost/nouscoder-sandbox-wrong:{tag()}"
        build_wrong(tmp_path, image)
        wrong = ("verifier.sandbox.image.repository=nouscoder-sandbox-wrong",)
        faults.expect("the runners' Python adds in place of multiplying", "RunnersQuarantined")
        faults.upgrade(*wrong)
        faults.wait()
        no_node = ("verifier.sandbox.image.repository=nouscoder-sandbox", "verifier.sandbox.pool.nodeSelector.no=such")
        faults.expect("no node has the runners' label", "RunnersDoNotStart")
        faults.upgrade(*no_node)
        faults.wait()


def tag() -> str:
    return TAG or str(yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"])


async def judges_crash(faults: Faults, client: AsyncClient) -> None:
    """Submissions whose checker ends with an exit code that no checker has, until the alert fires."""
    tests = {
        "type": "checker",
        "checker": {"language": "python", "code": "raise SystemExit(3)"},
        "cases": [{"input": "1", "output": "1"}],
    }
    faults.expect("the checker of a problem crashes", "InternalErrors")
    async with client:
        waiting = asyncio.create_task(asyncio.to_thread(faults.wait))
        number = 0
        while not waiting.done():
            number += 1
            with contextlib.suppress(GradingFailed):
                answer = await client.grade(code=f"print(1)  # {number}", tests=tests)
                assert answer["verdict"] == "internal_error", answer
        await waiting


def build_wrong(folder: Path, image: str) -> None:
    """An image of runners whose harness changes each program."""
    harness = "/opt/nouscoder/harness"
    (folder / "wrong.py").write_text(
        "\n\n_as_written = compile_source\n\n\ndef compile_source(source, prelude):\n"
        "    return _as_written(source.replace(b' * ', b' + '), prelude)\n"
    )
    lines = (
        *(f"FROM localhost/nouscoder-sandbox:{tag()}", "COPY wrong.py /wrong.py", "USER 0"),
        f"RUN cat /wrong.py >>{harness}/candidate.py && rm -f {harness}/__pycache__/candidate.*",
        "USER 10001:10001",
    )
    (folder / "Dockerfile").write_text("\n".join(lines))
    builder = ROOT.parent / "shared" / "cluster" / "build-image"
    command = [str(builder), str(folder / "Dockerfile"), str(folder), image]
    subprocess.run(command, check=True, capture_output=True, timeout=600)


def test_every_fault_of_old_policies_and_lost_workers_raises_its_own(prometheus: Prometheus) -> None:
    with installed_release() as release:
        old = ("config.broker.pipeline_k=6", "config.broker.max_staleness=1", "config.broker.max_deliveries=1")
        release.install(*(word for each in (*RUN, *old) for word in ("--set", each)), *SMALL)
        faults = Faults(prometheus, release)
        fault = "generation is 6 batches ahead, and max_staleness is 1"
        faults.expect(fault, "RolloutsStale", "StalenessAtBound")
        faults.wait(1500)
        pod = release.pod("generation").name
        faults.expect("generation is killed with its leases (max_deliveries 1)", "DeadLetters")
        release.kubectl("delete", "pod", pod, "--grace-period=0", "--force", limit_s=120)
        faults.wait()


def test_no_rule_is_left_out() -> None:
    """The tests before have planted a fault for each rule, except where this says why not."""
    rows = [row(*each) for each in table]
    without = [f"| {name} | not here: {why} | |" for name, why in NOT_HERE.items()]
    print(f"\ndurations divided by {FASTER}, scraped and evaluated every {SCRAPE_S} s")
    print("\n".join(["| rule | planted fault | seconds until it fired |", "|---|---|---|", *rows, *without]))
    assert {name for name, _, _ in table} == EVERY - NOT_HERE.keys()
