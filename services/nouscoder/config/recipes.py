"""The paths of the configurations in configs/, in a checkout and in an installed package."""

from __future__ import annotations

from pathlib import Path

from nouscoder.config.base import ConfigError

_PACKAGE = Path(__file__).parents[1]


def recipe_path(name: str) -> Path:
    """The TOML file of a recipe. Raises ConfigError naming the existing recipes."""
    folders = [_PACKAGE / "configs", _PACKAGE.parents[1] / "configs"]
    for folder in folders:
        if (folder / f"{name}.toml").is_file():
            return folder / f"{name}.toml"
    known = sorted({file.stem for folder in folders for file in folder.glob("*.toml")})
    raise ConfigError(f"there is no recipe {name!r}; there are: {', '.join(known)}")
