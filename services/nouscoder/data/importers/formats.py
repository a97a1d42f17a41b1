"""The formats by name. Only this module knows all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nouscoder.data.importers import (
    acecode,
    bigcodebench,
    code_contests,
    deepcoder,
    humaneval_mbpp,
    kattis,
    leetcode,
    livecodebench,
    mathematics,
    reasoning,
    synthetic1,
    taco_apps,
)
from nouscoder.data.importers.fields import Row
from nouscoder.data.importers.rows import SourceRow, file_rows
from nouscoder.data.references import ReferencedProblem
from nouscoder.errors import Unusable, did_you_mean


class UnknownFormat(Unusable):
    """No importer has this name. The message names the nearest."""


@dataclass(frozen=True, slots=True)
class Format:
    """`read` makes a problem of a row and its number in the file, counted from 1, or raises Rejected.

    `rows` finds the rows of a file or folder, from the given number of rows on.
    """

    read: Callable[[Row, int], ReferencedProblem]
    about: str
    rows: Callable[[Path, int], Iterator[SourceRow]] = file_rows


FORMATS = {
    "livecodebench": Format(livecodebench.read, "LiveCodeBench, code_generation_lite"),
    "taco": Format(taco_apps.read_taco, "TACO"),
    "apps": Format(taco_apps.read_apps, "APPS"),
    "synthetic1": Format(synthetic1.read, "PrimeIntellect SYNTHETIC-1, verifiable-coding-problems"),
    "deepcoder": Format(deepcoder.read, "DeepCoder-Preview-Dataset"),
    "code_contests": Format(code_contests.read, "CodeContests of DeepMind"),
    "rllm_contests": Format(code_contests.read_rllm, "CodeContests as rllm's JSON array"),
    "leetcode": Format(leetcode.read, "LeetCodeDataset"),
    "acecode": Format(acecode.read, "AceCode-87K"),
    "humaneval": Format(humaneval_mbpp.read_humaneval, "HumanEval and HumanEval+"),
    "mbpp": Format(humaneval_mbpp.read_mbpp, "MBPP and MBPP+"),
    "bigcodebench": Format(bigcodebench.read, "BigCodeBench"),
    "kattis": Format(kattis.read, "Kattis and DOMjudge problem packages: folders or .zip", kattis.packages),
    "math": Format(mathematics.read, "math sets: MATH-500, DeepScaleR, AIME, GSM8K, DAPO-Math"),
    "reasoning": Format(reasoning.read, "SymBench, BIG-Bench Hard, Reasoning Gym"),
}


def format_named(name: str) -> Format:
    """The format of this name. Raises UnknownFormat."""
    if name not in FORMATS:
        raise UnknownFormat(
            f"there is no format {name!r}{did_you_mean(name, FORMATS)} (known formats: {', '.join(FORMATS)})"
        )
    return FORMATS[name]
