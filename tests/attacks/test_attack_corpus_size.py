"""The size of the attack corpus."""

from __future__ import annotations

from collections.abc import Mapping


def test_the_corpus_has_the_documented_size(attacks: Mapping[str, object]) -> None:
    assert len(attacks) >= 520
    assert {name.partition("/")[0] for name in attacks} == {
        "comparing", "compiling", "control", "escapes", "exhaustion", "files", "inspection", "judges", "kernel",
        "languages", "memory", "network", "output", "processes", "reading", "results", "signals", "state",
    }  # fmt: skip
