"""The modules that callers and the grading core load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SERVICES = Path(__file__).parents[2] / "services"
HEAVY = ("torch", "transformers", "fastapi", "uvicorn", "grpc", "redis", "httpx", "numpy")
PURE = "judges.comparators", "judges.judge", "grading.validation", "grading.runs", "grading.grader"


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import nouscoder.verifier", set()),
        ("from nouscoder.client import Client", {"httpx"}),
        *((f"import nouscoder.verifier.{module}", set()) for module in PURE),
        ("import nouscoder.verifier.process", {"httpx", "grpc", "fastapi", "uvicorn"}),
    ],
)
def test_nothing_heavy_is_loaded(statement: str, allowed: set[str]) -> None:
    code = f"{statement}\nimport sys\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert set(answer.stdout.split()) <= allowed


@pytest.mark.parametrize("module", ["sandbox.init_build", "toolchains.toolchain_cache"])
def test_the_image_of_the_sandbox_needs_the_standard_library_only(module: str) -> None:
    """deploy/images/sandbox/Dockerfile runs these modules with a Python that has no packages."""
    code = f"import sys\nsys.path.insert(0, {str(SERVICES)!r})\nimport nouscoder.verifier.{module}"
    subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, timeout=60, check=True)
