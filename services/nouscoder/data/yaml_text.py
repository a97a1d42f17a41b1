"""Reads YAML that strangers wrote, within bounds of its size and of the nodes that its aliases stand for."""

from __future__ import annotations

from functools import cache
from typing import Any

from nouscoder.data.bounded_files import FileRefused, FileTooLarge
from nouscoder.errors import why_unreadable

MAX_YAML_BYTES = 256 * 1024
MAX_YAML_NODES = 100_000  # with each alias counted as what it stands for


def yaml_mapping(text: str) -> dict[str, Any]:
    """The mapping that a YAML text holds; empty for another value. Raises FileRefused."""
    import yaml

    if len(text) > MAX_YAML_BYTES:
        raise FileTooLarge(f"it is longer than {MAX_YAML_BYTES // 1024} KiB")
    try:
        value = yaml.load(text, _yaml_loader())  # a SafeLoader
    except FileTooLarge:
        raise
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise FileRefused(f"it is not YAML: {why_unreadable(error).splitlines()[0]}") from None
    return value if isinstance(value, dict) else {}


@cache
def _yaml_loader() -> Any:
    """A SafeLoader that counts nodes. An alias is one object in memory, but whoever copies or prints it gets many."""
    import yaml

    class Loader(yaml.SafeLoader):
        def __init__(self, stream: str) -> None:
            super().__init__(stream)
            self._weights: dict[int, int] = {}

        def compose_node(self, parent: Any, index: Any) -> Any:
            is_alias = self.check_event(yaml.AliasEvent)
            node = super().compose_node(parent, index)
            if not is_alias:
                values = node.value if isinstance(node, yaml.CollectionNode) else ()
                parts = (part for each in values for part in (each if isinstance(each, tuple) else (each,)))
                self._weights[id(node)] = 1 + sum(self._weights[id(part)] for part in parts)
            elif id(node) not in self._weights:
                raise yaml.YAMLError("an alias stands inside its own value")
            if self._weights[id(node)] > MAX_YAML_NODES:
                raise FileTooLarge(f"it has more than {MAX_YAML_NODES:,} values, aliases included")
            return node

    return Loader
