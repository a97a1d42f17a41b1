"""The submissions of the load tests: every verdict, all different, deterministic by seed."""

from __future__ import annotations

import json
from collections import Counter

from tests.load.mixture import mixture

from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.api.schema import parse_submission
from nouscoder.verifier.toolchains.languages import registry


def test_the_mixture_has_every_verdict_of_a_candidate_and_no_submission_twice() -> None:
    samples = mixture(500, frozenset(registry()))
    kinds = Counter(sample.truth for sample in samples)
    assert set(kinds) == {kind.value for kind in VerdictKind} - {"internal_error"}
    assert min(kinds.values()) >= 10
    assert len({sample.body for sample in samples}) == len({sample.number for sample in samples}) == 500
    for sample in samples:
        parse_submission(sample.body)


def test_a_seed_gives_the_same_submissions_and_missing_languages_are_skipped() -> None:
    assert mixture(60, {"python"}, 3) == mixture(60, {"python"}, 3) != mixture(60, {"python"}, 4)
    assert {json.loads(s.body).get("language", "python") for s in mixture(200, {"python"})} == {"python"}
