"""Data files made by strangers: one sentence, bounded memory, and nothing of the host in a problem."""

from __future__ import annotations

import gzip
import json
import os
import stat
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zstandard

from nouscoder.data import bounded_files, json_records, packages
from nouscoder.data.bounded_files import FileRefused
from nouscoder.data.importers import rows
from nouscoder.data.importers.fields import Rejected, decoded, parsed_python
from nouscoder.data.importers.run import CannotImport, import_files
from nouscoder.data.json_records import UnreadableFile, read_records
from nouscoder.data.packages import packages_at
from nouscoder.data.problem_parquet import read_parquet
from nouscoder.data.problems import ProblemFileError, read_bodies
from nouscoder.data.yaml_text import yaml_mapping
from nouscoder.errors import Unusable

MIB = 1024**2
FILES = {
    "problem.yaml": "name: x\n",
    "problem_statement/problem.en.md": "Do it.\n",
    "data/secret/1.in": "1\n",
    "data/secret/1.ans": "2\n",
}


def package(folder: Path, **files: str) -> Path:
    for name, text in {**FILES, **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def refusal(tmp_path: Path, source: Path, name: str = "kattis") -> str:
    """The sentence of an import that imports nothing, and leaves nothing but the list of rejected rows."""
    folder = tmp_path / "out"
    folder.mkdir()
    with pytest.raises(Unusable) as found:
        import_files(name, [source], folder / "out.parquet")
    assert {file.name for file in folder.iterdir()} <= {"out.parquet.rejected.jsonl"}
    assert "\n" not in str(found.value)
    return str(found.value)


@contextmanager
def measured(most: int) -> Iterator[None]:
    """Fails when more memory than this was used."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


# Compressed files.


def compressed(text: bytes, ending: str) -> bytes:
    return gzip.compress(text) if ending == "gz" else zstandard.compress(text)


@pytest.mark.parametrize("ending", ["gz", "zst"])
@pytest.mark.parametrize(
    ("begin", "says"),
    [
        (b"", "line 1 is longer than 2 MiB"),
        (b"{}\n", "line 2 is longer than 2 MiB"),
        (b'["', "entry 1 is longer than 2 MiB"),
        (b"[", "entry 1: not JSON"),
    ],
)
def test_a_record_without_an_end_is_not_held_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, begin: bytes, says: str
) -> None:
    monkeypatch.setattr(bounded_files, "MAX_LINE_BYTES", 2 * MIB)
    file = tmp_path / f"rows.jsonl.{ending}"
    file.write_bytes(compressed(begin + b" " * 64 * MIB, ending))
    with measured(24 * MIB), pytest.raises(UnreadableFile, match=f"rows.jsonl.{ending}.* {says}"):
        list(read_records(file))
    if not begin:
        with pytest.raises(ProblemFileError, match="line 1 is longer than 2 MiB"):
            list(read_bodies(file))
        assert "line 1 is longer" in refusal(tmp_path, file, "livecodebench")


def test_a_file_that_breaks_after_good_rows_leaves_nothing(tmp_path: Path) -> None:
    lines = b"".join(json.dumps({"problem": f"{n}?", "answer": str(n)}).encode() + b"\n" for n in range(2000))
    file = tmp_path / "rows.jsonl.gz"
    file.write_bytes(gzip.compress(lines)[:-20])
    assert "not a complete compressed file" in refusal(tmp_path, file, "math")


def test_a_record_of_too_many_values_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists take 25 times as much memory as their text."""
    monkeypatch.setattr(json_records, "_LIGHT_BYTES", 1000)
    monkeypatch.setattr(json_records, "_MAX_WEIGHT", 1000)
    lines, array, text = tmp_path / "rows.jsonl", tmp_path / "rows.json", f"[{'[],' * 2000}[]]"
    lines.write_text(json.dumps({"problem": "?", "answer": "1"}) + '\n{"answer": ' + text + "}\n")
    array.write_text("[" + f"[{'[],' * MIB}[]]" + "]")
    assert [record.fault for record in read_records(lines)] == ["", "a record holds too many values"]
    with pytest.raises(UnreadableFile, match="too many values"):
        list(read_records(array))
    with pytest.raises(Rejected, match="too many values"):
        decoded(text)
    assert decoded(json.dumps(["[],{}:" * 1000])) == ["[],{}:" * 1000]


def test_a_damaged_parquet_file_is_one_sentence(tmp_path: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    file = tmp_path / "rows.parquet"
    parquet.write_table(arrow.table({"problem": ["?" * 1000] * 1000, "answer": [str(n) for n in range(1000)]}), file)
    data = bytearray(file.read_bytes())
    data[4:400] = b"\xff" * 396
    file.write_bytes(data)
    assert f"{file} cannot be read" in refusal(tmp_path, file, "math")


def test_rows_of_parquet_that_share_a_long_text_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 2 KiB whose rows have 8 MiB each."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    shared = arrow.DictionaryArray.from_arrays(arrow.array([0] * 64, arrow.int32()), arrow.array(["x" * 8 * MIB]))
    file = tmp_path / "rows.parquet"
    parquet.write_table(arrow.table({"problem": shared}), file, compression="zstd")
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 16 * MIB)
    monkeypatch.setattr(rows, "_SMALL_GROUP_BYTES", MIB)
    with measured(24 * MIB):
        assert sum(1 for _ in rows.file_rows(file, 0)) == 64
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 4 * MIB)
    assert "rows after row 0 are larger than 4 MiB" in refusal(tmp_path, file, "math")


# Packages.


def linked(name: str, target: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return make


def piped(folder: Path) -> None:
    os.mkfifo(folder / "data/secret/2.in")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (linked("problem_statement/problem.en.md", "/etc/hostname"), "problem.en.md is a link out of the package"),
        (linked("data/secret/1.ans", "../../../secret"), "1.ans is a link out of the package"),
        (linked("data/secret/2.in", "nowhere"), "2.in cannot be read"),
        (linked("data/secret/2.in", "2.in"), "2.in cannot be read"),
        (linked("data/more", "/etc"), "data/more is a link to a folder"),
        (piped, "2.in is not a regular file"),
    ],
)
def test_a_package_gives_only_its_own_files(tmp_path: Path, change: Callable[[Path], None], says: str) -> None:
    (tmp_path / "secret").write_text("TOP SECRET")
    change(package(tmp_path / "sum"))
    assert says in refusal(tmp_path, tmp_path / "sum")
    assert "TOP SECRET" not in (tmp_path / "out/out.parquet.rejected.jsonl").read_text()


def test_a_package_that_is_a_link_is_refused_and_its_neighbour_is_imported(tmp_path: Path) -> None:
    package(tmp_path / "elsewhere")
    package(tmp_path / "all/a")
    (tmp_path / "all/b").symlink_to(tmp_path / "elsewhere")
    assert import_files("kattis", [tmp_path / "all"], tmp_path / "out.parquet").rejected == {"malformed": 1}
    assert "the package is a link" in (tmp_path / "out.parquet.rejected.jsonl").read_text()


def test_a_link_inside_a_package_is_followed(tmp_path: Path) -> None:
    folder = package(tmp_path / "sum")
    (folder / "data/secret/2.in").symlink_to("1.in")
    (folder / "data/secret/2.ans").symlink_to("1.ans")
    import_files("kattis", [folder], tmp_path / "out.parquet")
    (item,) = read_parquet(tmp_path / "out.parquet")
    assert len(item.problem.tests.cases) == 2


def zipped(path: Path, **files: str) -> bytearray:
    """A package as an archive. Also one whose entries climb out is read as it is: nothing is unpacked."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, text in {**FILES, **files}.items():
            packed.writestr(f"p/{name}", text)
    return bytearray(path.read_bytes())


def with_headers(data: bytearray, local: int, central: int, change: Callable[[int], int]) -> bytearray:
    """An archive with a byte changed in each header: at these places of the local and of the central ones."""
    for mark, place in ((b"PK\x03\x04", local), (b"PK\x01\x02", central)):
        at = -1
        while (at := data.find(mark, at + 1)) >= 0:
            data[at + place] = change(data[at + place])
    return data


def damaged(data: bytearray) -> bytearray:
    name_bytes = data[26]
    data[30 + name_bytes] ^= 0xFF
    return data


ARCHIVES: dict[str, tuple[Callable[[bytearray], bytes | bytearray], str]] = {
    "encrypted": (lambda data: with_headers(data, 6, 8, lambda byte: byte | 1), "problem.yaml is encrypted"),
    "method": (lambda data: with_headers(data, 8, 10, lambda _: 97), "another method than deflate"),
    "lzma": (lambda data: with_headers(data, 8, 10, lambda _: 14), "another method than deflate"),
    "damaged": (damaged, "problem.yaml is damaged"),
    "cut off": (lambda data: data[:200], "not a zip archive"),
    "empty": (lambda _: b"", "not a zip archive"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_odd_archive_is_one_sentence(tmp_path: Path, name: str) -> None:
    change, says = ARCHIVES[name]
    file = tmp_path / "p.zip"
    file.write_bytes(change(zipped(file)))
    assert says in refusal(tmp_path, file)


def test_an_archive_of_many_small_packages_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "many.zip", "w") as archive:
        for number in range(200):
            archive.writestr(f"p{number}/problem.yaml", "a: 1")
            archive.writestr(f"p{number}/\x1b{'x' * 200}", "")
    looks: list[zipfile.ZipInfo] = []

    def look(info: zipfile.ZipInfo) -> bool:
        looks.append(info)
        return False

    monkeypatch.setattr(zipfile.ZipInfo, "is_dir", look)
    found = [(name, len(files.names)) for name, files in packages_at(tmp_path / "many.zip", "problem.yaml")]
    assert sorted(found) == sorted((f"p{number}", 2) for number in range(200))
    assert len(looks) == 400


@pytest.mark.parametrize("name", ["p/tests/../../x", "p//etc/passwd", "p/.."])
def test_a_path_out_of_an_archive_is_refused(tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(tmp_path / "out.zip", "w") as archive:
        archive.writestr("p/task.toml", "")
        archive.writestr(name, "")
    ((_, files),) = packages_at(tmp_path / "out.zip", "task.toml")
    with pytest.raises(FileRefused, match="is a path out of the package"):
        _ = files.names


def test_a_link_in_an_archive_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "p.zip"
    zipped(file)
    link = zipfile.ZipInfo("p/data/secret/2.in")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(file, "a") as packed:
        packed.writestr(link, "/etc/passwd")
    assert "data/secret/2.in is a link" in refusal(tmp_path, file)


def test_nothing_of_an_archive_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "p.zip"
    zipped(file, **{"escaped": "x", "data/secret/2.txt": "x"})
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    for _, files in packages_at(file, "problem.yaml"):
        assert files.text("problem.yaml") == "name: x\n"
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_package_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_zip: bool) -> None:
    monkeypatch.setattr(packages, "MAX_PACKAGE_BYTES", MIB)
    files = {"data/secret/2.in": "x" * 16 * MIB, "data/secret/2.ans": ""}
    source = tmp_path / "p.zip" if is_zip else package(tmp_path / "p", **files)
    if is_zip:
        zipped(source, **files)
    with measured(8 * MIB):
        assert "the files are larger than 1 MiB" in refusal(tmp_path, source)
    monkeypatch.setattr(packages, "MAX_PACKAGE_FILES", 4)
    for _, found in packages_at(source, "problem.yaml"):
        with pytest.raises(FileRefused, match="more than 4 files"):
            found.names  # noqa: B018


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({".timelimit": "inf"}, "the time limit must be a number from 0.001 to 3600, not 'inf'"),
        ({".timelimit": "nan"}, "not 'nan'"),
        ({".timelimit": "-5"}, "not '-5'"),
        ({".timelimit": "abc"}, "not 'abc'"),
        ({"domjudge-problem.ini": "timelimit=1e9"}, "not '1e9'"),
        ({"problem.yaml": "limits: {memory: abc}"}, "limits.memory must be a number from 1 to 1048576, not 'abc'"),
        ({"problem.yaml": "limits: {memory: .inf}"}, "not 'inf'"),
        ({"problem.yaml": "limits: [1]"}, "limits in problem.yaml is not a mapping"),
        (
            {"problem.yaml": "validator_flags: float_tolerance abc"},
            "float_tolerance must be a number from 0, not 'abc'",
        ),
        ({"problem.yaml": "validator_flags: float_tolerance inf"}, "not 'inf'"),
        ({"problem.yaml": "validator_flags: float_tolerance"}, "float_tolerance must be a number"),
        ({"problem.yaml": "validator_flags: {a: b}"}, "validator_flags is neither text nor a list"),
        ({"problem.yaml": "a: [\n"}, "problem.yaml: it is not YAML: while parsing"),
        ({"problem.yaml": "a: 2001-99-99\n"}, "problem.yaml: it is not YAML: month must be in"),
        (
            {"problem.yaml": f"a: {'[' * 3000}{']' * 3000}\n"},
            "problem.yaml: it is not YAML: its values are nested too deeply",
        ),
        ({"problem.yaml": "a: " + "x" * 300_000}, "problem.yaml: it is longer than 256 KiB"),
    ],
)
def test_an_odd_value_of_a_package_is_one_sentence(tmp_path: Path, files: dict[str, str], says: str) -> None:
    assert says in refusal(tmp_path, package(tmp_path / "sum", **files))


def laughs(first: str, form: str) -> str:
    """A YAML text of some hundred bytes that stands for 10**9 values."""
    lines = [f"a0: &a0 {first}"]
    return "\n".join(lines + [f"a{n}: &a{n} {form.format(','.join([f'*a{n - 1}'] * 10))}" for n in range(1, 10)])


def test_aliases_count_as_what_they_stand_for() -> None:
    assert yaml_mapping("a: &a [1, 2]\nb: [*a, *a]\n<<: {c: 3}") == {"a": [1, 2], "b": [[1, 2], [1, 2]], "c": 3}
    with measured(4 * MIB):
        for text in (laughs("[x]", "[{}]"), laughs("{x: 1, y: 2}", "{{<<: [{}]}}")):
            with pytest.raises(FileRefused, match="more than 100,000 values"):
                yaml_mapping(text)
    with pytest.raises(FileRefused, match="an alias stands inside its own value"):
        yaml_mapping("a: &a [*a]")


# Values inside rows.


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1" + "0" * 4300 + "]", "an integer has more than 4300 digits"),
        ("('a', 1" + "0" * 4300 + ")", "an integer has more than 4300 digits"),
        ("[" + "1," * 600_000 + "]", "a Python literal of 1200002 characters, which is not JSON"),
        ("['a'," + "'" * 3 + "1," * 600_000 + "'" * 3 + "]", "a Python literal of"),
        ("[f'{" + "1," * 600_000 + "}']", "a Python literal of"),
        ("['a\\\nb'" + ",1" * 600_000 + ",'']", "a Python literal of"),
        ("['" + "\\'" * 600_000, "neither JSON nor a Python literal"),
    ],
)
def test_values_that_would_take_too_long_or_too_much_are_named(text: str, says: str) -> None:
    with pytest.raises(Rejected, match=says):
        decoded(text)


def test_a_long_python_literal_of_plain_texts_is_read() -> None:
    value: list[Any] = ['it\'s\n"[1,2,3]"', [True, None], {"a": "1,2," * 300_000}, "x" * 100_000]
    assert len(repr(value)) > MIB
    assert decoded(repr(value)) == value


def test_a_test_program_has_a_largest_size() -> None:
    with pytest.raises(Rejected, match="a program of 8388609 characters"):
        parsed_python(" " * (8 * MIB + 1))


def test_an_integer_that_no_store_reads_is_rejected(tmp_path: Path) -> None:
    """A literal in base 16 is read without a limit, and was written to tests that nobody could read."""
    case = {"fn_name": "f", "inputs": [["0x1"]], "outputs": [["0x1"]]}
    text = repr(case).replace("'0x1'", "0x1" + "0" * 4000)
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"question": "?", "input_output": text}) + "\n")
    with pytest.raises(CannotImport, match="an integer has more than 4300 digits"):
        import_files("taco", [file], tmp_path / "out.parquet")
