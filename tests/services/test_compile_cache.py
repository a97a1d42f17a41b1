"""Compiled programs are kept by content: compiled once, shared only by equal sources, changed by no candidate."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nouscoder.config import SandboxSection
from nouscoder.domain.submission import Limits
from nouscoder.verifier.harness import frames
from nouscoder.verifier.sandbox.base import CompileFailed, Program
from nouscoder.verifier.sandbox.compile_cache import CompileCache, key_of
from nouscoder.verifier.sandbox.local import LocalSandbox
from nouscoder.verifier.sandbox.runners.pods import GvisorSandbox
from nouscoder.verifier.sandbox.runsc import RunscSandbox
from nouscoder.verifier.toolchains.languages import Language, installed

LIMITS = Limits(wall_time_s=120.0, cpu_time_s=60.0, memory_bytes=512 * 1024**2)


def payload(files: dict[str, bytes], said: bytes = b"", *, num: int | None = None) -> bytes:
    """A COMPILED frame as init writes it."""
    number = frames._SENT.pack
    parts = [number(len(said)), said, number(len(files) if num is None else num)]
    for name, content in files.items():
        parts += [number(len(name)), name.encode(), number(len(content)), content]
    return b"".join(parts)


def language(compile_script: str, run: tuple[str, ...] = ("cat", "/program/made/made")) -> Language:
    """A language whose compiler is a shell script. It writes the time, so each compiling has another result."""
    return replace(installed()["bash"], compile=("sh", "-c", compile_script), run=run)


CLOCK = language("date +%s.%N > ../made/made")


@pytest.fixture
async def sandbox() -> AsyncIterator[LocalSandbox]:
    local = LocalSandbox(SandboxSection(slots=2, compile_time_s=120.0))
    await local.start()
    yield local
    await local.close()


async def printed(sandbox: LocalSandbox, program: Program, stdin: bytes = b"") -> bytes:
    async with sandbox.session(program) as session:
        result = await session.run(stdin)
    assert result.exit_code == 0, result.stderr
    return result.stdout


async def test_a_program_is_compiled_once_in_all_slots(sandbox: LocalSandbox) -> None:
    program = Program(CLOCK, "a", LIMITS)
    async with sandbox.session(program) as one, sandbox.session(program) as other:
        first = (await one.run(b"")).stdout
        assert (await other.run(b"")).stdout == first
    assert await printed(sandbox, replace(program, limits=replace(LIMITS, wall_time_s=9.0))) == first
    assert sandbox.use.compile_cache == (2, 1, sandbox.compiled.num_bytes)
    assert sandbox.compiled.num_bytes > 0
    others = {
        "source": replace(program, code="b"),
        "file": replace(program, files={"more": b"1"}),
        "file's content": replace(program, files={"more": b"2"}),
        "compiler": replace(program, language=language("date +%s.%N  > ../made/made")),
    }
    results = {name: await printed(sandbox, each) for name, each in others.items()}
    assert len({first, *results.values()}) == 5, results


async def test_no_candidate_changes_what_others_get(sandbox: LocalSandbox) -> None:
    attack = "cd /program/made; chmod 777 made /tmp/main.sh . ..; echo evil > made; rm -f made; cat made"
    program = Program(replace(CLOCK, run=("bash", "main.sh")), attack, LIMITS)
    first = await printed(sandbox, program)
    assert first[:1].isdigit()
    assert await printed(sandbox, program) == first
    assert sandbox.compiled.num_hits == 1
    assert await printed(sandbox, replace(program, language=CLOCK)) == first, "the command that runs is no part of it"


@pytest.mark.parametrize(
    "script",
    [
        "date +%s.%N > ../made/made; mkdir ../made/folder; echo > ../made/folder/file",
        "date +%s.%N > ../made/made; ln -s /etc/passwd ../made/link",
        "date +%s.%N > ../made/made; mkfifo ../made/pipe",
        "date +%s.%N > ../made/made; truncate -s 20M ../made/large",
        "date +%s.%N > ../made/made; for i in $(seq 80); do echo > ../made/file$i; done",
    ],
    ids=["a folder", "a link", "a pipe", "too large", "too many files"],
)
async def test_what_cannot_be_kept_is_compiled_again(sandbox: LocalSandbox, script: str) -> None:
    program = Program(language(script), "a", LIMITS)
    assert await printed(sandbox, program) != await printed(sandbox, program)
    assert len(sandbox.compiled) == 0


async def test_a_failure_is_not_kept_and_the_compiler_says_the_same_each_time(sandbox: LocalSandbox) -> None:
    for _ in range(2):
        with pytest.raises(CompileFailed, match="no such thing"):
            await printed(sandbox, Program(language("echo no such thing >&2; exit 1"), "a", LIMITS))
    assert len(sandbox.compiled) == 0
    for _ in range(2):
        async with sandbox.session(Program(language("echo a warning >&2; echo > made"), "a", LIMITS)) as session:
            assert (await session.run(b"")).compiler_output == b"a warning"
    assert sandbox.compiled.num_hits == 1


ECHO = {
    "cpp": "#include <iostream>\nint main() { int n; std::cin >> n; std::cout << n + 1; }",
    "java": "class A { static int next(int n) { return n + 1; } }\npublic class Other {"
    " public static void main(String[] a) { System.out.print(A.next(new java.util.Scanner(System.in).nextInt())); } }",
}


@pytest.mark.parametrize("name", ECHO)
async def test_a_kept_program_runs_as_a_new_one(sandbox: LocalSandbox, name: str) -> None:
    if name not in installed():
        pytest.skip(f"{name} is not installed")
    program = Program(installed()[name], ECHO[name], LIMITS)
    assert [await printed(sandbox, program, b"41") for _ in range(2)] == [b"42", b"42"]
    assert sandbox.compiled.num_hits == 1


async def test_without_a_cache_every_session_compiles() -> None:
    local = LocalSandbox(SandboxSection(slots=1, compile_cache_bytes=0))
    await local.start()
    try:
        program = Program(CLOCK, "a", LIMITS)
        assert await printed(local, program) != await printed(local, program)
    finally:
        await local.close()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), max_size=60))
def test_an_entry_is_whole_or_gone_and_the_file_is_bounded(puts: list[tuple[int, int]]) -> None:
    """Entries of random lengths, each with its own content."""
    cache, last = CompileCache(200), {}
    for number, (name, length) in enumerate(puts):
        files = {"made": bytes([number]) * length}
        if cache.get(str(name)) is None:
            cache.put(str(name), payload(files))
            if cache.get(str(name)) is not None:
                last[str(name)] = files
        assert cache.num_bytes <= 200
        for key, expected in last.items():
            found = cache.get(key)
            assert found is None or found[1] == expected
    cache.close()


def test_without_a_temporary_folder_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    cache = CompileCache(1000)
    cache.put("key", payload({}))
    assert cache.get("key") is None
    assert caplog.records[0].message == "compiled programs are not kept"
    cache.close()


def test_the_newest_entries_stay() -> None:
    cache = CompileCache(100)
    for number in range(10):
        cache.put(str(number), payload({}, b"x" * 17))  # 25 bytes
    assert [str(number) for number in range(10) if cache.get(str(number))] == ["6", "7", "8", "9"]
    cache.put("large", payload({}, b"x" * 18))
    assert cache.get("large") is None
    cache.close()


def test_what_a_sandbox_of_gvisor_compiles_is_not_kept() -> None:
    """A sandbox that was taken over could send a wrong program for an honest source."""
    compiled = RunscSandbox(SandboxSection(backend="runsc", runsc="/bin/true", slots=1)).compiled
    compiled.put("key", payload({}))
    assert compiled.get("key") is None
    assert not GvisorSandbox._keeps_compiled


def test_a_program_without_a_compiler_has_no_key() -> None:
    assert key_of(Program(installed()["python"], "1", LIMITS)) is None
    one, other = (Program(CLOCK, "a", LIMITS, files=files) for files in ({"ab": b"c"}, {"a": b"bc"}))
    assert key_of(one) != key_of(other)


BAD: dict[str, Any] = {
    "short": payload({"a": b"b"})[:-1],
    "longer": payload({"a": b"b"}) + b"x",
    "a path": payload({"../a": b"b"}),
    "no name": payload({"": b"b"}),
    "too many": payload({}, num=65),
    "more than there are": payload({"a": b"b"}, num=2),
}


@given(st.binary(max_size=60))
def test_random_files_of_a_slot_are_files_or_refused(data: bytes) -> None:
    try:
        said, files = frames.unpack_files(data)
    except ValueError:
        return
    assert all(part in data for part in (said, *(files or {}).values()))


@pytest.mark.parametrize("given_payload", BAD.values(), ids=BAD.keys())
def test_impossible_files_of_a_slot_are_refused(given_payload: bytes) -> None:
    with pytest.raises(ValueError, match="frame"):
        frames.unpack_files(given_payload)
