"""Records of JSON files: arrays and lines give the same values, wherever the pieces of the file end."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nouscoder.data import json_records
from nouscoder.data.json_records import UnreadableFile, read_records

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text('ab[]{},\\"\n\u00e9\U0001f600'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("ab", max_size=2), inner),
    max_leaves=8,
)


@given(st.lists(VALUES), st.integers(1, 9), st.sampled_from([None, 1]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
def test_an_array_is_read_item_by_item(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: list[object], piece: int, indent: int | None
) -> None:
    monkeypatch.setattr(json_records, "_PIECE", piece)
    file = tmp_path / "array.json"
    file.write_text(json.dumps(values, indent=indent), encoding="utf8")
    found = list(read_records(file))
    assert [record.value for record in found] == values
    assert [record.number for record in found] == list(range(1, len(values) + 1))


@given(st.lists(VALUES, min_size=1))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
def test_lines_are_read_line_by_line_also_compressed(tmp_path: Path, values: list[object]) -> None:
    objects = [{"value": value} for value in values]
    data = "\n\n".join(json.dumps(value) for value in objects).encode()
    for name, content in (("plain", data), ("packed", gzip.compress(data))):
        (tmp_path / name).write_bytes(content)
        found = list(read_records(tmp_path / name))
        assert [(record.number, record.value) for record in found] == [(2 * n + 1, v) for n, v in enumerate(objects)]


def test_a_line_that_is_not_json_is_a_record_with_a_fault_and_the_next_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    first, second, third = read_records(tmp_path / "file")
    assert (first.value, second.value, third.value) == ({"a": 1}, None, {"a": 3})
    assert "not JSON" in second.fault


@pytest.mark.parametrize("text", ['[{"a": 1}, {"a"', "[1, 2", '[{"a": tru}]'])
def test_a_torn_array_is_named_with_its_entry(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(UnreadableFile, match=r"file, entry [12]: not JSON"):
        list(read_records(tmp_path / "file"))


def test_a_file_that_is_not_there_or_not_whole_is_named(tmp_path: Path) -> None:
    (tmp_path / "torn").write_bytes(gzip.compress(b"[" + b"1," * 100_000)[:200])
    for name in ("torn", "absent"):
        with pytest.raises(UnreadableFile, match=f"{name} cannot be read"):
            list(read_records(tmp_path / name))
