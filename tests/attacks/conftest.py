"""The attack corpus as fixture and parameter; see tests/attack_corpus.py."""

from __future__ import annotations

import pytest
from tests.attack_corpus import Attack, load_attacks


@pytest.fixture(scope="session")
def attacks() -> dict[str, Attack]:
    """The corpus."""
    return load_attacks()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test with a parameter `attack` for every program."""
    if "attack" in metafunc.fixturenames:
        slow = {False: (), True: (pytest.mark.heavy,)}
        corpus = load_attacks().values()
        cases = [pytest.param(one, id=one.name, marks=slow[one.table.get("slow", False)]) for one in corpus]
        metafunc.parametrize("attack", cases)
