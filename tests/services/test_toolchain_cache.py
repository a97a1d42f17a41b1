"""The invariant of toolchain_cache.py, and Go programs compiled with the cache."""

from __future__ import annotations

import dataclasses
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from nouscoder.config import SandboxSection
from nouscoder.domain.submission import Limits
from nouscoder.verifier.sandbox import CompileFailed, Exit, Program, open_sandbox
from nouscoder.verifier.toolchains.languages import (
    Language,
    cache_folder_of,
    find_installed,
    forget_installed,
    installed,
    offer,
    registry,
    withdraw,
)
from nouscoder.verifier.toolchains.toolchain_cache import IMAGE_FOLDER, ToolchainCacheFailed, prepare

LIMITS = Limits(wall_time_s=10, cpu_time_s=10, memory_bytes=256 << 20)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache folder of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget_installed()
    yield tmp_path / "cache" / "nouscoder" / "toolchains"
    forget_installed()


def language(tool: Path, script: str) -> Language:
    """A language whose `prepare` is a script."""
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    argv = ("sh", "-c", script, "sh", "{cache}", "{final}")
    return dataclasses.replace(registry()["c"], detect=(str(tool),), prepare=argv)


def test_a_cache_folder_is_complete_or_missing(cache: Path, tmp_path: Path) -> None:
    made = language(tmp_path / "tool", 'test "$1" != "$2" && test ! -e "$2" && echo "$2" > "$1/final"')
    folder = prepare(made)
    assert folder.parent == cache
    assert (folder / "final").read_text() == f"{folder}\n"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert prepare(made) == folder  # the script would fail a second time

    failing = dataclasses.replace(made, prepare=("sh", "-c", "echo half > half; echo why >&2; exit 3"))
    with pytest.raises(ToolchainCacheFailed, match="cache of c cannot be filled: sh exited with status 3: why"):
        prepare(failing)
    assert list(cache.iterdir()) == [folder]


def test_another_tool_or_command_gives_another_folder(cache: Path, tmp_path: Path) -> None:
    made = language(tmp_path / "tool", "true")
    before = cache_folder_of(made)
    assert cache_folder_of(dataclasses.replace(made, prepare=("true",))) != before
    (tmp_path / "tool").write_text("#!/bin/sh\n# newer\n")
    assert cache_folder_of(made) != before


def test_a_cache_that_cannot_be_written_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    with pytest.raises(ToolchainCacheFailed, match="/proc/none/nouscoder/toolchains cannot be written"):
        prepare(language(tmp_path / "tool", "true"))


def test_a_sandbox_that_was_closed_leaves_no_languages_behind(cache: Path) -> None:
    sandbox = object()
    offer(sandbox, None)
    withdraw(sandbox)
    before = installed()
    forget_installed()
    assert installed() is not before


def test_every_prepared_language_looks_into_the_folder_of_the_sandbox_image() -> None:
    prepared = [one for one in registry().values() if one.prepare is not None]
    assert [one.name for one in prepared] == ["go"]
    for one in prepared:
        assert one.compile is not None
        assert one.compile[-1] == str(IMAGE_FOLDER / one.name)


GO = 'package main\nimport ("fmt"; "os"; "sort"; "bufio")\nfunc main() { r := bufio.NewReader(os.Stdin); var n int;'
GO += " fmt.Fscan(r, &n); s := []int{3, n}; sort.Ints(s); fmt.Println(s, len(os.Args)) }"


@pytest.mark.parametrize("backend", ["local", "runsc"])
async def test_go_programs_are_compiled_with_the_cache(backend: str) -> None:
    """Needs the result of `nouscoder prepare`, which takes a minute."""
    go = installed().get("go")
    if go is None or go.cache is None:
        pytest.skip("go is not installed, or `nouscoder prepare` has not been run")
    try:
        sandbox = open_sandbox(SandboxSection(backend=backend, slots=1))
        await sandbox.start()
    except Exception as error:
        pytest.skip(str(error))
    try:
        async with sandbox.session(Program(go, GO, LIMITS)) as session:
            for _ in range(2):
                result = await session.run(b"2\n")
                assert (result.exit, result.exit_code, result.stdout) == (Exit.EXITED, 0, b"[2 3] 1\n"), result.stderr
        refused = {
            "package main\nfunc main() { x := 1 }": "declared and not used: x",
            'package main\nimport "internal/abi"\nfunc main() { _ = abi.FuncPCABI0 }': "could not import internal/abi",
            'package main\nimport "example.com/x"\nfunc main() { x.Y() }': "could not import example.com/x",
            "package main\nfunc f()\nfunc main() { f() }": "missing function body",
            "package other\nfunc main() { }": "",
            "package main\nfunc other() { }": "",
        }
        for code, message in refused.items():
            with pytest.raises(CompileFailed) as failed:
                async with sandbox.session(Program(go, code, LIMITS)):
                    pass
            assert message in failed.value.detail
    finally:
        await sandbox.close()


def test_without_a_cache_go_is_compiled_normally(cache: Path) -> None:
    found = find_installed(registry())
    if "go" in found:
        assert installed()["go"].compile == found["go"].compile
        assert installed()["go"].cache is None
