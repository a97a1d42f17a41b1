"""The tables of docs/trainers.md: each row is run by a test, and the versions are those of the lock files."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "trainers.md").read_text("utf8")


def rows_after(heading: str) -> list[list[str]]:
    """The cells of each row of the table with that first line."""
    table = TEXT.partition(heading)[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


def documented_packages() -> list[tuple[str, str]]:
    """Name and version of each package."""
    cells = [row[0] for row in rows_after("| package | what the test runs |")]
    return [tuple(part.rsplit(" ", 1)) for cell in cells for part in cell.lstrip("| ").split(", ")]  # type: ignore[misc]


def test_each_row_is_run_by_a_test() -> None:
    rows = rows_after("| you use | the line to change | right, wrong | without a verdict | run by |")
    names = [row[-1].strip("`| ") for row in rows]
    defined = {
        name
        for folder in ("e2e", "services")
        for path in (ROOT / "tests" / folder).glob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text("utf8"), re.MULTILINE)
    }
    assert len(names) >= 18
    assert [name for name in names if name not in defined] == []


def test_the_versions_are_those_that_make_test_trainers_installs() -> None:
    groups = ("test-trainers", "test-nemo-gym", "test-skyrl-miles", "test-openenv", "test-harbor")
    locks = "".join((ROOT / "requirements" / f"{group}.txt").read_text("utf8") for group in groups)
    packages = documented_packages()
    assert len(packages) >= 12
    assert [f"{name} {version}" for name, version in packages if f"\n{name}=={version} " not in f"\n{locks}"] == []


def test_the_configuration_of_prime_rl_is_that_of_the_package() -> None:
    readme = (ROOT / "integrations" / "nouscoder-code" / "README.md").read_text("utf8")
    (block,) = re.findall(r"```toml\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    assert f"```toml\n{block}```" in readme
