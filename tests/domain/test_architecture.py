"""The import rules of docs/architecture.md."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "services" / "nouscoder"
DOMAIN = sorted(file.stem for file in (SOURCE / "domain").glob("*.py"))


def imported_modules(file: Path) -> set[str]:
    """The absolute names of all imports of a file, also those inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found


@pytest.mark.parametrize("name", DOMAIN)
def test_domain_imports_the_standard_library_and_the_domain_only(name: str) -> None:
    allowed = {"nouscoder.errors", *(f"nouscoder.domain.{other}" for other in DOMAIN)}
    foreign = {
        module
        for module in imported_modules(SOURCE / "domain" / f"{name}.py")
        if module.split(".")[0] not in sys.stdlib_module_names and module not in allowed
    }
    assert not foreign


def test_stubs_are_imported_by_rpc_and_servicers_only() -> None:
    users = {
        str(file.relative_to(SOURCE))
        for file in SOURCE.rglob("*.py")
        if "v1" not in file.relative_to(SOURCE).parts
        and any(module.startswith("nouscoder.v1") for module in imported_modules(file))
    }
    strangers = {user for user in users if not user.startswith("rpc/") and not user.endswith("/servicer.py")}
    assert users, "the search must find the stubs"
    assert not strangers


@pytest.mark.parametrize(
    "module",
    [
        "nouscoder.verifier",
        "nouscoder.verifier.process",
        "nouscoder.broker.process",
        "nouscoder.cli",
        "nouscoder.objectives.registry",
    ],
)
def test_light_modules_load_neither_torch_nor_transformers(module: str) -> None:
    code = f"import {module}, sys; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.strip() == "[]"


def test_no_module_is_named_utils() -> None:
    assert not list(SOURCE.rglob("*util*.py"))


def test_the_loop_names_functions_that_exist() -> None:
    """run/loop.py describes the four services by the names of their functions."""
    text = ast.get_docstring(ast.parse((SOURCE / "run" / "loop.py").read_text(encoding="utf8"))) or ""
    named = re.findall(r"^ {4}(\w\S*.*?) {2,}(\w+)/(\w+\.py(?:, \w+\.py)*)$", text, re.MULTILINE)
    assert len(named) == 4
    for functions, folder, files in named:
        trees = [ast.parse((SOURCE / folder / file).read_text(encoding="utf8")) for file in files.split(", ")]
        nodes = [node for tree in trees for node in ast.walk(tree)]
        defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        names = re.findall(r"(?:\w+\.)?(\w+)", functions.removesuffix(" and the other calls"))
        assert set(names) <= defined, functions
    for module in re.findall(r"\w+/\w+\.py", text):
        assert (SOURCE / module).is_file(), module


def test_no_block_of_except_star_raises() -> None:
    """Python 3.11.0 to 3.11.3, such as that of Debian 12, puts what it raises into an ExceptionGroup."""
    raising = {
        f"{file.relative_to(SOURCE)}:{part.lineno}"
        for file in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf8")))
        if isinstance(node, ast.TryStar)
        for handler in node.handlers
        for part in ast.walk(handler)
        if isinstance(part, ast.Raise)
    }
    assert not raising
