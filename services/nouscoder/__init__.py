"""NousCoder: reinforcement learning of code models on verifiable problems, and the grading service it needs."""

from __future__ import annotations

__version__: str  # of the installed package, which deploy/version.py made from the tag


def __getattr__(name: str) -> str:
    """Only what asks for the version reads the package's metadata. Source that is not installed has 0+unknown."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("nouscoder")
    except PackageNotFoundError:
        return "0+unknown"
