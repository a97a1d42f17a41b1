"""A run with external services, each started separately on loopback. Policies are fetched from the learner.

The whole loop runs with a tiny torch policy, real sandboxes and a real Redis. Every call uses mutual TLS.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.free_addresses import free_addresses

from nouscoder.broker.redis_server import start_redis
from nouscoder.config import dump_config, load_config
from nouscoder.http_server.api_keys import new_api_key

pytestmark = pytest.mark.alone

TINY = (
    "demo.train_problems=60",
    "demo.held_out_problems=6",
    "demo.warm_start_share=0.002",
    "demo.warm_start_threads=1",
    "run.services=external",
    "run.peer_patience_s=900",
    "learner.start_after=evaluation_before.json",
    "learner.folder_patience_s=120",
    "learner.serve_after_run=true",
    "run.total_batches=4",
    "broker.group_size=4",
    "broker.batch_size=16",
    "broker.drop_zero_variance=false",
    "broker.lease_s=2.0",
    "broker.batch_lease_s=3.0",
    "generation.max_running=32",
    "generation.sampling.max_new_tokens=24",
    "generation.policy_from=learner",
    "learner.steps_per_batch=2",
    "learner.keep_policies=2",
    "learner.policy_deltas=true",
    "learner.peak_flops=1e9",
)
NUM_STEPS = 8
TLS_FILES = {"certificate": "tls.crt", "key": "tls.key", "ca": "ca.crt"}
VERIFIER_TLS_FILES = {"certificate": "tls.crt", "key": "tls.key", "client_ca": "ca.crt"}
SERVICES = ("broker", "verifier", "generation", "learner")


def make_certificates(folder: Path) -> None:
    """Make an authority and one certificate for all services of the run, as in a small installation."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)

    new_key = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(*new_key, "-x509", "-days", "2", "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=test authority")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    openssl(*new_key, "-keyout", "tls.key", "-out", "tls.csr", "-subj", "/CN=nouscoder")
    sign = ("x509", "-req", "-days", "2", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial")
    openssl(*sign, "-in", "tls.csr", "-out", "tls.crt", "-extfile", "names")


class Site:
    """The processes of one run, each with the files and settings of a separate pod."""

    def __init__(self, root: Path, overrides: tuple[str, ...]) -> None:
        self.root = root
        addresses = iter(free_addresses(13))
        places = [
            f'{name}.{key}="{next(addresses)}"' for name in SERVICES for key in ("grpc", "metrics", "grpc_health")
        ]
        self.pages = next(addresses)
        self.redis = start_redis(root / "redis")
        (root / "redis-url").write_text(self.redis.url + "\n")
        make_certificates(root)
        token, line = new_api_key("run")
        (root / "tokens").write_text(line + "\n")
        (root / "token").write_text(token + "\n")
        self.config = load_config(
            None,
            [
                *TINY,
                *places,
                f'run.root="{root / "runs"}"',
                f'run.pages="{self.pages}"',
                f'broker.redis_url_file="{root / "redis-url"}"',
                f'problems.train="{root / "problems/train.jsonl"}"',
                f'problems.held_out="{root / "problems/held_out.jsonl"}"',
                f'generation.cache="{root / "cache"}"',
                f'verifier.tokens_file="{root / "tokens"}"',
                f'run.verifier_token_file="{root / "token"}"',
                *(f'tls.{key}="{root / file}"' for key, file in TLS_FILES.items()),
                *(f'verifier.tls.{key}="{root / file}"' for key, file in VERIFIER_TLS_FILES.items()),
                *overrides,
            ],
        )
        self.file = root / "config.toml"
        self.file.write_text(dump_config(self.config))
        self.folder = self.config.run.folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *names: str) -> None:
        for name in names:
            command = ["train", str(self.file)] if name == "train" else ["serve", name, "--config", str(self.file)]
            command += ["--broker"] if name == "verifier" else []
            with (self.root / f"{name}.log").open("ab") as log:
                self.processes[name] = subprocess.Popen(
                    [sys.executable, "-m", "nouscoder", *command], stdout=log, stderr=log, start_new_session=True
                )

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)

    def restart_redis(self) -> None:
        """Kill Redis with SIGKILL, and start it again after a pause with the same append-only file."""
        assert self.redis.pid is not None
        os.kill(self.redis.pid, signal.SIGKILL)
        self.until(lambda: not self.redis.is_running(), "Redis is gone")
        time.sleep(0.4)
        self.redis = start_redis(self.root / "redis")

    def stop(self, name: str, limit_s: float = 60) -> int:
        process = self.processes.pop(name)
        process.terminate()
        return process.wait(limit_s)

    def log(self, name: str) -> str:
        file = self.root / f"{name}.log"
        return file.read_text(encoding="utf8", errors="replace") if file.exists() else ""

    def events(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log(name).splitlines() if line.startswith("{")]

    def until(self, condition: Callable[[], bool], what: str, limit_s: float = 240) -> None:
        end = time.monotonic() + limit_s
        while not condition():
            for name, process in self.processes.items():
                if process.poll() is not None:
                    pytest.fail(f"{name} exited with {process.poll()} before {what}:\n{self.log(name)[-3000:]}")
            if time.monotonic() > end:
                ends = "\n".join(f"--- {name}\n{self.log(name)[-1500:]}" for name in (*SERVICES, "train"))
                pytest.fail(f"{what} did not happen within {limit_s} s:\n{ends}")
            time.sleep(0.05)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "nouscoder", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    def steps(self) -> list[int]:
        file = self.folder / "metrics.jsonl"
        lines = file.read_text(encoding="utf8").split("\n")[:-1] if file.exists() else []
        return [json.loads(line)["step"] for line in lines]

    def page(self, name: str) -> bytes:
        with urllib.request.urlopen(f"http://{self.pages}/{name}", timeout=60) as page:
            return bytes(page.read())

    def has_summary(self) -> bool:
        return (self.folder / "summary.json").exists()

    def close(self) -> None:
        for name in list(self.processes):
            self.kill(name)
        self.redis.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    sites: list[Site] = []

    def make(*overrides: str) -> Site:
        sites.append(Site(tmp_path, overrides))
        return sites[-1]

    yield make
    for made in sites:
        made.close()


def health(address: str, service: str = "readiness") -> str:
    """The answer of the health port; GONE when nothing listens."""
    with grpc.insecure_channel(address) as channel:
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
        except grpc.RpcError:
            return "GONE"
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def assert_complete(run: Site) -> None:
    """Check that the run completed: every step once, the ledger balanced, both evaluations done."""
    run.until(run.has_summary, "the summary")
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["balanced"] is True
    assert summary["ledger"]["trained"] == 4 * 16
    assert run.steps() == list(range(1, NUM_STEPS + 1))
    for when, version in (("before", 0), ("after", 4)):
        assert json.loads((run.folder / f"evaluation_{when}.json").read_text())["policy_version"] == version


@pytest.mark.heavy
@pytest.mark.timeout(900)  # about a minute alone; several times that on a busy machine
def test_a_run_with_external_services_completes_and_survives_a_kill_of_train(site: Callable[..., Site]) -> None:
    run = site()
    run.start("generation", "verifier")
    run.until(lambda: health(run.config.generation.grpc_health, "liveness") == "SERVING", "generation is alive")
    # While it waits for the learner's files it is alive, so that no probe kills it, but not ready.
    assert health(run.config.generation.grpc_health) == "NOT_SERVING"
    assert run.command("prepare-run", str(run.file)).returncode == 0
    run.start("broker", "learner")
    learner_waits = '"waiting for the evaluation of the first policy"'
    run.until(lambda: learner_waits in run.log("learner"), "the learner waits for the evaluation")
    assert not (run.folder / "policies").exists()

    run.start("train")
    run.until(lambda: len(run.steps()) >= 2, "the first batch")
    run.kill("train")
    run.until(lambda: len(run.steps()) >= 4, "the second batch, without the coordinator")
    run.kill("learner")
    run.start("learner", "train")
    run.restart_redis()
    assert_complete(run)

    # All weights came from the learner, and only the newest two are kept.
    taken, fetched = (
        [event["policy_version"] for event in run.events("generation") if event["event"] == name]
        for name in ("policy taken over", "policy fetched")
    )
    assert taken == sorted(set(taken))
    assert (taken[0], taken[-1]) == (0, 4)
    assert set(taken) <= set(fetched)
    assert len(fetched) == len(set(fetched))  # an older one may arrive second: it is fetched but not loaded
    assert len(list((run.root / "cache").glob("*.safetensors"))) <= 2
    assert not list((run.root / "cache").rglob("*.part"))
    assert {path.name for path in (run.root / "cache/first").iterdir()} >= {"config.json", "tokenizer.json"}

    assert_pages(run)
    assert_a_finished_run_is_only_served(run)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_run_that_publishes_adapters_completes_with_a_learner_killed_in_between(site: Callable[..., Site]) -> None:
    """Generation fetches the first policy once, and then only adapters."""
    run = site(
        "learner.policy_deltas=false",
        "learner.lora.rank=4",
        "learner.lora.publication=adapter",
        "learner.learning_rate=1e-3",
    )
    assert run.command("prepare-run", str(run.file)).returncode == 0
    run.start(*SERVICES, "train")
    run.until(lambda: len(run.steps()) >= 4, "the second batch", limit_s=300)
    run.kill("learner")
    run.start("learner")
    assert_complete(run)
    taken = [event["policy_version"] for event in run.events("generation") if event["event"] == "policy taken over"]
    assert taken == sorted(set(taken))
    assert (taken[0], taken[-1]) == (0, 4)
    first = run.folder / "policy" / "model.safetensors"
    bases = list((run.root / "cache").rglob("model.safetensors"))
    assert [base.read_bytes() == first.read_bytes() for base in bases] == [True]
    adapters = sorted((run.root / "cache").rglob("adapter_model.safetensors"))
    assert 1 <= len(adapters) <= 2
    newest = run.folder / "policies" / "00000004" / "adapter_model.safetensors"
    assert adapters[-1].read_bytes() == newest.read_bytes()
    sizes = {"adapter": newest.stat().st_size, "whole policy": first.stat().st_size}
    print(json.dumps({"bytes": sizes, "versions taken over": taken}))
    assert sizes["adapter"] < sizes["whole policy"] / 4
    assert not list((run.folder / "policies").rglob("model*.safetensors"))
    for arguments, name in (((), "model.safetensors"), (("--adapter",), "adapter_model.safetensors")):
        to = run.root / f"exported{len(arguments)}"
        exported = run.command("export", str(run.folder), "--to", str(to), *arguments)
        assert exported.returncode == 0, exported.stderr
        assert [file.name for file in to.glob("*.safetensors")] == [name]


def assert_pages(run: Site) -> None:
    """Check that the pages serve the allow-list and no other file."""
    run.until(lambda: "until Ctrl-C" in run.log("train"), "the pages stay")
    assert b"report.html" in run.page("")
    assert b"<svg" in run.page("report.html")
    assert json.loads(run.page("summary.json"))["balanced"] is True
    assert len(run.page("metrics.jsonl").splitlines()) == NUM_STEPS
    assert tomllib.loads(run.page("config.toml").decode())["run"]["services"] == "external"
    for name in (".lock", "../config.toml", "logs/", "policy/config.json", "%2e%2e/redis-url"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            run.page(name)
        with caught.value as answer:
            assert answer.code == 404


def assert_a_finished_run_is_only_served(run: Site) -> None:
    """Processes that start after the end of the run keep running, change nothing, and exit normally on SIGTERM."""
    before = (run.folder / "summary.json").read_text()
    assert run.stop("train") == 0
    assert run.stop("learner") == 0
    (run.root / "train.log").unlink()
    run.start("learner", "train")
    run.until(lambda: "until Ctrl-C" in run.log("train"), "the pages are there again")
    assert "finished: nothing is left to do" in run.log("train")
    run.until(lambda: run.log("learner").count("its policies are served until SIGTERM") == 2, "the learner stays")
    assert health(run.config.learner.grpc_health) == "SERVING"
    assert (run.folder / "summary.json").read_text() == before
    for name in ("train", "learner", "generation", "broker", "verifier"):
        assert run.stop(name) == 0, run.log(name)[-2000:]


PLAN = """
[[plan.stages]]
name = "short"

[[plan.stages]]
name = "long"
from = "best"
set.generation.max_tokens_total = 400
set.generation.sampling.max_new_tokens = 32
set.run.total_batches = 3

[[plan.stages]]
name = "measured"
from = "best"
set.run.total_batches = 0
set.generation.sampling.temperature = 0.6
"""


@pytest.mark.heavy
@pytest.mark.timeout(1200)  # about three minutes alone
def test_a_plan_with_external_services_runs_its_stages_and_survives_a_kill_in_each(site: Callable[..., Site]) -> None:
    """Before, a plan with external services was refused: each stage needed services of its own."""
    run = site("run.total_batches=2", "run.name=plan")
    run.file.write_text(run.file.read_text().replace("[plan]\nstages = []\n", "") + PLAN)
    stages = [run.folder / name for name in ("01-short", "02-long", "03-measured")]
    assert run.command("prepare-run", str(run.file)).returncode == 0
    run.start(*SERVICES, "train")
    run.until(lambda: (stages[0] / "evaluation_before.json").exists(), "the first evaluation", limit_s=400)
    for killed in ("broker", "train", "learner"):
        run.kill(killed)
        run.start(killed)
    run.until(lambda: (stages[1] / "config.toml").exists(), "the second stage begins", limit_s=400)
    for killed in ("train", "generation"):
        run.kill(killed)
        run.start(killed)
    run.until(lambda: (stages[1] / "evaluation_before.json").exists(), "the second evaluation", limit_s=400)
    for killed in ("learner", "broker"):
        run.kill(killed)
        run.start(killed)
    run.restart_redis()
    run.until(lambda: (stages[2] / "config.toml").exists(), "the third stage begins", limit_s=400)
    for killed in ("broker", "train", "generation"):
        run.kill(killed)
        run.start(killed)
    run.until(lambda: "is finished: nothing is left to do" in run.log("train"), "the end of the plan", limit_s=400)

    record = json.loads((run.folder / "plan.json").read_text())
    assert [stage["finished"] for stage in record["stages"]] == [True, True, True]
    for stage, batches, max_new_tokens in zip(stages, (2, 3, 0), (24, 32, 24), strict=True):
        summary = json.loads((stage / "summary.json").read_text())
        assert summary["ledger"]["trained"] == batches * 16
        assert summary["balanced"] is True
        begun = load_config(stage / "config.toml")
        assert begun.generation.sampling.max_new_tokens == max_new_tokens
        measured = json.loads((stage / "evaluation_before.json").read_text())
        assert measured["policy_version"] == 0
    assert (stages[2] / "metrics.jsonl").read_text() == ""
    # A stage begins with weights of the stage before, and evaluates them at its own temperature.
    best = [stage["best_version"] for stage in record["stages"][:2]]
    for before, stage, version in zip(stages, stages[1:], best, strict=False):
        begun_with = Path(load_config(stage / "config.toml").policy.path)
        first = Path(load_config(before / "config.toml").policy.path)
        assert begun_with == (stage / "policy" if version else first)
    for name in ("train", "learner", "generation", "broker", "verifier"):
        assert run.stop(name) == 0, run.log(name)[-2000:]
