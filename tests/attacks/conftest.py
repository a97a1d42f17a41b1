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
        slow = {False: (), True: (pytest.mark.heavy,), "corpus": (pytest.mark.heavy, pytest.mark.soak)}
        corpus = load_attacks().values()
        cases = [pytest.param(one, id=one.name, marks=slow[one.table.get("slow", False)]) for one in corpus]
        metafunc.parametrize("attack", cases)


# Programs that test what a user, a kernel or a root file system lets through. The others meet the same harness in every
# backend: they run on this host in `make test`, and in the two others in `make test-corpus`.
_OF_THE_BACKEND = {"escapes", "inspection", "kernel", "memory", "network", "processes", "reading", "signals"}


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `soak` what another backend repeats."""
    for item in items:
        values = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        attack = values.get("attack")
        if not isinstance(attack, Attack) or values.get("arena") not in ("one-user", "gvisor"):
            continue
        if attack.name.partition("/")[0] not in _OF_THE_BACKEND or attack.table.get("slow", False):
            item.add_marker(pytest.mark.soak)
