"""Gives a package of this folder the version, the requirements and the description of the whole project.

A hook of hatchling. In a package, `[tool.hatch.metadata.hooks.custom]` names the extras of the project that it always
needs (`requires`), and those that it offers too (`extras`).
"""

from __future__ import annotations

import re
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

ROOT = Path(__file__).resolve().parents[1]
SAME = ("requires-python", "authors", "license", "classifiers", "urls")
_ITSELF = re.compile(r"nouscoder\[([\w,-]+)\]")


class MetadataOfRoot(MetadataHookInterface):
    """See the module."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in what the package declares as dynamic."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]
        extras = project["optional-dependencies"]
        always = set(_packages(extras, self.config["requires"]))
        metadata.update({key: project[key] for key in SAME})
        metadata["version"] = runpy.run_path(str(ROOT / "deploy" / "version.py"))["version"]()
        metadata["dependencies"] = sorted(always)
        metadata["optional-dependencies"] = {
            name: sorted(set(_packages(extras, [name])) - always) for name in self.config.get("extras", ())
        }


def _packages(extras: dict[str, list[str]], names: list[str]) -> Iterator[str]:
    for name in names:
        for requirement in extras[name]:
            if itself := _ITSELF.fullmatch(requirement):
                yield from _packages(extras, itself[1].split(","))
            else:
                yield requirement
