"""GET /v1/capabilities: what a client can rely on: languages, libraries, limits, isolation.

A program in a sandbox finds the versions (toolchains/probe_program.py), because only what a candidate sees counts.

INVARIANT: the program runs at most once at a time, and never again after it has succeeded.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nouscoder import __version__
from nouscoder.domain.submission import Limits, Profile
from nouscoder.verifier.grading.grader import Grader, QueueFull
from nouscoder.verifier.grading.validation import Bounds
from nouscoder.verifier.judges.users_comparators import loaded_comparators, published_comparators
from nouscoder.verifier.sandbox.base import CompileFailed, Exit, Program, SandboxError
from nouscoder.verifier.toolchains import probe_program
from nouscoder.verifier.toolchains.languages import SEARCH_PATH, Language, installed

log = logging.getLogger(__name__)

_LIMITS = Limits(wall_time_s=60.0, cpu_time_s=60.0, output_bytes=64 * 1024, processes=256)
_MAX_CHARS = 200
_FLAG = re.compile(r"-O|--?\w[^\n]+")
_PROGRAM = Path(probe_program.__file__).read_text("utf-8")


class LimitValues(BaseModel):
    """Limits of one test. Times are in seconds, before the language's time_factor."""

    wall_time_s: float
    cpu_time_s: float
    memory_bytes: int
    output_bytes: int
    processes: int


class LanguageAnswer(BaseModel):
    """A language that submissions can have."""

    version: str | None = Field(description="what its compiler or interpreter says; null when that is not known")
    source: str = Field(description="the name of the file that holds the submission's code")
    flags: list[str] = Field(description="options of its compiler and its runtime, with the standard of the language")
    time_factor: float = Field(description="multiplies the time limits of a request")
    memory_extra_bytes: int = Field(description="added to the memory limit of a request, for the runtime itself")
    libraries: dict[str, str | None] | None = Field(
        description="libraries beyond the standard library: the version, null for one that is not installed; null"
        " instead of the object while nothing is known"
    )


class CapabilitiesAnswer(BaseModel):
    """What this service can grade, and within which limits."""

    service_version: str
    backend: str
    isolation: list[str] = Field(description="the layers between a candidate and the host, by their short names")
    num_slots: int = Field(description="submissions that run at the same time")
    languages: dict[str, LanguageAnswer]
    libraries: dict[str, str] | None = Field(
        description="Python packages beyond the standard library, with versions; null when they are not known"
    )
    profiles: list[str]
    comparators: list[str]
    default_limits: LimitValues
    max_limits: LimitValues
    max_tests: int


class _Found(BaseModel):
    """What the program prints. A runner may be hostile, so everything is bounded."""

    model_config = ConfigDict(str_max_length=_MAX_CHARS)

    languages: dict[str, str] = Field(max_length=100)
    libraries: dict[str, str] = Field(max_length=1000)
    native: dict[str, Annotated[dict[str, str], Field(max_length=100)]] = Field(max_length=100)


class Capabilities:
    """The capabilities of the service that `grader` belongs to."""

    def __init__(self, grader: Grader, isolation: Sequence[str]) -> None:
        self._grader = grader
        self._isolation = list(isolation)
        self._found: _Found | None = None
        self._probing = asyncio.Lock()

    async def answer(self) -> CapabilitiesAnswer:
        """The capabilities. Versions are unknown while the sandboxes are too busy or fail."""
        async with self._probing:
            if self._found is None:
                self._found = await self._probe()
        bounds = Bounds()
        return CapabilitiesAnswer(
            service_version=__version__,
            backend=self._grader.backend,
            isolation=self._isolation,
            num_slots=self._grader.num_slots,
            languages={name: self._language(language) for name, language in installed().items()},
            libraries=self._found.libraries if self._found else None,
            profiles=[profile.value for profile in Profile],
            comparators=[*published_comparators(), *loaded_comparators()],
            default_limits=LimitValues(**asdict(Limits())),
            max_limits=LimitValues(**asdict(bounds.limits)),
            max_tests=bounds.num_tests,
        )

    def _language(self, language: Language) -> LanguageAnswer:
        return LanguageAnswer(
            version=self._found.languages.get(language.name) if self._found else None,
            source=language.source_name,
            flags=[word for word in (*(language.compile or ()), *(language.run or ())) if _FLAG.fullmatch(word)],
            time_factor=language.time_factor,
            memory_extra_bytes=language.memory_extra_bytes,
            libraries=self._libraries_of(language),
        )

    def _libraries_of(self, language: Language) -> dict[str, str | None] | None:
        if self._found is None:
            return None
        if language.run is None:
            return dict(self._found.libraries)
        found = self._found.native.get(language.name, {})
        return {name: found.get(name) for name in language.libraries}

    async def _probe(self) -> _Found | None:
        """Run the program. Returns None when it does not run: the next request tries again."""
        known = installed()
        asked = {
            "path": SEARCH_PATH,
            "languages": {name: language.version for name, language in known.items() if language.version},
            "native": {name: language.libraries for name, language in known.items() if language.libraries},
        }
        program = Program(known["python"], _PROGRAM, _LIMITS)
        try:
            result, _ = await self._grader.run_once(program, json.dumps(asked).encode(), {})
            if result.exit is not Exit.EXITED or result.exit_code:
                raise SandboxError(f"it ended with {result.exit.value}: {result.stderr[-_MAX_CHARS:]!r}")
            return _Found.model_validate_json(result.stdout)
        except (SandboxError, CompileFailed, QueueFull, ValidationError) as error:
            log.warning("the versions of languages and libraries are not known", extra={"reason": str(error)})
            return None
