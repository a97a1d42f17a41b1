"""Tests stored by content: the file, the store and the cache."""

from __future__ import annotations

import asyncio
import hashlib
import io
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import zstandard

from nouscoder.domain.submission import (
    AssertTests,
    CallCase,
    CallTests,
    CheckerTests,
    InteractiveTests,
    JudgeProgram,
    MathCase,
    MathTests,
    StdinCase,
    StdinTests,
    Tests,
    input_size,
)
from nouscoder.formats.body import canonical_json, digest_of
from nouscoder.store.blobs import FolderBlobs
from nouscoder.store.case_files import CaseFile, CaseFileBroken, StoredCases, write_tests
from nouscoder.store.tests import TestStore, UnknownTests
from nouscoder.store.tests_cache import TestsCache, TestsTooLarge

JUDGE = JudgeProgram("int main(){}", "c")
LARGE = StdinTests(tuple(StdinCase(f"{number}\n" * 9000, f"{number}") for number in range(30)))
EVERY_TYPE = [
    StdinTests((StdinCase("1\n", "ä"), StdinCase("", ""))),
    CallTests("f", (CallCase((1, [2.5, None]), {"k": "v"}, {"x": [True]}), CallCase(expected=10**30))),
    AssertTests(("assert f(1)", "assert f(2)"), "import math"),
    AssertTests(("test_f", "TestF::test_g"), "import pytest", "solution"),
    CheckerTests((StdinCase("1", "2"),), JUDGE),
    InteractiveTests((StdinCase("1", ""),), JUDGE),
    InteractiveTests((StdinCase("1", ""),), JUDGE, True, JUDGE),
    MathTests((MathCase("1/2"),)),
    LARGE,
]


def written(tests: Tests, path: Path) -> str:
    with path.open("wb") as file:
        return write_tests(tests, file)[0]


@pytest.mark.parametrize("tests", EVERY_TYPE, ids=lambda tests: tests.type)
def test_each_case_is_read_alone_and_the_frames_are_the_canonical_text(tests: Tests, tmp_path: Path) -> None:
    path = tmp_path / "tests"
    digest = written(tests, path)
    text = zstandard.ZstdDecompressor().stream_reader(path.read_bytes(), read_across_frames=True).read()
    assert text == canonical_json(tests)
    assert digest == digest_of(tests) == f"sha256:{hashlib.sha256(text).hexdigest()}"
    with CaseFile(path) as file:
        file.check(digest)
        stored = file.tests()
        assert type(stored) is type(tests)
        assert [stored.cases[at] for at in reversed(range(len(tests.cases)))] == list(reversed(tests.cases))
        assert isinstance(stored.cases, StoredCases)
        assert stored.cases.input_sizes == [input_size(case) for case in tests.cases]
        assert digest_of(stored) == digest


def test_a_case_is_read_without_decompressing_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The invariant of case_files.py."""
    written(LARGE, tmp_path / "tests")
    sizes: list[int] = []
    real = zstandard.ZstdDecompressor

    class Counting:
        def decompress(self, data: bytes, max_output_size: int) -> bytes:
            sizes.append(max_output_size)
            return real().decompress(data, max_output_size=max_output_size)

    monkeypatch.setattr(zstandard, "ZstdDecompressor", Counting)
    with CaseFile(tmp_path / "tests") as file:
        cases = file.tests().cases
        assert cases[17] == LARGE.cases[17]
        assert cases[17] == LARGE.cases[17]
        assert file.num_bytes > 600_000
    assert sum(sizes) < 140_000, "the head and one frame of one or two cases"


@pytest.mark.parametrize("at", [10, 1000, -200, -30, -12, -6, -1])
def test_a_changed_byte_is_detected(at: int, tmp_path: Path) -> None:
    path = tmp_path / "tests"
    digest = written(LARGE, path)
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(CaseFileBroken), CaseFile(path) as file:
        file.check(digest)


@pytest.mark.parametrize("size", [0, 3, 100])
def test_an_incomplete_file_is_detected(size: int, tmp_path: Path) -> None:
    path = tmp_path / "tests"
    written(LARGE, path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CaseFileBroken, match="index"):
        CaseFile(path)


def test_the_store_keeps_one_file_per_content(tmp_path: Path) -> None:
    store = TestStore(FolderBlobs(tmp_path))
    kept = store.put(LARGE)
    assert store.put(LARGE) == kept
    assert (kept.num_tests, kept.num_bytes) == (30, len(canonical_json(LARGE)))
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [kept.digest.removeprefix("sha256:")]
    assert store.has(kept.digest)
    store.delete(kept.digest)
    for digest in (kept.digest, "sha256:zz", "../../etc/passwd"):
        with pytest.raises(UnknownTests):
            next(store.read(digest))


class Source:
    """A source of test files that can be blocked. It counts the fetches."""

    def __init__(self, *all_tests: Tests) -> None:
        self.files: dict[str, bytes] = {}
        self.fetched: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        for tests in all_tests:
            buffer = io.BytesIO()
            digest, _ = write_tests(tests, buffer)
            self.files[digest] = buffer.getvalue()

    async def fetch(self, digest: str) -> AsyncIterator[bytes]:
        self.fetched.append(digest)
        await self.gate.wait()
        data = self.files[digest]
        for at in range(0, len(data), 1000):
            yield data[at : at + 1000]


def some(number: int, size: int = 20_000) -> StdinTests:
    """Incompressible tests of about `size` bytes."""
    noise = "".join(hashlib.sha256(f"{number}/{at}".encode()).hexdigest() for at in range(size // 32))
    return StdinTests((StdinCase(noise, str(number)),))


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[TestsCache]:
    cache = TestsCache(tmp_path / "cache", 100_000)
    yield cache
    cache.close()


async def first_case(cache: TestsCache, digest: str, source: Source) -> object:
    async with cache.opened(digest, source) as tests:
        return tests.cases[0]


def on_disk(tmp_path: Path) -> int:
    return sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file())


async def test_equal_misses_are_merged_and_a_hit_fetches_nothing(cache: TestsCache) -> None:
    source = Source(tests := some(1))
    (digest,) = source.files
    source.gate.clear()
    waiting = [asyncio.ensure_future(first_case(cache, digest, source)) for _ in range(10)]
    await asyncio.sleep(0)
    waiting[0].cancel()  # the caller that began the fetch is cancelled; the others still get the tests
    await asyncio.sleep(0)
    source.gate.set()
    assert await asyncio.gather(*waiting[1:]) == [tests.cases[0]] * 9
    assert await first_case(cache, digest, source) == tests.cases[0]
    assert source.fetched == [digest]


async def test_the_bytes_on_disk_are_bounded_and_the_least_recently_used_tests_are_evicted(
    cache: TestsCache, tmp_path: Path
) -> None:
    source = Source(*(some(number) for number in range(12)))
    digests = list(source.files)
    for digest in digests:
        await first_case(cache, digests[0], source)
        await first_case(cache, digest, source)
        assert on_disk(tmp_path) <= 100_000
        assert cache.num_bytes == on_disk(tmp_path)
    assert source.fetched.count(digests[0]) == 1, "used tests must not be evicted"
    await first_case(cache, digests[1], source)
    assert source.fetched.count(digests[1]) == 2


async def test_open_tests_stay_readable_after_an_eviction(cache: TestsCache) -> None:
    source = Source(*(some(number) for number in range(12)))
    digests = list(source.files)
    async with cache.opened(digests[0], source) as tests:
        for digest in digests[1:]:
            await first_case(cache, digest, source)
        assert tests.cases[0] == some(0).cases[0]


async def test_tests_larger_than_the_cache_are_refused_and_leave_no_file(cache: TestsCache, tmp_path: Path) -> None:
    source = Source(some(1, 200_000))
    with pytest.raises(TestsTooLarge, match="do not fit in a cache of 100000 bytes"):
        await first_case(cache, next(iter(source.files)), source)
    assert (on_disk(tmp_path), cache.num_bytes) == (0, 0)


async def test_wrong_bytes_of_a_source_are_detected(cache: TestsCache, tmp_path: Path) -> None:
    source = Source(some(1), some(2))
    one, other = source.files
    source.files[one] = source.files[other]
    with pytest.raises(CaseFileBroken, match="cannot be fetched undamaged"):
        await first_case(cache, one, source)
    assert on_disk(tmp_path) == 0


async def test_a_killed_process_leaves_complete_files_and_a_damaged_file_is_fetched_again(tmp_path: Path) -> None:
    source = Source(some(1), some(2))
    one, other = source.files
    cache = TestsCache(tmp_path / "cache", 100_000)
    for digest in (one, other):
        await first_case(cache, digest, source)
    cache.close()
    folder = tmp_path / "cache" / "0"
    (folder / ".part-0123").write_bytes(b"torn")
    bad = folder / one.removeprefix("sha256:")
    data = bytearray(bad.read_bytes())
    data[500] ^= 1
    bad.write_bytes(data)
    again = TestsCache(tmp_path / "cache", 100_000)
    assert not list(folder.glob(".part-*"))
    assert await first_case(again, one, source) == some(1).cases[0]
    assert await first_case(again, other, source) == some(2).cases[0]
    assert source.fetched == [one, other, one]
    again.close()


def test_two_processes_do_not_share_a_folder(cache: TestsCache, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from nouscoder.store.tests_cache import TestsCache\n"
        "print(TestsCache(Path(sys.argv[1]), 1)._folder.name)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "cache")]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "1\n"
