"""The contract of every blob store."""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import BinaryIO, cast

import pytest

from nouscoder.store.blobs import Blobs, BlobsUnusable, NoSuchBlob, open_blobs


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
    with pytest.raises(BlobsUnusable, match="gopher://x is no store"):
        open_blobs("gopher://x")
