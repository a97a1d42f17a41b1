"""NousCoder: reinforcement learning of code models on verifiable problems, and the grading service it needs."""

from __future__ import annotations

# The packages that hold this code, or a part of it (packages/): one of them is installed.
PACKAGES = ("nouscoder", "nouscoder-grader", "nouscoder-client")

__version__: str  # of the installed package, which deploy/version.py made from the tag


def __getattr__(name: str) -> str:
    """Only what asks for the version reads the package's metadata. Source that is not installed has 0+unknown."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    for package in PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "0+unknown"
