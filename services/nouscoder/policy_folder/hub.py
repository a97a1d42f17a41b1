"""Models of a hub: ORGANISATION/MODEL is downloaded once into Hugging Face's cache, as its own libraries do."""

from __future__ import annotations

from pathlib import Path

from nouscoder.config.base import HUB_ID
from nouscoder.errors import Unusable

_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


class HubUnavailable(Unusable):
    """A model cannot be fetched from the hub. The message names it and says why."""


def is_hub_id(text: str) -> bool:
    """Whether the text has the form ORGANISATION/MODEL."""
    return HUB_ID.fullmatch(text) is not None


def downloaded(hub_id: str) -> Path:
    """The folder of a hub's model, fetched when it is not in the cache. Raises HubUnavailable."""
    # Importing the library takes a second.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_FILES)))
    except Exception as error:  # the library raises errors of httpx, of the disk and of its own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise HubUnavailable(f"{hub_id} is no folder here, and a hub did not give it: {reason[:200]}") from error
