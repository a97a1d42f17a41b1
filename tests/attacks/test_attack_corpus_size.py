"""The size of the attack corpus."""

from __future__ import annotations

from collections.abc import Mapping


def test_the_corpus_has_the_documented_size(attacks: Mapping[str, object]) -> None:
    assert len(attacks) >= 70
    assert {name.partition("/")[0] for name in attacks} == {
        "compiling", "control", "files", "inspection", "kernel", "memory", "network", "output", "processes", "signals",
    }  # fmt: skip
