"""The grading client, sync and async: `from nouscoder.client import Client`. Its only library is httpx."""

from __future__ import annotations

from nouscoder.client.http import AsyncClient, Client, GradingFailed, Patience

__all__ = ["AsyncClient", "Client", "GradingFailed", "Patience"]
