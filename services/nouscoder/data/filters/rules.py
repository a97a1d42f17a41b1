"""Filters by what is known of each problem, and the choice of a sample.

That is its tests' number, type and size, its prompt's length and content, its metadata, and how often a policy solves
it (data/pass_rates.py has the form of that file).
"""

from __future__ import annotations

import random
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from nouscoder.data.filters.step import Candidate, CannotFilter, Context, Rule, Step, StepOutcome
from nouscoder.data.pass_rates import PassCount, read_pass_rates
from nouscoder.domain.curriculum import potential
from nouscoder.domain.estimates import pass_at_k

_URL = re.compile(r"https?://|ftp://|\bwww\.[a-z0-9-]+\.", re.IGNORECASE)
# Markdown, HTML, Codeforces' and LaTeX's marks of images, and names of image files.
_IMAGE = re.compile(
    r"!\[[^\]]*\]\(|<\s*(?:img|svg|figure)\b|\[image\]|<image>|\\includegraphics|\[asy\]"
    r"|\b[\w-]+\.(?:png|jpe?g|gif|svg|webp|bmp)\b",
    re.IGNORECASE,
)


_DATE = r"\d{4}-\d\d-\d\d"
_DATE_OR_NONE = rf"^({_DATE})?$"


class NumTests(Rule):
    """Keeps problems with enough tests."""

    filter: Literal["num_tests"]
    at_least: int = Field(1, ge=0, description="DeepCoder 5, Klear-Reasoner 16")
    at_most: int | None = Field(None, ge=1)

    def _reason(self, candidate: Candidate) -> str:
        found = candidate.record.stored.num_tests
        if found < self.at_least:
            return f"too few tests: {found}"
        return f"too many tests: {found}" if self.at_most is not None and found > self.at_most else ""


class TestsSize(Rule):
    """Keeps problems whose tests are not too large."""

    __test__ = False  # not a pytest class

    filter: Literal["tests_size"]
    at_most_bytes: int = Field(ge=1, description="of the tests' JSON form")

    def _reason(self, candidate: Candidate) -> str:
        found = candidate.record.stored.num_bytes
        return f"tests too large: {found} bytes" if found > self.at_most_bytes else ""


class TestsType(Rule):
    """Keeps problems whose tests have one of these types."""

    __test__ = False  # not a pytest class

    filter: Literal["tests_type"]
    allowed: list[Literal["stdin", "call", "assert", "checker", "interactive", "math"]] = Field(min_length=1)

    def _reason(self, candidate: Candidate) -> str:
        found = str(candidate.record.values["tests_type"])
        return "" if found in self.allowed else f"type of tests: {found}"


class PromptLength(Rule):
    """Keeps problems whose prompt has a length in these bounds."""

    filter: Literal["prompt_length"]
    at_least_characters: int = Field(0, ge=0)
    at_most_characters: int | None = Field(None, ge=1)

    def _reason(self, candidate: Candidate) -> str:
        found = len(candidate.prompt)
        if found < self.at_least_characters:
            return f"prompt too short: {found} characters"
        too_long = self.at_most_characters is not None and found > self.at_most_characters
        return f"prompt too long: {found} characters" if too_long else ""


class PromptScript(Rule):
    """Keeps problems whose prompt is written in Latin letters, as English is. Digits and signs do not count."""

    filter: Literal["prompt_script"]
    latin_share: float = Field(0.9, ge=0, le=1, description="least share of Latin letters among all letters")

    def _reason(self, candidate: Candidate) -> str:
        letters = [letter for letter in candidate.prompt if letter.isalpha()]
        latin = sum(letter.isascii() or unicodedata.name(letter, "").startswith("LATIN") for letter in letters)
        if latin >= self.latin_share * len(letters):
            return ""
        return f"other script: {latin} of {len(letters)} letters are Latin"


class NoUrls(Rule):
    """Drops problems whose prompt has a URL."""

    filter: Literal["no_urls"]

    def _reason(self, candidate: Candidate) -> str:
        found = _URL.search(candidate.prompt)
        return f"URL: {candidate.prompt[found.start() : found.start() + 60]!r}" if found else ""


class NoImages(Rule):
    """Drops problems whose prompt needs an image."""

    filter: Literal["no_images"]

    def _reason(self, candidate: Candidate) -> str:
        found = _IMAGE.search(candidate.prompt)
        return f"image: {found[0]!r:.60}" if found else ""


class Metadata(Rule):
    """Keeps problems whose metadata have one of these values."""

    filter: Literal["metadata"]
    key: str = Field(min_length=1, description="such as platform, language or contest_date")
    allowed: list[str] = Field(min_length=1)
    unknown: Literal["keep", "drop"] = Field("keep", description="problems without this key")

    def _reason(self, candidate: Candidate) -> str:
        found = candidate.metadata.get(self.key)
        if found is None:
            return f"no {self.key}: unknown" if self.unknown == "drop" else ""
        return "" if found in self.allowed else f"{self.key}: {found:.40}"


class Dates(Rule):
    """Keeps problems whose date is in these bounds. The first ten characters of the metadata's value are the date."""

    filter: Literal["dates"]
    key: str = Field("contest_date", min_length=1, description="of the metadata")
    since: str = Field("", pattern=_DATE_OR_NONE, description="first date that is kept, as 2024-08-01")
    before: str = Field("", pattern=_DATE_OR_NONE, description="first date that is dropped")
    unknown: Literal["keep", "drop"] = Field("drop", description="problems without a date")

    def _reason(self, candidate: Candidate) -> str:
        found = candidate.metadata.get(self.key, "")[:10]
        if not re.fullmatch(_DATE, found):
            return f"no date: {found}" if self.unknown == "drop" else ""
        return "" if self.since <= found and (not self.before or found < self.before) else f"date: {found}"


_QUARTILES = 4
_NOTED = re.compile(r"([0-9]+)/([1-9][0-9]*)")


class _ByPassRate(Step):
    """Base of the filters that need pass rates: of a file, or of the problems' metadata."""

    file: str = Field("", description="file of pass rates: records with problem_id, passed and sampled")
    metadata: str = Field("", description="in place of a file: the key of the metadata with PASSED/SAMPLED")
    unknown: Literal["keep", "drop"] = Field("drop", description="problems without a pass rate")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if bool(self.file) is bool(self.metadata):
            raise ValueError("give either file or metadata")
        return self

    def how_to_get(self, file: Path, problems: Path) -> str:
        measured = f"`nouscoder eval {problems} --policy MODEL --n 8 --out {file}`"
        return f": pass rates, which {measured} measures with a GPU; then give this command again"

    def counts(self, candidates: Sequence[Candidate], context: Context) -> tuple[dict[str, PassCount], dict[str, str]]:
        """(counts of the known problems, reasons of the unknown ones that are dropped). Raises CannotFilter."""
        if self.metadata:
            noted = ((one.problem_id, _NOTED.fullmatch(one.metadata.get(self.metadata, ""))) for one in candidates)
            found = {name: PassCount(int(each[1]), int(each[2])) for name, each in noted if each is not None}
        else:
            found = read_pass_rates(context.folder / self.file)
        known = {one.problem_id: found[one.problem_id] for one in candidates if one.problem_id in found}
        if candidates and not known:
            if self.metadata:
                raise CannotFilter(f"no problem has metadata {self.metadata} with a pass rate such as 3/16")
            raise CannotFilter(f"{self.file} has none of the problems: are its problem ids those of this selection?")
        missing = [one.problem_id for one in candidates if one.problem_id not in known]
        return known, dict.fromkeys(missing, "unknown: no pass rate") if self.unknown == "drop" else {}


class PassRate(_ByPassRate):
    """Keeps problems whose pass rate, or pass@k, is in these bounds, and prints the table of difficulty."""

    filter: Literal["pass_rate"]
    k: int = Field(1, ge=1, description="pass@k by the unbiased estimate; 1: the share of rollouts that passed")
    above: float | None = Field(None, ge=0, le=1)
    below: float | None = Field(None, ge=0, le=1)
    at_least: float | None = Field(None, ge=0, le=1)
    at_most: float | None = Field(None, ge=0, le=1)

    @model_validator(mode="after")
    def _some_bound(self) -> PassRate:
        if self.above is self.below is self.at_least is self.at_most is None:
            raise ValueError("give above, below, at_least or at_most")
        return self

    def apply(self, candidates: Sequence[Candidate], context: Context) -> StepOutcome:
        counts, dropped = self.counts(candidates, context)
        values = {}
        for problem_id, count in counts.items():
            if count.sampled < self.k:
                raise CannotFilter(
                    f"{self.file or self.metadata}: pass@{self.k} of {problem_id} needs {self.k} samples"
                )
            value = values[problem_id] = pass_at_k(count.sampled, count.passed, self.k)
            if wrong := self._wrong(value):
                dropped[problem_id] = f"{wrong}: {count.passed} of {count.sampled} passed"
        notes = {problem_id: {"pass_rate": f"{count.passed}/{count.sampled}"} for problem_id, count in counts.items()}
        return StepOutcome(dropped, dict(notes), difficulty_table(values.values()))

    def _wrong(self, value: float) -> str:
        too_low = value < (self.at_least or 0) or (self.above is not None and value <= self.above)
        at_most = 1 if self.at_most is None else self.at_most
        too_high = value > at_most or (self.below is not None and value >= self.below)
        name = f"pass@{self.k}"
        return f"{name} too low" if too_low else f"{name} too high" if too_high else ""


class Potential(_ByPassRate):
    """Keeps the problems of highest potential 4p(1-p), and notes the quartile of each; 1 is the highest.

    R1-Code-Interpreter trains on the first quartile, then on two, three and all: shares 0.25, 0.5, 0.75 and 1.
    """

    filter: Literal["potential"]
    share: float = Field(1.0, gt=0, le=1, description="share of the problems that is kept")

    def apply(self, candidates: Sequence[Candidate], context: Context) -> StepOutcome:
        counts, dropped = self.counts(candidates, context)
        # A stable order: problems of the same potential stay in the order of the file.
        potentials = {problem_id: potential(count.rate) for problem_id, count in counts.items()}
        ranked = sorted(potentials, key=lambda problem_id: -potentials[problem_id])
        notes, quartiles = {}, Counter[str]()
        for place, problem_id in enumerate(ranked):
            quartile = str(place * _QUARTILES // len(ranked) + 1)
            quartiles[f"potential quartile {quartile}"] += 1
            notes[problem_id] = {"potential": f"{potentials[problem_id]:.4f}", "potential_quartile": quartile}
        for problem_id in ranked[round(self.share * len(ranked)) :]:
            dropped[problem_id] = f"low potential: {potentials[problem_id]:.4f}"
        return StepOutcome(dropped, dict(notes), dict(sorted(quartiles.items())))


class Hardest(_ByPassRate):
    """Keeps the share of the problems with the lowest pass rates: AceCoder trains on the hardest 25 %."""

    filter: Literal["hardest"]
    share: float = Field(0.25, gt=0, le=1, description="share of the problems that is kept")

    def apply(self, candidates: Sequence[Candidate], context: Context) -> StepOutcome:
        counts, dropped = self.counts(candidates, context)
        ranked = sorted(counts, key=lambda problem_id: counts[problem_id].rate)  # stable, as that of Potential
        for problem_id in ranked[round(self.share * len(ranked)) :]:
            dropped[problem_id] = f"too easy: {counts[problem_id].passed} of {counts[problem_id].sampled} passed"
        return StepOutcome(dropped, table=difficulty_table(count.rate for count in counts.values()))


class Sample(Step):
    """Keeps a number of problems that the seed chooses, in the order of the file; fewer if there are fewer.

    The choice depends on the names and the seed alone, not on the order of the problems. After a pass_rate filter with
    above 0 and below 1 it is the subset of the smoke test: 64 problems with 0 < pass@G < 1.
    """

    filter: Literal["sample"]
    count: int = Field(64, ge=1)
    seed: int = 0

    def apply(self, candidates: Sequence[Candidate], context: Context) -> StepOutcome:
        names = sorted(one.problem_id for one in candidates)
        chosen = set(random.Random(self.seed).sample(names, min(self.count, len(names))))
        return StepOutcome({name: "not sampled: by the seed" for name in names if name not in chosen})


def difficulty_table(rates: Iterable[float]) -> dict[str, int]:
    """The number of problems by pass rate: never solved, four ranges, always solved."""
    edges = ((0.25, "up to 0.25"), (0.5, "up to 0.50"), (0.75, "up to 0.75"), (1.0, "below 1"))
    table = dict.fromkeys(("never solved", *(name for _, name in edges), "always solved"), 0)
    for rate in rates:
        if rate <= 0 or rate >= 1:
            table["never solved" if rate <= 0 else "always solved"] += 1
        else:
            table[next(name for edge, name in edges if rate <= edge)] += 1
    return table
