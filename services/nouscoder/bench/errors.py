"""The error of every bench."""

from __future__ import annotations

from nouscoder.errors import NousCoderError


class BenchError(NousCoderError):
    """The bench could not run, or an answer under load was wrong. The message says which."""
