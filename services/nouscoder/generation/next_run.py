"""The change from one run to the next, with the same engine: the stages of a plan are runs of their own.

INVARIANT: the next run is one that the engine in use can sample for. Whoever asks for the change gets one answer: the
run that is served, or the reason why the engine would have to be started again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nouscoder.config import Config
from nouscoder.domain.policy import Transport
from nouscoder.errors import NousCoderError
from nouscoder.input_file import read_json_object

# Keys of the section `generation` that a run can have otherwise than the one before, without a new engine.
_LIVE = ("max_tokens_total", "engine_tokens_total", "sampling", "environment", "partial_every_tokens", "openai")


class RunRefused(NousCoderError):
    """The next run cannot be served. The message says why."""


class NextRun:
    """`started`: the configuration with which the engine was started; `reread` gives that of the next run.

    `wanted` is that of the run that was asked for, if any, and `asked` is set then.
    """

    def __init__(self, started: Config, reread: Callable[[], Config] | None) -> None:
        self._started = started
        self._current = started
        self._reread = reread
        self.wanted: Config | None = None
        self.asked = asyncio.Event()
        self._served: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def change(self) -> str:
        """Change to the next run. Returns its name when it is served. Raises RunRefused and ConfigError."""
        if self._reread is None:
            raise RunRefused("the process was started without a configuration file, so there is no next run")
        config = await asyncio.to_thread(self._reread)
        if config == self._current:
            return config.run.name
        if self.wanted is not None:
            raise RunRefused(f"the change to run {self.wanted.run.name} is in progress")
        reason = await asyncio.to_thread(reason_to_start_again, self._started, config)
        if reason is not None:
            raise RunRefused(reason)
        self.wanted = config
        self.asked.set()
        return await asyncio.shield(self._served)

    def begun(self, config: Config) -> None:
        """The run of `config` is served now."""
        self._current, self.wanted = config, None
        self.asked.clear()
        served, self._served = self._served, asyncio.get_running_loop().create_future()
        served.set_result(config.run.name)


def reason_to_start_again(started: Config, wanted: Config) -> str | None:
    """Why the engine that was started with one configuration cannot sample for another; None when it can."""
    before, after = started.generation, wanted.generation
    for key, needed in (
        ("generation.max_tokens_total", after.max_tokens_total),
        ("evaluation.max_tokens_total", wanted.evaluating.generation.max_tokens_total),
    ):
        if needed > started.engine_tokens:
            return f"{key} {needed} is more than the {started.engine_tokens} tokens that the engine was started for"
    if after.guest_places > before.guest_places:
        return (
            f"the engine was started with {before.guest_places} places for generation.openai, not {after.guest_places}"
        )
    for name in type(after).model_fields:
        if name not in _LIVE and getattr(before, name) != getattr(after, name):
            return f"generation.{name} is not what the engine was started with"
    if before.policy_from is not Transport.FOLDER:
        return "policies are fetched from the learner, which is another one in each run"
    if before.engine != "torch" and before.vllm.on_update == "keep":
        # Its prefix cache has a key for each version, and versions begin again at 0 in each run.
        return "generation.vllm.on_update keep would find prompts in the cache of the run before"
    if started.policy.router_replay != wanted.policy.router_replay:
        return "policy.router_replay is not what the engine was started with"
    if _architecture_of(started) != _architecture_of(wanted):
        return "config.json of its first policy is another one, as with YaRN"
    return None


def _architecture_of(config: Config) -> dict[str, Any]:
    """config.json of the policy that a run begins with. Raises RunRefused."""
    file: Path = config.in_run_folder(config.policy.path) / "config.json"
    return read_json_object(file, RunRefused)
