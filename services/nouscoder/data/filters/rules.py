"""Filters that look at one problem at a time: its tests' number, type and size, its prompt's length and content."""

from __future__ import annotations

import re
import unicodedata
from typing import Literal

from pydantic import Field

from nouscoder.data.filters.step import Candidate, Rule

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

    def reason(self, candidate: Candidate) -> str:
        """See Rule."""
        found = candidate.record.stored.num_tests
        if found < self.at_least:
            return f"too few tests: {found}"
        return f"too many tests: {found}" if self.at_most is not None and found > self.at_most else ""


class TestsSize(Rule):
    """Keeps problems whose tests are not too large."""

    __test__ = False  # not a pytest class

    filter: Literal["tests_size"]
    at_most_bytes: int = Field(ge=1, description="of the tests' JSON form")

    def reason(self, candidate: Candidate) -> str:
        """See Rule."""
        found = candidate.record.stored.num_bytes
        return f"tests too large: {found} bytes" if found > self.at_most_bytes else ""


class TestsType(Rule):
    """Keeps problems whose tests have one of these types."""

    __test__ = False  # not a pytest class

    filter: Literal["tests_type"]
    allowed: list[Literal["stdin", "call", "assert", "checker", "interactive", "math"]] = Field(min_length=1)

    def reason(self, candidate: Candidate) -> str:
        """See Rule."""
        found = str(candidate.record.values["tests_type"])
        return "" if found in self.allowed else f"type of tests: {found}"


class PromptLength(Rule):
    """Keeps problems whose prompt has a length in these bounds."""

    filter: Literal["prompt_length"]
    at_least_characters: int = Field(0, ge=0)
    at_most_characters: int | None = Field(None, ge=1)

    def reason(self, candidate: Candidate) -> str:
        """See Rule."""
        found = len(candidate.prompt)
        if found < self.at_least_characters:
            return f"prompt too short: {found} characters"
        too_long = self.at_most_characters is not None and found > self.at_most_characters
        return f"prompt too long: {found} characters" if too_long else ""


class PromptScript(Rule):
    """Keeps problems whose prompt is written in Latin letters, as English is. Digits and signs do not count."""

    filter: Literal["prompt_script"]
    latin_share: float = Field(0.9, ge=0, le=1, description="least share of Latin letters among all letters")

    def reason(self, candidate: Candidate) -> str:
        """See Rule."""
        letters = [letter for letter in candidate.prompt if letter.isalpha()]
        latin = sum(letter.isascii() or unicodedata.name(letter, "").startswith("LATIN") for letter in letters)
        if latin >= self.latin_share * len(letters):
            return ""
        return f"other script: {latin} of {len(letters)} letters are Latin"


class NoUrls(Rule):
    """Drops problems whose prompt has a URL."""

    filter: Literal["no_urls"]

    def reason(self, candidate: Candidate) -> str:
        """See Rule."""
        found = _URL.search(candidate.prompt)
        return f"URL: {candidate.prompt[found.start() : found.start() + 60]!r}" if found else ""


class NoImages(Rule):
    """Drops problems whose prompt needs an image."""

    filter: Literal["no_images"]

    def reason(self, candidate: Candidate) -> str:
        """See Rule."""
        found = _IMAGE.search(candidate.prompt)
        return f"image: {found[0]!r:.60}" if found else ""


class Metadata(Rule):
    """Keeps problems whose metadata have one of these values."""

    filter: Literal["metadata"]
    key: str = Field(min_length=1, description="such as platform, language or contest_date")
    allowed: list[str] = Field(min_length=1)
    unknown: Literal["keep", "drop"] = Field("keep", description="problems without this key")

    def reason(self, candidate: Candidate) -> str:
        """See Rule."""
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

    def reason(self, candidate: Candidate) -> str:
        """See Rule."""
        found = candidate.metadata.get(self.key, "")[:10]
        if not re.fullmatch(_DATE, found):
            return f"no date: {found}" if self.unknown == "drop" else ""
        return "" if self.since <= found and (not self.before or found < self.before) else f"date: {found}"
