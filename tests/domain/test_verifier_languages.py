"""Languages are data: the registry, the languages of this host, and invalid tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nouscoder.domain.submission import LANGUAGES, StdinCase, StdinTests, Submission, language_name
from nouscoder.verifier.grading.validation import Bounds, InvalidSubmission, validate
from nouscoder.verifier.toolchains.languages import find_installed, find_located, installed, registry


def test_only_python_runs_in_the_warm_interpreter() -> None:
    assert [name for name, language in registry().items() if language.run is None] == ["python"]
    assert "-O2" in (registry()["cpp"].compile or ())


def test_a_language_is_installed_only_with_all_its_tools(tmp_path: Path) -> None:
    tool = tmp_path / "java"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    assert set(find_installed(registry(), str(tmp_path))) == {"python"}  # javac is missing
    tool.rename(tmp_path / "gcc")
    assert set(find_installed(registry(), str(tmp_path))) == {"python"}  # sh is missing
    (tmp_path / "sh").symlink_to("gcc")
    found = find_installed(registry(), str(tmp_path))
    assert set(found) == {"python", "c"}
    assert {str(tmp_path / "sh"), str(tmp_path / "gcc")} <= set(found["c"].compile or ())


def test_a_compiler_in_a_home_folder_is_found_with_the_folder_that_it_needs(tmp_path: Path) -> None:
    """A script takes the place of rustup's `rustc`, which prints the folder of the toolchain."""
    home = tmp_path / "toolchains" / "stable"
    (home / "bin").mkdir(parents=True)
    (tmp_path / "system").mkdir()
    locate = tmp_path / "rustc"
    for tool in (home / "bin" / "rustc", tmp_path / "system" / "cc", locate):
        tool.write_text(f"#!/bin/sh\necho {home}\n")
        tool.chmod(0o755)
    rust = replace(registry()["rust"], locate=(str(locate),))
    found = find_located(rust, str(tmp_path / "system"))
    assert found is not None
    assert found.home == home.resolve()
    assert (found.compile or ())[0] == str(home / "bin" / "rustc")
    assert find_located(rust, "/nowhere") is None, "the linker is missing"
    assert find_located(replace(rust, locate=("/nowhere/rustc",)), str(tmp_path / "system")) is None
    for folder in ("/", "", "relative/folder/x", "/root"):
        locate.write_text(f"#!/bin/sh\necho '{folder}'\n")
        assert find_located(rust, str(tmp_path / "system")) is None, "candidates must not see this folder"


@pytest.mark.parametrize(
    "text",
    ["[x]\nsource = 'a'\n", "[x]\nsource='a'\ntime_factor=0\nmemory_extra_bytes=0\ndetect=[]\n", "[x]\ntypo=1\n"],
)
def test_an_invalid_table_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "languages.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"\[x\]"):
        registry(path)


def test_an_unknown_language_is_refused_with_the_list_of_installed_ones() -> None:
    for name in ("cobol", "Python", ""):
        with pytest.raises(InvalidSubmission, match="python") as refusal:
            validate(Submission(StdinTests((StdinCase("", ""),)), "", language=name), Bounds())
        assert refusal.value.field == "language"
    assert "python" in installed()


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("cpp", "C++;GNU C++17;GNU C++20 (64);C++17 (GCC 7-32);C++ (GCC 9.2.0);C++ 20 (Clang 16.0.6);cpp17;g++;c++20"),
        ("python", "Python 3;Python3;python3.11;py3;Python (3.8.1);Python (CPython 3.11.4);CPython"),
        ("pypy", "PyPy 3;PyPy 3-64;pypy3;Python 3 (PyPy);Python (PyPy 3.10)"),
        ("java", "Java 21;Java8;java1.8;Java (OpenJDK 13.0.1)"),
        ("c", "C11;GNU C11;C (GCC 9.2.0);c89;C99"),
        ("go", "Go 1.20;go1.22;Go (1.14.1)"),
        ("php", "PHP 8.2;PHP (7.4)"),
        ("javascript", "Node.js;Node.js 20;nodejs;JavaScript (Node.js 12)"),
        ("csharp", "C# 7;c#;Mono;C# (Mono 6.12)"),
        ("lua", "lua5.4;Lua 5.3"),
        ("perl", "Perl 5.20"),
        ("rust", "Rust 2021;Rust 1.75.0 (1.75.0)"),
    ],
)
def test_names_of_judges_and_data_sets_are_understood(name: str, given: str) -> None:
    assert {language_name(one) for one in given.split(";")} == {name}


@pytest.mark.parametrize(
    "given",
    [
        *(
            "cpp23",
            "C++23",
            "c++ 23",
            "GNU C++23 (64)",
            "C++ 23 (GCC 12.2)",
            "g++23",
            "c++26",
            "c++2b",
            "cc23",
            "cxx26",
        ),
        *("c23", "C23 (GCC 14.1.0)", "gnu c23", "rust2024", "Rust 2024", "rs-2024", "Rust (2024)", "C# 8.0", "C#12"),
        *("csharp13", "c# 10"),
        *("cpp99", "C++98", "C++03 (GCC 4.8)", "c++0x", "c95", "java99", "Java 4", "rust2015", "rust2019", "go2"),
        *("php5", "PHP (5.6)", "Ruby 1.9", "kotlin3", "node99", "R 2", "typescript9", "bash9"),
    ],
)
def test_a_standard_that_is_not_taken_is_no_language_here_but_a_tag_of_the_same(given: str) -> None:
    assert language_name(given) == given
    assert language_name(given, any_standard=True) in LANGUAGES or given in ("c++2b", "c++0x")


@pytest.mark.parametrize(
    "given",
    ["Python 2", "python2.7", "Python (2.7.17)", "PyPy 2", "Lua 5.1", "Perl6", "Haskell", "", "c++" * 20, "C++ (x)"],
)
def test_a_name_that_is_of_no_language_here_is_unchanged(given: str) -> None:
    assert language_name(given) == given
