"""The problem index: built once, complete, with small records, and its tests are in the store before it appears."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from nouscoder.config import Config, load_config
from nouscoder.data import problem_index
from nouscoder.data.filters.run import read_recipe, select
from nouscoder.data.problem_index import NotInIndex, ProblemIndex, build_index, open_index
from nouscoder.data.problem_parquet import read_problems
from nouscoder.data.problems import ProblemFileError, save_problems
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import (
    CallCase,
    CallTests,
    Comparator,
    ComparatorKind,
    Limits,
    Prelude,
    Profile,
    StdinCase,
    StdinTests,
)
from nouscoder.formats.body import digest_of
from nouscoder.store.blobs import FolderBlobs
from nouscoder.store.case_files import CaseFile
from nouscoder.store.tests import TestStore

PROBLEMS = [
    Problem(
        f"p{number}",
        f"ask {number}",
        StdinTests((StdinCase("in", f"{number % 3}"),)),
        Limits(wall_time_s=1.5),
        Comparator(ComparatorKind.KATTIS, 0.5),
        prelude=Prelude.LCB,
        profile=Profile.LCB if number % 2 else Profile.PROCESS,
        prompt_template="Solve {prompt}",
        starter_code="class Solution:",
        languages=("python",) if number % 2 else ("cpp", "python"),
    )
    for number in range(9)
]


def config(tmp_path: Path, *more: str) -> Config:
    return load_config(None, [f"problems.train={tmp_path / 'train.jsonl'}", *more])


@pytest.mark.parametrize("name", ["train.jsonl", "train.jsonl.zst"])
def test_the_index_has_all_of_a_problem_except_its_tests_which_the_store_has(tmp_path: Path, name: str) -> None:
    save_problems(tmp_path / name, PROBLEMS)
    index = open_index(load_config(None, [f"problems.train={tmp_path / name}"]))
    assert index.problem_ids == tuple(problem.problem_id for problem in PROBLEMS)
    for problem in PROBLEMS:
        found = index.problem(problem.problem_id)
        assert (found.prompt, found.prompt_template) == (problem.prompt, problem.prompt_template)
        assert (found.starter_code, found.rules.languages) == (problem.starter_code, problem.languages)
        assert (found.rules, found.num_tests) == (problem.grading_rules(), 1)
        assert found.tests_digest == digest_of(problem.tests)
        copy = tmp_path / "copy"
        copy.write_bytes(b"".join(index.tests.read(found.tests_digest)))
        with CaseFile(copy) as file:
            assert file.tests().cases[0] == problem.tests.cases[0]
    with pytest.raises(NotInIndex, match="no problem 'nope'"):
        index.problem("nope")
    kept = list(FolderBlobs(tmp_path / f"{name}.index").list("tests"))
    assert len(kept) == 3, "equal tests must be stored once"
    index.close()


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet"])
def test_a_prompt_is_made_of_the_type_of_its_tests_whatever_the_file(tmp_path: Path, name: str) -> None:
    """A function without starter code is asked otherwise than a program."""
    called = Problem("called", "ask", CallTests("f", (CallCase((1,), {}, 2),)))
    save_problems(tmp_path / "train.jsonl", [called, PROBLEMS[0]])
    (tmp_path / "all.toml").write_text('name = "all"\ninputs = ["train.jsonl"]\nsteps = [{filter = "num_tests"}]')
    select(read_recipe(tmp_path / "all.toml"), tmp_path / "train.parquet")
    index = open_index(load_config(None, [f"problems.train={tmp_path / name}"]))
    assert {name: text.tests_type for name, text in index.texts().items()} == {"called": "call", "p0": "stdin"}
    assert [index.problem(one).tests_type for one in ("called", "p0")] == ["call", "stdin"]
    index.close()


def test_an_index_is_built_once_and_again_when_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_problems(tmp_path / "train.jsonl", PROBLEMS)
    builds: list[object] = []

    def counted(file: Path) -> Iterator[Problem]:
        builds.append(file)
        return read_problems(file)

    monkeypatch.setattr(problem_index, "read_problems", counted)
    for _ in range(3):
        open_index(config(tmp_path)).close()
    assert len(builds) == 1
    save_problems(tmp_path / "train.jsonl", PROBLEMS[:2])
    index = open_index(config(tmp_path))
    assert (len(builds), index.problem_ids) == (2, ("p0", "p1"))
    index.close()
    open_index(config(tmp_path, f"problems.tests={tmp_path / 'elsewhere'}")).close()
    assert len(builds) == 3, "the tests must be in the configured store"


def test_an_invalid_file_gives_no_index_and_the_old_one_is_not_used(tmp_path: Path) -> None:
    """The invariant of problem_index.py."""
    save_problems(tmp_path / "train.jsonl", PROBLEMS)
    open_index(config(tmp_path)).close()
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write("{\n")
    for _ in range(2):
        with pytest.raises(ProblemFileError, match="line 10: not JSON"):
            open_index(config(tmp_path))


def test_digests_are_in_the_store_before_the_index_appears(tmp_path: Path) -> None:
    class Breaking(FolderBlobs):
        left = 2

        def put(self, name: str, data: bytes | BinaryIO | Path) -> None:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            super().put(name, data)

    store = TestStore(Breaking(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        build_index(PROBLEMS, tmp_path / "index", store)
    assert not (tmp_path / "index").exists()
    store = TestStore(FolderBlobs(tmp_path))
    build_index(PROBLEMS, tmp_path / "index", store)
    index = ProblemIndex(tmp_path / "index", store)
    assert all(store.has(index.problem(problem_id).tests_digest) for problem_id in index.problem_ids)
    index.close()


def test_the_index_of_a_file_in_a_read_only_folder_is_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_problems(tmp_path / "train.jsonl", PROBLEMS)
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    open_index(config(tmp_path)).close()
    assert [path.name.startswith("nouscoder-problems-") for path in (tmp_path / "tmp").iterdir()] == [True]
    assert not (tmp_path / "train.jsonl.index").exists()


def test_a_record_is_small(tmp_path: Path) -> None:
    store = TestStore(FolderBlobs(tmp_path))
    large = StdinTests(tuple(StdinCase("x" * 10_000, str(number)) for number in range(200)))
    build_index([Problem("p", "ask", large)], tmp_path / "index", store)
    assert (tmp_path / "index").stat().st_size < 50_000
    index = ProblemIndex(tmp_path / "index", store)
    assert index.problem("p").tests_bytes > 2_000_000
    assert len(json.dumps(index.problem("p").tests_digest)) < 80
    index.close()
