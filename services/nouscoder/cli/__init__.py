"""The command line `nouscoder`: one module per group of commands, joined by app.py."""

from __future__ import annotations

from nouscoder.cli.app import app, main

__all__ = ["app", "main"]
