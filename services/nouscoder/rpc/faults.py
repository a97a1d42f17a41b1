"""What is wrong with a message from outside."""

from __future__ import annotations


class InvalidMessage(ValueError):
    """A message from outside breaks the protocol; the text names the field."""
