"""An objective, a correction, a format and comparators of an installed package of the user, named by entry point."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib import metadata
from multiprocessing.process import BaseProcess
from pathlib import Path

import httpx
import pytest
import torch
from prometheus_client import CollectorRegistry

from nouscoder.config import Config, ConfigError, SandboxSection, VerifierSection, dump_config, load_config
from nouscoder.data.importers.run import import_files
from nouscoder.data.problem_parquet import read_parquet, read_problem_file
from nouscoder.data.problems import line_of
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import Comparator, ComparatorKind, StdinCase, StdinTests
from nouscoder.errors import Unusable
from nouscoder.objectives.base import LossInputs, MinibatchCounts, Objective
from nouscoder.objectives.correction import CorrectionKind, CorrectionSection
from nouscoder.objectives.dapo import Dapo
from nouscoder.objectives.loss import SharedTerms, SurrogateLoss
from nouscoder.objectives.registry import objective_of
from nouscoder.rpc import pairs
from nouscoder.run.preflight import require_gradable
from nouscoder.run.users_code import users_code_faults
from nouscoder.verifier.api.capabilities import Capabilities
from nouscoder.verifier.api.rest import DrainState, make_app
from nouscoder.verifier.grading.grader import local_grader
from nouscoder.verifier.judges import users_comparators
from nouscoder.verifier.sandbox import SandboxUnavailable

OBJECTIVES = '''
"""The policy gradient with an unclipped importance ratio, and a correction of one half."""

from pydantic import Field

from nouscoder.objectives.base import LossInputs, Surrogate, bounded_ratio
from nouscoder.objectives.loss import ObjectiveSection


class Mine(ObjectiveSection):
    """The policy gradient."""

    scale: float = Field(1.0, gt=0, description="factor on the gain")

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The gain of each token, [tokens]."""
        return Surrogate(self.scale * bounded_ratio(inputs.logprobs, inputs.old_logprobs) * inputs.advantages, {})


def shared(inputs, options):
    return options["weight"] * inputs.old_logprobs.new_ones(inputs.old_logprobs.shape)


def one_number(inputs, options):
    return inputs.old_logprobs.sum()


number = 3
'''
IMPORTERS = '''
"""A set of questions with one input and one output."""

from nouscoder.data.importers.fields import stdin_tests, text
from nouscoder.data.importers.rows import Format
from nouscoder.data.problems import ReferencedProblem
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import Comparator, ComparatorKind

RULES = Comparator(ComparatorKind.ENTRY_POINT, entry_point="parts_of_a_user.comparators:first_line")


def read(row, number):
    tests = stdin_tests([(text(row, "given"), text(row, "wanted"))])
    return ReferencedProblem(Problem(f"mine-{number}", text(row, "ask"), tests, source="mine", comparator=RULES))


MINE = Format(read, "mine")
'''
COMPARATORS = '''
"""Comparisons of outputs."""

import re


def first_line(expected, actual, comparator):
    return expected.split("\\n")[0] == actual.decode().split("\\n")[0]


def broken(expected, actual, comparator):
    raise ArithmeticError("no")


def slow_expression(expected, actual, comparator):
    """Exponential in the number of a's before another letter; it holds Python's global lock meanwhile."""
    return re.fullmatch("(a+)+", actual.decode()) is not None


number = 3
'''
FIRST_LINE, BROKEN = "parts_of_a_user.comparators:first_line", "parts_of_a_user.comparators:broken"
SLOW, BUSY = "parts_of_a_user.comparators:slow_expression", "print(end='a' * 60 + '!')"
RULES = Comparator(ComparatorKind.ENTRY_POINT, entry_point=FIRST_LINE)


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package parts_of_a_user, as an installer leaves it: its modules, and its dist-info."""
    site = tmp_path / "site"
    package, about = site / "parts_of_a_user", site / "parts_of_a_user-1.0.dist-info"
    for folder in (package, about):
        folder.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "objectives.py").write_text(OBJECTIVES)
    (package / "importers.py").write_text(IMPORTERS)
    (package / "comparators.py").write_text(COMPARATORS)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: parts-of-a-user\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(site))
    assert metadata.version("parts-of-a-user") == "1.0"
    monkeypatch.setattr(users_comparators, "_loaded", {})
    yield
    for name in [name for name in sys.modules if name.startswith("parts_of_a_user")]:
        del sys.modules[name]


def configured(*overrides: str) -> Config:
    return load_config(None, overrides)


def named(entry_point: str, options: str = "{}") -> str:
    return f'learner.objective={{name="entry_point", entry_point="{entry_point}", options={options}}}'


def corrected_by(entry_point: str, options: str = "{}") -> str:
    return f'learner.correction={{kind="entry_point", entry_point="{entry_point}", options={options}}}'


def objective(config: Config) -> Objective:
    return objective_of(config.learner.objective, SharedTerms(config.learner.correction))


INPUTS = LossInputs(
    logprobs=torch.tensor([-1.0, -1.5, -0.5], dtype=torch.float64),
    old_logprobs=torch.tensor([-1.1, -1.4, -0.7], dtype=torch.float64),
    sampler_logprobs=torch.tensor([-1.2, -1.4, -0.6], dtype=torch.float64),
    advantages=torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64),
    rollout_of_token=torch.tensor([0, 0, 1]),
    entropies=torch.zeros(3, dtype=torch.float64),
    accepted=torch.tensor([True, True, False]),
)
COUNTS = MinibatchCounts(num_tokens=3, num_rollouts=2, num_accepted_tokens=2)


def test_an_objective_of_an_installed_package_is_trained_with_its_options_and_the_shared_terms() -> None:
    config = configured(named("parts_of_a_user.objectives:Mine", '{scale=2.0, aggregation="sequence_mean"}'))
    assert "parts_of_a_user" not in sys.modules, "only the learner imports it"
    loss = objective(config)(INPUTS, COUNTS).loss
    ratios = (INPUTS.logprobs - INPUTS.old_logprobs).exp()
    weights = (INPUTS.old_logprobs - INPUTS.sampler_logprobs).exp().clamp(max=2.0)
    gains = weights * 2.0 * ratios * INPUTS.advantages
    assert float(loss) == pytest.approx(-float((gains[0] + gains[1]) / 4 + gains[2] / 2), rel=1e-12)


def test_the_written_configuration_names_the_same_objective(tmp_path: Path) -> None:
    config = configured(named("parts_of_a_user.objectives:Mine", "{scale=2.0}"))
    (tmp_path / "config.toml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.toml").learner.objective == config.learner.objective


def test_a_correction_of_an_installed_package_weights_the_tokens_outside_the_clip() -> None:
    config = configured(corrected_by("parts_of_a_user.objectives:shared", "{weight=0.5}"))
    plain = SurrogateLoss(Dapo(), SharedTerms(CorrectionSection(kind=CorrectionKind.NONE)))
    assert float(objective(config)(INPUTS, COUNTS).loss) == float(plain(INPUTS, COUNTS).loss) / 2


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            named("parts_of_a_user.nothing:Mine"),
            r"^learner.objective.entry_point '.*:Mine' cannot be loaded: No module",
        ),
        (named("parts_of_a_user.objectives:number"), "is no subclass of nouscoder.objectives.loss.ObjectiveSection$"),
        (named("parts_of_a_user.objectives:Mine", "{scale=0.0}"), r"^learner.objective.options do not fit .*: scale: "),
        (named("parts_of_a_user.objectives:Mine", "{speed=1}"), r"^learner.objective.options do not fit .*: speed: "),
        (corrected_by("parts_of_a_user.objectives:no"), r"^learner.correction.entry_point '.*:no' cannot be loaded: "),
        (corrected_by("parts_of_a_user.objectives:number"), r"^learner.correction.entry_point '.*' is not a function$"),
    ],
)
def test_code_that_cannot_be_used_is_refused_before_the_first_step(override: str, sentence: str) -> None:
    with pytest.raises(Unusable, match=sentence):
        objective(configured(override))


def test_a_correction_of_another_shape_is_refused() -> None:
    config = configured(corrected_by("parts_of_a_user.objectives:one_number"))
    with pytest.raises(Unusable, match=r"gave weights of shape \[\]: expected one for each of 3 tokens"):
        objective(config)(INPUTS, COUNTS)


def test_a_format_of_an_installed_package_is_imported(tmp_path: Path) -> None:
    rows = [{"ask": "Double it.", "given": "2\n", "wanted": "4\n"}, {"ask": "", "given": "", "wanted": ""}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = import_files("parts_of_a_user.importers:MINE", [tmp_path / "data.jsonl"], tmp_path / "out.parquet")
    (item,) = read_parquet(tmp_path / "out.parquet")
    assert (item.problem.problem_id, item.problem.prompt) == ("mine-1", "Double it.")
    assert item.problem.comparator == RULES
    assert sum(summary.rejected.values()) == 1
    with pytest.raises(ConfigError, match=r"comparator.entry_point: .* is not in verifier.comparators: none"):
        require_gradable(tmp_path / "out.parquet", grading())


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("parts_of_a_user.importers:NOTHING", r"^the format '.*:NOTHING' cannot be loaded: "),
        ("parts_of_a_user.importers:read", r"^the format '.*:read' is no nouscoder.data.importers.rows.Format$"),
    ],
)
def test_what_is_no_format_is_refused(tmp_path: Path, name: str, sentence: str) -> None:
    (tmp_path / "data.jsonl").write_text("{}\n")
    with pytest.raises(Unusable, match=sentence):
        import_files(name, [tmp_path / "data.jsonl"], tmp_path / "out.parquet")


def grading(*comparators: str) -> VerifierSection:
    return VerifierSection(sandbox=SandboxSection(slots=2), comparators=comparators)


@asynccontextmanager
async def served(*comparators: str) -> AsyncIterator[httpx.AsyncClient]:
    """The REST API over real sandboxes."""
    try:
        async with local_grader(grading(*comparators)) as grader:
            app = make_app(
                grader, CollectorRegistry(), DrainState(), 1 << 20, capabilities=Capabilities(grader, ("namespaces",))
            )
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://grader") as http:
                yield http
    except SandboxUnavailable as error:
        pytest.skip(str(error))


def asked(entry_point: str, code: str, output: str = "a\nb\n") -> dict[str, object]:
    tests = {"type": "stdin", "cases": [{"input": "", "output": output}]}
    return {"code": code, "tests": tests, "comparator": {"type": "entry_point", "entry_point": entry_point}}


async def test_a_comparator_of_an_installed_package_decides_and_a_client_imports_nothing() -> None:
    async with served(FIRST_LINE, BROKEN) as http:
        for code, verdict in (
            ("print('a\\nc')", "accepted"),
            ("print('b\\nb')", "wrong_answer"),
            ("import os; os.write(1, b'\\xff')", "wrong_answer"),  # it raises, but not with its own answer
        ):
            assert (await http.post("/v1/grade", json=asked(FIRST_LINE, code))).json()["verdict"] == verdict
        failed = (await http.post("/v1/grade", json=asked(BROKEN, "print(1)"))).json()
        assert failed["verdict"] == "internal_error"
        assert failed["detail"] == f"comparator {BROKEN} fails with its own answer: ArithmeticError: no"
        for name in ("wave:open", "parts_of_a_user.importers:read", ""):
            refused = await http.post("/v1/grade", json=asked(name, "print(1)"))
            assert refused.status_code == 422
            assert refused.json()["field"] == "comparator.entry_point"
        assert {"wave", "parts_of_a_user.importers"}.isdisjoint(sys.modules)
        known = (await http.get("/v1/capabilities")).json()["comparators"]
        assert known[-2:] == [FIRST_LINE, BROKEN]
        assert "entry_point" not in known
    async with served() as http:
        assert (await http.post("/v1/grade", json={**asked("x", "1"), "comparator": {"type": "tokens"}})).is_success


async def test_an_output_that_keeps_a_comparator_busy_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users_comparators, "_LIMIT_S", 1)
    async with served(SLOW) as http:
        for code, verdict in (("print(end='a' * 9)", "accepted"), (BUSY, "wrong_answer"), (BUSY, "wrong_answer")):
            assert (await http.post("/v1/grade", json=asked(SLOW, code, "aaa"))).json()["verdict"] == verdict
        failed = (await http.post("/v1/grade", json=asked(SLOW, BUSY, "a" * 60 + "b"))).json()
        assert failed["verdict"] == "internal_error"
        assert failed["detail"].endswith("fails with its own answer: it takes more than 1 s")


async def test_others_are_served_while_an_output_keeps_a_comparator_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users_comparators, "_LIMIT_S", 300)
    before = comparers_of_this_test(monkeypatch)
    async with served(SLOW) as http:
        busy = asyncio.create_task(http.post("/v1/grade", json=asked(SLOW, BUSY, "aaa")))
        while not set(multiprocessing.active_children()) - before:
            assert not busy.done()
            await asyncio.sleep(0.05)
        plain = {**asked(SLOW, "print('a')", "a"), "comparator": {"type": "tokens"}}
        for _ in range(5):
            assert (await http.post("/v1/grade", json=plain)).json()["verdict"] == "accepted"
        assert not busy.done()
        while not busy.done():
            for comparer in set(multiprocessing.active_children()) - before:
                comparer.kill()
            await asyncio.sleep(0.05)
        assert (await busy).json()["verdict"] in ("wrong_answer", "internal_error")


async def test_a_process_that_was_killed_between_two_comparisons_costs_no_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = comparers_of_this_test(monkeypatch)
    async with served(SLOW) as http:
        for _ in range(3):
            assert (await http.post("/v1/grade", json=asked(SLOW, "print(end='aa')"))).json()["verdict"] == "accepted"
            for comparer in set(multiprocessing.active_children()) - before:
                comparer.kill()
                comparer.join()


def comparers_of_this_test(monkeypatch: pytest.MonkeyPatch) -> set[BaseProcess]:
    """The processes that belong to other threads than those of the test."""
    monkeypatch.setattr(users_comparators, "threads", ThreadPoolExecutor(2))
    return set(multiprocessing.active_children())


def test_the_comparator_of_a_problem_is_kept_by_problem_files_and_messages(tmp_path: Path) -> None:
    plain = Problem("p", "Say a.", StdinTests((StdinCase("", "a"),)))
    (tmp_path / "problems.jsonl").write_bytes(line_of(replace(plain, comparator=RULES)))
    (item,) = read_problem_file(tmp_path / "problems.jsonl")
    assert item.problem.comparator == RULES
    assert pairs.COMPARATOR.of(pairs.COMPARATOR.to(RULES)) == RULES
    assert b"entry_point" not in line_of(plain)
    require_gradable(tmp_path / "problems.jsonl", grading(FIRST_LINE))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("parts_of_a_user.comparators:no", r"^verifier.comparators '.*:no' cannot be loaded: "),
        ("parts_of_a_user.comparators:number", r"^verifier.comparators '.*:number' cannot be called$"),
    ],
)
async def test_what_is_no_comparator_is_refused_before_the_service_serves(name: str, sentence: str) -> None:
    with pytest.raises(Unusable, match=sentence):
        async with served(name):
            pytest.fail("it serves")
    (fault,) = users_code_faults(configured(f'verifier.comparators=["{name}"]'))
    assert fault.startswith("verifier.comparators ")


def test_a_comparator_is_named_with_its_module() -> None:
    with pytest.raises(ConfigError, match=r"comparators has 'first_line', which is not package.module:function"):
        configured('verifier.comparators=["first_line"]')
