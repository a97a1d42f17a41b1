"""The grading service. For its callers: `from nouscoder.verifier import Client`; nothing heavy is loaded before use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nouscoder.verifier.client import AsyncClient, Client, GradingFailed

__all__ = ["AsyncClient", "Client", "GradingFailed"]


def __getattr__(name: str) -> object:
    """Load the client on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nouscoder.verifier import client

    return getattr(client, name)
