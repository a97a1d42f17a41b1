"""Why a row of a data set is not imported."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The kinds of reasons, for the summary."""

    NOT_JSON = "not_json"
    MISSING_FIELD = "missing_field"
    MALFORMED = "malformed"
    NO_TESTS = "no_tests"
    NO_ANSWER = "no_answer"
    UNREADABLE_TESTS = "unreadable_tests"
    UNSAFE_PICKLE = "unsafe_pickle"
    TOO_LARGE = "too_large"
    NEEDS_FILES = "needs_files"
    NOT_VERIFIABLE = "not_verifiable"
    UNSUPPORTED = "unsupported"
    DUPLICATE_ID = "duplicate_id"


class Rejected(Exception):
    """The row is not imported. The text says what is wrong with it."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
