"""The corpus holds what it promises."""

from __future__ import annotations

from collections.abc import Mapping


def test_the_corpus_is_as_large_as_promised(attacks: Mapping[str, object]) -> None:
    assert len(attacks) >= 70
    assert {name.partition("/")[0] for name in attacks} == {
        "compiling", "control", "files", "inspection", "kernel", "memory", "network", "output", "processes", "signals",
    }  # fmt: skip
