"""Only private_folder.py names folders in places that all users of a host share. Others take a random name of tempfile.

A process on a host that names such a folder itself trusts whoever made it first.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import nouscoder

ROOT = Path(nouscoder.__file__).parent
SHARED = ("/tmp", "/var/tmp", "/dev/shm", "/run/user", "~/")
CALLS = {"gettempdir", "tempdir", "expanduser", "home", "mktemp"}
# Where these words mean a sandbox's own /tmp, or a folder that is only looked at.
ALLOWED = {
    "private_folder.py": "makes the folders",
    "verifier/harness": "in the sandbox",
    "verifier/judges/pytest_driver.py": "in the sandbox",
    "verifier/judges/pytest_trial.py": "in the sandbox",
    "verifier/sandbox/slot.py": "in the sandbox",
    "verifier/sandbox/runsc.py": "in the sandbox; its own folders have random names, and it removes those of its user",
    "verifier/toolchains/languages.py": "where a toolchain is installed",
    "data/importers/kattis.py": "in the sandbox",
    "data/harbor/in_sandbox.py": "in the sandbox",
    "doctor/host.py": "free bytes",
    "doctor/cluster/client.py": "the kubeconfig of the user, which is only read",
}


def named(tree: ast.AST) -> Iterator[str]:
    """What names a shared place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in CALLS:
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            if any(text == place or text.startswith(f"{place.rstrip('/')}/") for place in SHARED) or text.startswith(
                "XDG_"
            ):
                yield text


def test_only_the_module_of_private_folders_names_a_shared_place() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in ROOT.rglob("*.py")
        if not any(path.relative_to(ROOT).is_relative_to(allowed) for allowed in ALLOWED)
        for name in named(ast.parse(path.read_text(encoding="utf8")))
    }
    assert found == set()


def test_the_scan_finds_the_old_names() -> None:
    before = 'Path(tempfile.gettempdir()) / f"nouscoder-tests-{os.getuid()}"; Field(Path("/tmp/policies"))'
    assert set(named(ast.parse(before))) == {"gettempdir", "/tmp/policies"}
