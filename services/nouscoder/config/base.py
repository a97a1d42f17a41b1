"""The base of all sections of the configuration: unknown keys fail, and sections are immutable."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from nouscoder.errors import Unusable


class ConfigError(Unusable):
    """The configuration cannot be used. The message names the invalid key."""


class Section(BaseModel):
    """Base of every section: unknown keys fail, and it is immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)
