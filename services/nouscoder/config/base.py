"""The base of every section of the configuration, and the marks of values that are paths."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict

from nouscoder.errors import Unusable


class ConfigError(Unusable):
    """The configuration cannot be used. The message has one sentence for each fault, naming file and key."""


class Section(BaseModel):
    """Base of every section: unknown keys fail, and it is immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Place(StrEnum):
    """What a path names. A relative path starts at the folder of the configuration file.

    INPUT      a file or folder that must exist
    OUTPUT     a file or folder that is made when it is missing
    RUN_INPUT  like INPUT; when nothing is there, the key's default starts at the run folder
    MODEL      like RUN_INPUT; when nothing is there, ORGANISATION/MODEL is a model of a hub
    """

    INPUT = "input"
    OUTPUT = "output"
    RUN_INPUT = "run_input"
    MODEL = "model"


InputFile = Annotated[str, Place.INPUT]
OutputFile = Annotated[str, Place.OUTPUT]
OutputPath = Annotated[Path, Place.OUTPUT]
RunInput = Annotated[Path, Place.RUN_INPUT]
Model = Annotated[Path, Place.MODEL]
InputPaths = Annotated[tuple[Path, ...], Place.INPUT]
