"""The grading client, sync and async: `from nouscoder.client import Client`. It needs httpx alone."""

from __future__ import annotations

from nouscoder.client.http import AsyncClient, Client, GradingFailed

__all__ = ["AsyncClient", "Client", "GradingFailed"]
