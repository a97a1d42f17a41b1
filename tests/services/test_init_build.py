"""Init is compiled once for its sources and found in an image. A missing compiler is one clear sentence."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from nouscoder.verifier.sandbox import SandboxUnavailable, init_build


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("NOUSCODER_INIT_FOLDER", str(tmp_path))
    init_build.init_library_path.cache_clear()
    yield
    init_build.init_library_path.cache_clear()


def test_init_is_compiled_once_and_then_needs_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = init_build.init_library_path()
    assert library.is_file()
    assert library.is_relative_to(tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [library]
    made = library.stat().st_mtime_ns
    monkeypatch.setattr(shutil, "which", lambda *_: None)
    init_build.init_library_path.cache_clear()
    assert init_build.init_library_path() == library
    assert library.stat().st_mtime_ns == made


def test_changed_sources_give_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = init_build.init_library_path()
    sources = tmp_path / "sources"
    shutil.copytree(init_build._SOURCES, sources)
    with (sources / "init.c").open("a") as source:
        source.write("/* changed */\n")
    monkeypatch.setattr(init_build, "_SOURCES", sources)
    init_build.init_library_path.cache_clear()
    second = init_build.init_library_path()
    assert second != first
    assert second.is_file()
    assert first.is_file()


def test_no_compiler_is_one_sentence_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_: None)
    with pytest.raises(SandboxUnavailable, match=r"no C compiler .*apt-get install gcc"):
        init_build.init_library_path()


def test_a_failing_compiler_is_named_and_leaves_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'no such flag' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(SandboxUnavailable, match="no such flag"):
        init_build.init_library_path()
    assert list(tmp_path.rglob("*.so")) == []


def test_a_folder_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("NOUSCODER_INIT_FOLDER", os.fspath(blocked))
    with pytest.raises(SandboxUnavailable, match="cannot be compiled"):
        init_build.init_library_path()
