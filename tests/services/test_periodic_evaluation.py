"""Evaluations during a run: beside the training, of one version, which is kept, and the end of a run early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from nouscoder.config import Config, load_config
from nouscoder.domain.policy import PolicyManifest, Shard
from nouscoder.domain.run_status import RunStatus
from nouscoder.errors import NousCoderError
from nouscoder.evaluation.pass_at_1 import EVALUATION_ERRORS
from nouscoder.learner.model.synthetic import random_policy
from nouscoder.learner.publication.publisher import PolicyPublisher, StagedPolicy
from nouscoder.retry import Retry
from nouscoder.rpc.generation_client import PolicyReplaced
from nouscoder.run import evaluation, periodic_evaluation
from nouscoder.run.evaluation import make_up
from nouscoder.run.evaluation_files import drop_worse, kept_checkpoint_folder, recorded_evaluations
from nouscoder.run.folder import RunFolder
from nouscoder.run.kept_checkpoint import NotKept
from nouscoder.run.periodic_evaluation import PeriodicEvaluation
from nouscoder.run.view import PlainView


@dataclass
class Run:
    """A run folder, a learner that publishes when the test says so, and evaluations that end when the test says so."""

    config: Config
    folder: RunFolder
    version: int = 0
    scores: dict[int, float] = field(default_factory=dict)
    measured: list[int] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    watch_every_s: float = 0.01
    evaluation_retry: Retry = Retry("evaluation", EVALUATION_ERRORS, max_tries=1)

    def check(self) -> None:
        """All services are alive."""

    def publish(self, version: int) -> None:
        """The learner publishes, and removes what is older than the newest two."""
        PolicyPublisher(self.folder.path / "policies", 2).write(
            StagedPolicy.of(random_policy(version), version, version)
        )
        self.version = version

    @property
    def status(self) -> RunStatus:
        """What the broker says."""
        return cast(RunStatus, SimpleNamespace(policy_version=self.version, finished=bool(self.finished)))

    @property
    def kept(self) -> list[str]:
        """What is kept of policy versions."""
        return sorted(path.name for path in self.folder.path.glob("kept/*"))

    @asynccontextmanager
    async def kept_checkpoint(self, config: Config, from_version: int) -> AsyncIterator[int]:
        """The learner keeps the checkpoint of the first version from `from_version` on."""
        await until(lambda: self.version >= from_version)
        version = self.version
        kept_checkpoint_folder(self.folder.path, version).mkdir(parents=True, exist_ok=True)
        yield version

    async def announced_policy(self, config: Config, from_version: int, limit_s: float) -> PolicyManifest:
        return PolicyManifest(self.version, self.version, "", (Shard("model.safetensors", "0" * 64, 1),))

    async def measure(self, config: Config, manifest: PolicyManifest, *_: object, **how: bool) -> dict[str, Any]:
        self.measured.append(manifest.policy_version)
        await self.go_on.wait()
        return {"policy_version": manifest.policy_version, "pass_at_1": self.scores[manifest.policy_version]}

    async def finish_run(self, evaluation: PeriodicEvaluation, reason: str) -> None:
        self.finished.append(reason)

    def evaluation(self) -> PeriodicEvaluation:
        return PeriodicEvaluation(self.folder, cast(Any, self), PlainView(Console(quiet=True)))


def weights_and_checkpoint(version: int) -> list[str]:
    """What is kept of a version."""
    return [f"{version:08d}", f"{version:08d}.checkpoint"]


async def stepped_until_measured(run: Run, periodic: PeriodicEvaluation, versions: list[int]) -> None:
    async with asyncio.timeout(60):
        while run.measured != versions:
            await periodic.step(run.status)
            await asyncio.sleep(0.01)


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def keeping(run: Run, most: int) -> None:
    """Let as many policies wait."""
    section = run.config.evaluation.model_copy(update={"keep_put_off": most})
    run.config = run.config.model_copy(update={"evaluation": section})


@pytest.fixture
async def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Run]:
    settings = [
        "evaluation.every_batches=2",
        "evaluation.keep_put_off=0",
        "evaluation.end_after_no_gain=2",
        "run.total_batches=100",
    ]
    config = load_config(None, [f'run.root="{tmp_path}"', *settings])
    folder = RunFolder.create(config)
    folder.write_json("evaluation_before.json", {"policy_version": 0, "pass_at_1": 0.1})
    made = Run(config, folder)
    monkeypatch.setattr(periodic_evaluation, "kept_checkpoint", made.kept_checkpoint)
    monkeypatch.setattr(periodic_evaluation, "announced_policy", made.announced_policy)
    for module in (periodic_evaluation, evaluation):  # during the training, and after it
        monkeypatch.setattr(module, "measure", made.measure)
    monkeypatch.setattr(PeriodicEvaluation, "_finish_run", lambda self, reason: made.finish_run(self, reason))
    yield made
    folder.close()


async def test_training_goes_on_during_an_evaluation_and_the_weights_that_it_measures_are_kept(run: Run) -> None:
    run.scores = {2: 0.5, 6: 0.4}
    run.publish(1)
    async with run.evaluation() as periodic:
        await periodic.step(run.status)
        assert run.measured == [], "a second batch is missing"
        run.publish(2)
        await periodic.step(run.status)
        await until(lambda: run.measured == [2])
        for version in (3, 4, 5, 6):  # `step` returns, and the learner removes version 2
            run.publish(version)
            await periodic.step(run.status)
        assert not (run.folder.path / "policies" / "00000002").exists()
        assert run.kept == weights_and_checkpoint(2)
        run.go_on.set()
        await until(lambda: (run.folder.path / "evaluations" / "00000002.json").exists())
        await until(lambda: run.kept == weights_and_checkpoint(2))
        # Version 6 is due now. It is worse, so its weights go.
        async with asyncio.timeout(60):
            while run.measured != [2, 6]:
                await periodic.step(run.status)
                await asyncio.sleep(0.01)
    assert [(each.policy_version, each.pass_at_1) for each in recorded_evaluations(run.folder.path)] == [
        (0, 0.1),
        (2, 0.5),
        (6, 0.4),
    ]
    assert run.kept == weights_and_checkpoint(2)
    assert run.finished == []


async def test_a_run_ends_after_evaluations_without_a_gain(run: Run) -> None:
    run.scores = {2: 0.1, 4: 0.0}
    run.go_on.set()
    async with run.evaluation() as periodic:
        for version in (2, 4):
            run.publish(version)
            async with asyncio.timeout(60):
                while not (run.folder.path / "evaluations" / f"{version:08d}.json").exists():
                    await periodic.step(run.status)
                    await asyncio.sleep(0.01)
        await until(lambda: (periodic._running is None) or periodic._running.done())
        await periodic.step(run.status)
    assert run.finished == ["2 evaluations were not above pass@1 0.100"]
    assert run.kept == []


async def test_a_policy_that_was_replaced_is_not_measured_but_a_later_one_is(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.scores = {3: 0.5}
    run.go_on.set()

    async def replaced(config: Config, manifest: PolicyManifest) -> dict[str, Any]:
        if manifest.policy_version == 2:
            run.measured.append(2)
            raise PolicyReplaced("version 3 is in use")
        return await run.measure(config, manifest)

    monkeypatch.setattr(periodic_evaluation, "measure", replaced)
    run.publish(2)
    async with run.evaluation() as periodic:
        await periodic.step(run.status)
        await until(lambda: run.measured == [2] and run.kept == [])
        run.publish(3)
        await stepped_until_measured(run, periodic, [2, 3])
    assert [each.policy_version for each in recorded_evaluations(run.folder.path)] == [0, 3]
    assert run.kept == weights_and_checkpoint(3)


async def test_what_came_due_while_another_ran_is_measured_after_the_training(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """Versions 4 and 6 come due while version 2 is measured, and 8 too; two may wait."""
    keeping(run, 2)
    run.scores = {2: 0.5, 4: 0.7, 6: 0.4}
    async with run.evaluation() as periodic:
        for version in range(1, 10):
            run.publish(version)
            await periodic.step(run.status)
            if version == 2:
                await until(lambda: run.measured == [2])
            if version % 2 == 0 and periodic._keeping is not None:
                await periodic._keeping
        run.finished = ["its batches are done"]
        run.go_on.set()
    assert run.kept == [name for version in (2, 4, 6) for name in weights_and_checkpoint(version)]
    view = PlainView(Console(soft_wrap=True))
    await make_up(run.folder, cast(Any, run), view)
    assert run.measured == [2, 4, 6]
    said = capsys.readouterr().out
    assert "pass@1 of version 4, which was put off: 0.700" in said
    assert "1 evaluations were left out" in said
    drop_worse(run.folder.path)
    assert run.kept == weights_and_checkpoint(4)


async def test_a_version_that_came_later_than_asked_for_is_not_kept_twice(run: Run) -> None:
    """The learner keeps version 4 for the evaluation that asked for 2, and 4 is due as well."""
    keeping(run, 2)
    run.scores = {4: 0.5}
    run.publish(1)
    async with run.evaluation() as periodic:
        await periodic.step(run.status)
        run.publish(4)
        await periodic.step(run.status)
        assert periodic._keeping is None
        run.go_on.set()
        await stepped_until_measured(run, periodic, [4])
        run.finished = ["its batches are done"]
    assert run.kept == weights_and_checkpoint(4)


async def test_an_interrupted_evaluation_is_made_up_for(run: Run) -> None:
    keeping(run, 1)
    run.scores = {2: 0.5, 4: 0.5}
    run.publish(2)
    with suppress(NousCoderError):
        async with run.evaluation() as periodic:
            await periodic.step(run.status)
            await until(lambda: run.measured == [2])
            raise NousCoderError("killed")
    run.go_on.set()
    run.publish(3)
    async with run.evaluation() as periodic:
        await periodic.step(run.status)  # version 4 is due next; version 2 waits
        run.publish(4)
        await stepped_until_measured(run, periodic, [2, 4])
    await make_up(run.folder, cast(Any, run), PlainView(Console(quiet=True)))
    assert [each.policy_version for each in recorded_evaluations(run.folder.path)] == [0, 2, 4]


async def test_an_evaluation_that_is_not_possible_ends_the_run_with_its_reason(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(config: Config, manifest: PolicyManifest) -> dict[str, Any]:
        raise NousCoderError("the verifier is gone")

    monkeypatch.setattr(periodic_evaluation, "measure", failing)
    run.publish(2)
    with pytest.raises(NousCoderError, match="the verifier is gone"):
        async with run.evaluation() as periodic:
            await periodic.step(run.status)


async def test_an_error_of_the_run_ends_its_evaluation(run: Run) -> None:
    run.publish(2)

    async def dying() -> None:
        async with run.evaluation() as periodic:
            await periodic.step(run.status)
            await until(lambda: run.measured == [2])
            raise NousCoderError("a service is dead")

    with pytest.raises(NousCoderError, match="a service is dead"):
        await dying()
    assert [task for task in asyncio.all_tasks() if task.get_name() == "evaluation"] == []
    assert [each.policy_version for each in recorded_evaluations(run.folder.path)] == [0]


async def test_what_a_crash_left_is_removed_with_the_next_evaluation(run: Run) -> None:
    run.scores = {2: 0.5}
    run.go_on.set()
    for name in ("00000001", "00000001.checkpoint", "00000001.checkpoint.part", "00000007.part"):
        (run.folder.path / "kept" / name).mkdir(parents=True)
        (run.folder.path / "kept" / name / "file").write_text("of a version that was not measured to the end")
    run.publish(2)
    async with run.evaluation() as periodic:
        await periodic.step(run.status)
    assert run.kept == weights_and_checkpoint(2)


async def test_a_policy_whose_checkpoint_was_not_kept_is_not_the_best(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.scores = {2: 0.9, 3: 0.5}
    run.go_on.set()

    @asynccontextmanager
    async def kept_from_3(config: Config, from_version: int) -> AsyncIterator[int]:
        async with run.kept_checkpoint(config, from_version) as version:
            yield version
        if version == 2:
            raise NotKept("the disk of the learner was full")

    monkeypatch.setattr(periodic_evaluation, "kept_checkpoint", kept_from_3)
    run.publish(2)
    async with run.evaluation() as periodic:
        await periodic.step(run.status)
        await until(lambda: run.measured == [2] and run.kept == [])
        run.publish(3)
        await stepped_until_measured(run, periodic, [2, 3])
    assert [each.policy_version for each in recorded_evaluations(run.folder.path)] == [0, 3]
    assert run.kept == weights_and_checkpoint(3)
