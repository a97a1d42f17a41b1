"""The chart's golden files: one a component for the default values, one a set of other values with what it changes.

`make golden` writes the current output to all of them. Review the difference.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from tests.chart.conftest import CHART, KEPT, ROOT

if TYPE_CHECKING:
    from tests.chart.conftest import ChartRig

UPDATE = bool(os.environ.get("NOUSCODER_UPDATE_GOLDEN"))
GOLDEN = ROOT / "tests" / "golden" / "chart"
# Without values nothing is fetched or backed up; fetch.diff and backup.diff have these objects.
OPTIONAL = ("fetch", "backup")
COMPONENTS = sorted(
    folder.name for folder in (CHART / "templates").iterdir() if folder.is_dir() and folder.name not in OPTIONAL
)
OTHERS = [name for name in KEPT if name != "default"]
# The values that a difference starts from, where they are not the defaults.
BASES = {"b200": "h200", "fetch": "gpu"}
RANDOM_VALUE = re.compile(r"^(  (?:password|url|token|tokens|key): ).*$", re.MULTILINE)
CHECKSUM = re.compile(r"( checksum/\w+: )[0-9a-f]{64}$", re.MULTILINE)


@pytest.mark.parametrize("component", COMPONENTS)
def test_component_equals_its_golden_file(chart: ChartRig, component: str) -> None:
    rendered = shown(chart, {})
    parts = [f"# {template}\n{text}" for template, text in rendered.items() if template.startswith(f"{component}/")]
    equals_golden(f"{component}.yaml", "---\n".join(parts))


@pytest.mark.parametrize("name", OTHERS)
def test_what_other_values_change_equals_its_golden_file(chart: ChartRig, name: str) -> None:
    base = BASES.get(name, "default")
    before, after = shown(chart, chart.kept[base]), shown(chart, chart.kept[name])
    changes = []
    for template in sorted(before.keys() | after.keys()):
        if template not in after:
            changes.append(f"# {template}: absent")
        elif template not in before:
            changes += [f"# {template}: added", after[template].rstrip("\n")]
        elif before[template] != after[template]:
            changes += [f"# {template}", *differences(before[template].splitlines(), after[template].splitlines())]
    equals_golden(f"{name}.diff", f"# {name} against {base}\n" + "\n".join(changes) + "\n")


def test_no_golden_file_is_left_over() -> None:
    expected = {*(f"{component}.yaml" for component in COMPONENTS), *(f"{name}.diff" for name in OTHERS)}
    left = {file.name for file in GOLDEN.iterdir()} ^ {*expected, "refused-values.json"}
    if UPDATE:
        for name in left:
            (GOLDEN / name).unlink()
    else:
        assert not left


def test_a_difference_tells_where_it_is() -> None:
    before = ["spec:", "  containers:", "    - name: a", "      env:", "        - name: X", "          value: 1"]
    assert list(differences(before, [*before[:5], "          value: 2"])) == [
        "@@ spec: containers: - name: a env: - name: X",
        "-          value: 1",
        "+          value: 2",
    ]
    assert list(differences(before, before)) == []


def shown(chart: ChartRig, values: dict[str, Any]) -> dict[str, str]:
    """The text of every template but the dashboards. Random values, and checksums of other templates, are masked."""
    texts = {}
    for template, text in sorted(chart.templates(values).items()):
        if template.endswith(".yaml") and "dashboards" not in template and text.strip():
            masked = RANDOM_VALUE.sub(r"\1MASKED", text) if "secret" in template else text
            texts[template.partition("templates/")[2]] = CHECKSUM.sub(r"\1MASKED", masked).strip() + "\n"
    return texts


def differences(before: list[str], after: list[str]) -> Iterator[str]:
    """Each group of changed lines, under the keys that enclose it. Line numbers would change with every line above."""
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for kind, start, end, now_start, now_end in matcher.get_opcodes():
        if kind != "equal":
            enclosed, end_of_keys = (before, start) if kind == "delete" else (after, now_start)
            yield f"@@ {' '.join(enclosing(enclosed, end_of_keys))}".rstrip()
            yield from (f"-{line}" for line in before[start:end])
            yield from (f"+{line}" for line in after[now_start:now_end])


def enclosing(lines: list[str], place: int) -> list[str]:
    """The lines above with less and less indentation, outermost first."""
    keys: list[str] = []
    depth = indentation(lines[place])
    for line in reversed(lines[:place]):
        if line.strip() and indentation(line) < depth and not line.lstrip().startswith("#"):
            depth = indentation(line)
            keys.insert(0, line.strip())
    return keys


def indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def equals_golden(name: str, text: str) -> None:
    file = GOLDEN / name
    if UPDATE:
        file.write_text(text, "utf8")
    assert text == file.read_text("utf8")
