"""What every section of the configuration is: closed and frozen."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from nouscoder.errors import Unusable


class ConfigError(Unusable):
    """The configuration cannot be used; the message names the key at fault."""


class Section(BaseModel):
    """Base of every section: closed and frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)
