"""The command line `nouscoder`: a module a group of commands; app.py joins them."""

from __future__ import annotations

from nouscoder.cli.app import app, main

__all__ = ["app", "main"]
