"""`nouscoder bench leaks`: how long `nouscoder data filter` searches problems for leaks of an evaluation set.

Leaks are planted: a third is equal but for case and punctuation, a third has an excerpt of nine words, a third has one
word changed. Every problem has a phrase that every evaluation problem has too, which is no leak. The control compares
nine words in a row with sets of bare Python, and no near-duplicates.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time
from typing import Any

from nouscoder.bench.commands import measured_command
from nouscoder.data.problem_parquet import column

RECIPE = """name = "leaks"
inputs = ["problems.jsonl"]
[[steps]]
filter = "decontaminate"
against = ["eval.jsonl"]
boilerplate = 100
[[steps]]
filter = "near_duplicates"
against = ["eval.jsonl"]
"""
WORDS = [f"{first}{last}" for first in "bdfgklmnprst" for last in ("a", "ebo", "ila", "omu", "unde", "arik", "ost")]
_PHRASE = "The first line of the input has one integer, the number of test cases. Print the answer for each."
_NUM_EVALUATION = 400
_N = 9


@dataclass(frozen=True, slots=True)
class LeakFigures:
    """One search. `missed` leaks stayed, `wrong` are problems that were dropped and leak nothing."""

    problems: int
    leaks: int
    missed: int
    wrong: int
    wall_s: float
    cpu_s: float
    peak_bytes: int
    control_cpu_s: float


def made_up_text(seed: object, length: int = 60) -> str:
    """Words in random order, the same for a seed."""
    return " ".join(random.Random(str(seed)).choices(WORDS, k=length))


def plant(num_problems: int, num_leaks: int, folder: Path) -> set[str]:
    """Write problems.jsonl and eval.jsonl. Returns the ids of the problems that leak."""
    own = [made_up_text(("eval", at)) for at in range(_NUM_EVALUATION)]
    _write(folder / "eval.jsonl", [(f"e{at}", f"{text} {_PHRASE}") for at, text in enumerate(own)])
    rows = [(f"p{at}", f"{made_up_text(at)} {_PHRASE}") for at in range(num_problems - num_leaks)]
    rows += [(f"leak{at}", _leak(own, at)) for at in range(num_leaks)]
    random.Random(1).shuffle(rows)
    _write(folder / "problems.jsonl", rows)
    return {f"leak{at}" for at in range(num_leaks)}


def bench_leaks(num_problems: int, num_leaks: int) -> LeakFigures:
    """Plant leaks among problems and search for them in a process of its own. Raises BenchError."""
    folder = Path(tempfile.mkdtemp(prefix="nouscoder-bench-"))
    try:
        planted = plant(num_problems, num_leaks, folder)
        (folder / "recipe.toml").write_text(RECIPE)
        out = folder / "out.parquet"
        found = measured_command(
            ["nouscoder", "data", "filter", str(folder / "recipe.toml"), "--out", str(out), "--json"]
        )
        left = set(column(out, "problem_id"))
        control_cpu_s = _bare_search(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return LeakFigures(
        problems=num_problems,
        leaks=num_leaks,
        missed=len(left & planted),
        wrong=num_problems - len(left | planted),
        wall_s=found.wall_s,
        cpu_s=found.cpu_s,
        peak_bytes=found.peak_bytes,
        control_cpu_s=control_cpu_s,
    )


def as_record(figures: LeakFigures) -> dict[str, Any]:
    """For --json."""
    return asdict(figures)


def as_text(figures: LeakFigures) -> str:
    """For people."""
    return (
        f"{figures.leaks} leaks among {figures.problems} problems against {_NUM_EVALUATION}: {figures.missed} missed,"
        f" {figures.wrong} wrong; {figures.wall_s:.1f} s, CPU {figures.cpu_s:.1f} s,"
        f" most memory {figures.peak_bytes / 2**20:.0f} MiB\n"
        f"  control: reading both files and comparing {_N} words in bare Python: CPU {figures.control_cpu_s:.1f} s"
    )


def _leak(evaluation: Sequence[str], number: int) -> str:
    draw = random.Random(number)
    words = evaluation[draw.randrange(len(evaluation))].split()
    match number % 3:
        case 0:
            return ", ".join(words).upper() + "!"
        case 1:
            at = draw.randrange(len(words) - _N)
            excerpt = " ".join(words[at : at + _N])
            return f"{made_up_text(('before', number))} {excerpt} {made_up_text(('after', number))}"
        case _:
            words[draw.randrange(len(words))] = "changed"
            return " ".join(words)


def _write(path: Path, problems: Sequence[tuple[str, str]]) -> None:
    with path.open("w") as file:
        for name, prompt in problems:
            tests = {"type": "stdin", "cases": [{"input": f"{name} 0\n", "output": f"{name} 0\n"}]}
            file.write(json.dumps({"problem_id": name, "prompt": prompt, "tests": tests}) + "\n")


def _bare_search(folder: Path) -> float:
    """CPU seconds. The result does not matter."""
    begun_s = process_time()
    known = {ngram for words in _read(folder / "eval.jsonl") for ngram in _ngrams(words)}
    [words for words in _read(folder / "problems.jsonl") if not known.isdisjoint(_ngrams(words))]
    return process_time() - begun_s


def _read(path: Path) -> list[list[str]]:
    return [json.loads(line)["prompt"].lower().split() for line in path.read_text().splitlines()]


def _ngrams(words: list[str]) -> list[tuple[str, ...]]:
    return [tuple(words[at : at + _N]) for at in range(len(words) - _N + 1)]
