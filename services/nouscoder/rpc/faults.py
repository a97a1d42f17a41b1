"""The error for a message that breaks the protocol."""

from __future__ import annotations


class InvalidMessage(ValueError):
    """A message breaks the protocol; the text names the field."""
