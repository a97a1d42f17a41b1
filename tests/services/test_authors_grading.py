"""Float answers are judged as NousCoder-14B's authors judge them. The reference is a small independent program."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest
from tests.services.test_data_import import verdicts

from nouscoder.data.importers.options import ImportOptions
from nouscoder.data.importers.run import import_files
from nouscoder.domain.submission import Comparator, ComparatorKind
from nouscoder.verifier.judges.comparators import same_text

ROWS = Path(__file__).parents[1] / "data" / "layouts" / "nouscoder.jsonl"
AUTHORS = Comparator(ComparatorKind.LCB, absolute_tolerance=1e-4)
EXACT = Comparator(ComparatorKind.LCB)
CASES = [
    # (expected, printed)
    ("0.33333", "0.3333333333333333"),
    ("0.33333", "0.3332"),
    ("0.33333", "0.33343"),
    ("0.33333", "0.333431"),
    ("0.33333", "0.33323"),
    ("1", "1.0"),
    ("1.0", "1"),
    ("1", "1.0001"),
    ("1", "1.00011"),
    ("1", "2"),
    ("1000000000000000000", "1000000000000000001"),
    ("1e18", "1000000000000000000"),
    ("1000000.0", "1000000.00005"),
    ("1000000.0", "1000001.0"),
    ("-0.0", "0"),
    ("-0.00005", "0.00005"),
    ("-0.0001", "0.0001"),
    ("0", "1e-4"),
    ("0", "1.0000000000000001e-4"),
    ("0", "0.00009999"),
    ("2.5 3.5", "2.50001 3.49999"),
    ("2.5 3.5", "2.50001 3.4"),
    ("2.5 3.5", "2.5  3.5"),
    ("2.5 3.5", "2.5\n3.5"),
    ("2.5 3.5", "2.5"),
    ("2.5", "2.5 3.5"),
    ("2.5\n3.5", "2.50004\n3.49996\n"),
    ("2.5\n3.5", "2.5"),
    ("2.5\n\n3.5", "2.5\n3.5"),
    ("2.5\n", "\n\n2.50001\n\n"),
    ("2.5\n3.5\n", " 2.50001 \n  3.5"),
    ("YES", " YES"),
    ("YES\n0.5", "  YES\n0.50001"),
    ("YES", "Yes"),
    ("a b", "a  b"),
    ("Case 1: 0.5", "Case 1: 0.5"),
    ("Case 1: 0.5", "Case 1: 0.50001"),
    ("x 0.5", "x 0.5000"),
    ("0.5", "0.5f"),
    ("0.5", "half"),
    ("nan", "nan"),
    ("nan", "NaN"),
    ("inf", "inf"),
    ("inf", "Infinity"),
    ("inf", "1e400"),
    ("1e400", "1E+400"),
    ("1.5", "nan"),
    ("1_000", "1000"),
    ("0.5", "\uff15e-1"),
    ("", ""),
    ("", "0"),
    ("0.5", ""),
    ("1/3", "0.3333"),
]


def by_the_authors(expected: str, printed: str, tolerance: str) -> bool:
    """What their rule says, written anew from its description: equal lines, or lines of close numbers alone.

    Source: NousResearch/atropos, environments/code_execution_server/lcb_modal_endpoint.py (grade_stdio); with a
    tolerance of 0 it is LiveCodeBench's lcb_runner/evaluation/testing_util.py.
    """
    wanted, actual = ([line.strip() for line in text.strip().split("\n")] for text in (expected, printed))
    if len(wanted) != len(actual):
        return False
    for one, other in zip(wanted, actual, strict=True):
        if one == other:
            continue
        try:
            numbers, others = ([Decimal(word) for word in line.split()] for line in (one, other))
            if numbers == others:
                continue
            near = [abs(a - b) <= Decimal(tolerance) for a, b in zip(numbers, others, strict=True)]
        except (ArithmeticError, ValueError):  # no number, no difference, or not as many numbers
            return False
        if not all(near):
            return False
    return True


def test_the_cases_are_judged_as_the_authors_grader_judges_them() -> None:
    assert len(CASES) >= 50
    verdicts = [by_the_authors(expected, printed, "1e-4") for expected, printed in CASES]
    assert [same_text(expected, printed.encode(), AUTHORS) for expected, printed in CASES] == verdicts
    assert 20 < sum(verdicts) < len(CASES) - 20


def test_without_a_tolerance_the_rule_is_exact_as_livecodebench_s() -> None:
    verdicts = [by_the_authors(expected, printed, "0") for expected, printed in CASES]
    assert [same_text(expected, printed.encode(), EXACT) for expected, printed in CASES] == verdicts
    assert not same_text("0.33333", b"0.3333333333333333", EXACT)


@pytest.mark.parametrize("printed", [b"\xff\xfe", b"1" * 1_000_000, b"1 " * 1_000_000, b"\n" * 1_000_000 + b"0.5x"])
def test_hostile_output_is_only_wrong(printed: bytes) -> None:
    assert not same_text("0.5", printed, AUTHORS)


def test_a_third_is_right_in_the_authors_set_and_wrong_by_the_exact_rule(tmp_path: Path) -> None:
    """From their row to the verdict of a real sandbox."""
    programs = ("print(int(input()) / 3)", "print(0.3)", "print('0.33333')")
    found = {}
    for name, options in (("nouscoder", ImportOptions()), ("generic", ImportOptions(float_tolerance=0.0))):
        folder = tmp_path / name
        folder.mkdir()
        import_files(name, [ROWS], folder / "kattis.parquet", options=options)
        found[name] = verdicts(folder, f"{name}-2", *programs)
    assert found["nouscoder"] == ["accepted", "wrong_answer", "accepted"]
    assert found["generic"] == ["wrong_answer", "wrong_answer", "accepted"]
