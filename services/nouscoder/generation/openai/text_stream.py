"""The text of tokens that come one after another.

INVARIANT: the texts that `add` and `end` return, joined, are the text of all tokens up to the first stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

# What a tokenizer writes for bytes that are not, or not yet, a character.
_REPLACEMENT = "\ufffd"


class TextStream:
    """Decodes tokens as they come. Text that may still change, or may begin a stop string, is held back."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = stops
        self._ids: list[int] = []
        # Tokens up to `_read` have been decoded; those from `_prefix` on are the context of the next ones, because a
        # token's text can depend on the token before.
        self._prefix = 0
        self._read = 0
        self._held = ""
        self.stopped = False

    def add(self, token_id: int) -> str:
        """The text that is certain now. After a stop string `stopped` is set, and there is no more text."""
        self._ids.append(token_id)
        return self._released(self._decoded(is_last=False), is_last=False)

    def end(self) -> str:
        """The rest of the text."""
        return self._released(self._decoded(is_last=True), is_last=True)

    def _decoded(self, *, is_last: bool) -> str:
        before = self._decode(self._ids[self._prefix : self._read])
        now = self._decode(self._ids[self._prefix :])
        if now.endswith(_REPLACEMENT) and not is_last:
            return ""  # perhaps the first bytes of a character
        self._prefix, self._read = self._read, len(self._ids)
        return now[len(before) :]

    def _released(self, text: str, *, is_last: bool) -> str:
        if self.stopped:
            return ""
        held = self._held + text
        places = [place for stop in self._stops if (place := held.find(stop)) >= 0]
        if places:
            self.stopped, self._held = True, ""
            return held[: min(places)]
        keep = 0 if is_last else max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that may be the beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
