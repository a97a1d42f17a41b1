"""`pip install nouscoder[client]`: a wheel with only the dependencies of that extra can import and use the client."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).parents[2]
SCRIPT = """
import sys
wheel, allowed = sys.argv[1], {*sys.argv[2].split(","), "nouscoder"}
sys.path = [wheel, *(entry for entry in sys.path if not entry.endswith("services"))]

class OnlyAllowed:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in allowed and top not in sys.stdlib_module_names:
            raise ModuleNotFoundError(f"{name} is not a dependency of nouscoder[client]", name=name)

sys.meta_path.insert(0, OnlyAllowed())
import nouscoder.client as grading
assert grading.__file__.startswith(wheel), grading.__file__
with grading.Client("http://127.0.0.1:9", grading.Patience(unreachable_s=0.0)) as client:
    try:
        client.grade(code="", tests={})
    except grading.GradingFailed as error:
        print(f"{type(error).__name__}: {error}")
try:
    import fastapi
except ModuleNotFoundError:
    print("fastapi is hidden")
"""


def dependencies_of(requirement: Requirement) -> set[str]:
    """The distributions that `requirement` installs, including their dependencies."""
    found: set[str] = set()
    waiting = [requirement]
    while waiting:
        current = waiting.pop()
        for text in requires(current.name) or ():
            needed = Requirement(text)
            wanted = any(needed.marker is None or needed.marker.evaluate({"extra": e}) for e in ("", *current.extras))
            name = canonicalize_name(needed.name)
            if wanted and name not in found:
                found.add(name)
                waiting.append(needed)
    return found


def test_a_wheel_with_the_dependencies_of_the_client_extra_has_a_working_client(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=PROJECT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    distributions = dependencies_of(Requirement("nouscoder[client]"))
    assert "httpx" in distributions
    assert not {"fastapi", "grpcio", "torch", "redis"} & distributions
    modules = [
        module
        for module, owners in packages_distributions().items()
        if distributions & {canonicalize_name(owner) for owner in owners}
    ]
    command = [sys.executable, "-c", SCRIPT, str(wheel), ",".join(modules)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("GradingFailed: the grading service does not answer")
    assert done.stdout.splitlines()[1:] == ["fastapi is hidden"]
