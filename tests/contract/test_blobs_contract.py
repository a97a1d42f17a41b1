"""The contract of every blob store."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import BinaryIO, cast

import pytest

from nouscoder.errors import Unusable
from nouscoder.store.blobs import Blobs, NoSuchBlob, open_blobs


@pytest.fixture(params=["folder", "bulk", "memory", "file-url"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    """An empty store: a folder, one for many blobs, and two of obstore's, which speaks to S3 in the same way."""
    if request.param == "bulk":
        return open_blobs(str(tmp_path / "new"), bulk=True)
    places = {"folder": str(tmp_path / "new"), "memory": "memory:///", "file-url": f"file://{tmp_path}"}
    return open_blobs(places[request.param])


def read(blobs: Blobs, name: str) -> bytes:
    return b"".join(blobs.read(name))


def test_a_blob_is_read_as_written_and_replaced_atomically(blobs: Blobs, tmp_path: Path) -> None:
    blobs.put("tests/ab/one", b"first")
    large = tmp_path / "large"
    large.write_bytes(bytes(range(256)) * 20_000)
    blobs.put("tests/ab/two", large)
    assert (read(blobs, "tests/ab/one"), read(blobs, "tests/ab/two")) == (b"first", large.read_bytes())
    blobs.put("tests/ab/one", b"")
    assert read(blobs, "tests/ab/one") == b""
    for size in (10, 3_000_000):  # in memory, and on the disk
        with SpooledTemporaryFile(1000) as file:
            file.write(bytes(size))
            file.seek(0)
            blobs.put("tests/ab/three", cast("BinaryIO", file))
        assert read(blobs, "tests/ab/three") == bytes(size)
    blobs.sync()
    assert read(blobs, "tests/ab/two") == large.read_bytes()


@pytest.mark.parametrize("place", ["memory:///", "other"])
def test_a_blob_of_another_store_is_copied_and_outlives_it(blobs: Blobs, tmp_path: Path, place: str) -> None:
    source = open_blobs(place if "://" in place else str(tmp_path / place))
    source.put("tests/ab/one", b"first")
    for _ in range(2):
        blobs.copy("tests/ab/one", source)
    source.put("tests/ab/one", b"second")
    source.delete("tests/ab/one")
    assert read(blobs, "tests/ab/one") == b"first"
    assert [one.name for one in blobs.list("tests")] == ["tests/ab/one"]
    with pytest.raises(NoSuchBlob):
        blobs.copy("tests/ab/two", source)


def test_a_missing_blob_is_reported_and_deleting_it_is_no_error(blobs: Blobs) -> None:
    assert not blobs.exists("tests/ab/one")
    with pytest.raises(NoSuchBlob):
        read(blobs, "tests/ab/one")
    blobs.delete("tests/ab/one")
    blobs.put("tests/ab/one", b"x")
    assert blobs.exists("tests/ab/one")
    blobs.delete("tests/ab/one")
    assert not blobs.exists("tests/ab/one")


def test_a_folder_is_listed_with_sizes_and_times(blobs: Blobs) -> None:
    assert list(blobs.list("clients/a")) == []
    before_s = time.time()
    for name in ("clients/a/x.5", "clients/a/y.7", "clients/b/z.9"):
        blobs.put(name, b"12")
    found = {one.name: one for one in blobs.list("clients/a")}
    assert sorted(found) == ["clients/a/x.5", "clients/a/y.7"]
    assert all(one.num_bytes == 2 and before_s - 2 < one.modified_s < time.time() + 2 for one in found.values())
    assert len(list(blobs.list("clients"))) == 3


@pytest.mark.parametrize("name", ["", "one", "../etc/passwd", "a/../../b", "/a/b", "a/b c", "a/.part-1", "a//b", "A/b"])
def test_a_name_that_could_leave_the_store_is_refused(blobs: Blobs, name: str) -> None:
    for act in (lambda: blobs.put(name, b""), lambda: read(blobs, name), lambda: blobs.delete(name)):
        with pytest.raises(ValueError, match="is no name of a blob"):
            act()


def test_an_unsupported_url_is_refused() -> None:
    with pytest.raises(Unusable, match="gopher://x is no store"):
        open_blobs("gopher://x")


def test_a_replaced_blob_is_the_new_one_whatever_their_sizes(blobs: Blobs) -> None:
    large = bytes(20_000)
    for data in (b"small", large, b"small again"):
        blobs.put("tests/ab/one", data)
        assert read(blobs, "tests/ab/one") == data
        assert [(one.name, one.num_bytes) for one in blobs.list("tests")] == [("tests/ab/one", len(data))]


def test_small_blobs_are_in_one_file_which_every_reader_of_the_folder_finds(tmp_path: Path) -> None:
    written, reading = open_blobs(str(tmp_path), bulk=True), open_blobs(str(tmp_path))
    reading.put("tests/ab/of-before", b"a file of its own")
    for number in range(1000):
        written.put(f"tests/ab/{number}", b"%d" % number)
    assert read(written, "tests/ab/7") == b"7"
    assert not reading.exists("tests/ab/7"), "a blob is on the disk after sync"
    written.sync()
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 2
    assert read(reading, "tests/ab/999") == b"999"
    assert read(written, "tests/ab/of-before") == b"a file of its own"
    copies = open_blobs(str(tmp_path / "copies"))
    copies.copy("tests/ab/7", reading)
    assert (tmp_path / "copies" / "tests" / "ab" / "7").read_bytes() == b"7"
    reading.delete("tests/ab/7")
    assert not written.exists("tests/ab/7")


def test_a_writer_that_is_killed_leaves_what_it_has_synced(tmp_path: Path) -> None:
    program = (
        "import os, sys; from nouscoder.store.blobs import open_blobs\nblobs = open_blobs(sys.argv[1], bulk=True)\n"
        "blobs.put('tests/ab/kept', b'kept'); blobs.sync(); blobs.put('tests/ab/lost', b'lost')\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "packed.sqlite").touch()
    assert not open_blobs(str(tmp_path / "empty")).exists("tests/ab/kept")
    blobs = open_blobs(str(tmp_path), bulk=True)
    assert (read(blobs, "tests/ab/kept"), blobs.exists("tests/ab/lost")) == (b"kept", False)
