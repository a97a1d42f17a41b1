"""`nouscoder demo`: prepare problems and a policy, then run the same loop as `nouscoder train`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from nouscoder.config import Config, ConfigError, load_config
from nouscoder.config.recipe import recipe_path
from nouscoder.config.tree import read_given
from nouscoder.errors import NousCoderError, WrongUse
from nouscoder.policy_folder.engine_choice import missing_engine
from nouscoder.run.console.feed import Feed
from nouscoder.run.folder import RunFolder, newest_version, unused_name
from nouscoder.run.loop import interruptible, run_loop, until_cancelled
from nouscoder.run.pages import open_pages
from nouscoder.run.preflight import address_faults, device_faults, require_training, say_unused_gpu
from nouscoder.run.resume import continue_finished, note_given, resumed, take
from nouscoder.run.standing import lines_when_stopped
from nouscoder.run.supervisor import SHARED_CORES
from nouscoder.run.users_code import users_code_faults
from nouscoder.run.view import View, open_view

PREPARE_LIMIT_S = 900.0


class PreparationError(NousCoderError):
    """The demo could not be prepared. The message ends with the last line of the preparation's log."""


async def demo_run(*, seed: int, name: str | None, resume: bool, overrides: Sequence[str], recipe: str = "demo") -> int:
    """Run the demo of this recipe. Returns the exit code. Raises NousCoderError with a message of one sentence."""
    started_s = time.monotonic()
    require_training()
    config = _config(recipe, seed, name, overrides, resume=resume)
    checks = (device_faults, missing_engine, address_faults, users_code_faults)
    if faults := [fault for check in checks for fault in check(config)]:
        raise ConfigError("\n".join(faults))
    if recipe != "demo":  # its policy is too small for a GPU
        say_unused_gpu(config)
    folder, config, notes = _opened(config, overrides, resume=resume)
    try:
        with (
            open_view(Console()) as terminal,
            open_pages(folder.path, config.run.pages, config.run.pages_hosts, view := Feed(terminal)) as address,
        ):
            for note in notes:
                view.say(note)
            work = _shown(folder, config, view, started_s, address)
            return await interruptible(work, lines_when_stopped(config))
    finally:
        folder.close()


async def _shown(folder: RunFolder, config: Config, view: View, started_s: float, address: str) -> None:
    """Prepare and run. With pages at `address`: until Ctrl-C or SIGTERM."""
    if address:
        view.say(f"the run is shown at http://{address}/")
    await prepare_and_run(folder, config, view, started_s)
    if address:
        view.say(f"the run's pages are at http://{address}/ until Ctrl-C")
        await until_cancelled()


def _opened(config: Config, overrides: Sequence[str], *, resume: bool) -> tuple[RunFolder, Config, list[str]]:
    """The run folder, the configuration in force, and what is to be said of it. Raises RunChanged."""
    given = read_given(None, overrides)
    if not resume:
        folder = RunFolder.create(config)
        note_given(folder, given)
        return folder, config, []
    folder, recorded = RunFolder.reopen(config.run.folder)
    try:
        run = resumed(folder.path, recorded, given)
        continue_finished(folder, run)
        take(folder, run, given, newest_version(run.config))
    except BaseException:
        folder.close()
        raise
    return folder, run.config, run.lines


def _config(recipe: str, seed: int, name: str | None, overrides: Sequence[str], *, resume: bool) -> Config:
    for key, option in (("run.seed", "--seed"), ("run.name", "--name")):
        if any(each.partition("=")[0] == key for each in overrides):
            raise WrongUse(f"--set {key} is {option} of the demo: give {option}")
    config = load_config(recipe_path(recipe), [*overrides, f"run.seed={seed}"])
    wanted = name or f"{recipe}-{seed}"
    if name is None and not resume:
        wanted = unused_name(config.run.root, wanted)
    return load_config(recipe_path(recipe), [*overrides, f"run.seed={seed}", f'run.name="{wanted}"'])


def computes_in_bfloat16() -> bool:
    """Whether this CPU multiplies matrices in bfloat16, which is about twice as fast as in float32 then."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:  # not Linux
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


async def prepare_and_run(folder: RunFolder, config: Config, view: View, started_s: float) -> None:
    """Make the missing inputs of a run on the demo's problems, then run it. Raises NousCoderError with one sentence."""
    view.say(f"run folder: {folder.path}")
    await _prepare(folder, view)
    await run_loop(folder, config, view, started_s)


async def _prepare(folder: RunFolder, view: View) -> None:
    """Run the preparation in a separate process and show its progress."""
    with (folder.logs / "prepare.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "nouscoder.demo.prepare", str(folder.config_file)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env={**os.environ, **SHARED_CORES},
        )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(PREPARE_LIMIT_S):
            async for line in process.stdout:
                report = json.loads(line)
                view.progress(report["phase"], report["done"], report["total"], f"loss {report['loss']:.3f}")
            code = await process.wait()
    except TimeoutError:
        raise PreparationError(f"the preparation took longer than {PREPARE_LIMIT_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code:
        lines = (folder.logs / "prepare.log").read_text(encoding="utf8", errors="replace").strip().splitlines()
        raise PreparationError(f"the preparation failed: {lines[-1] if lines else f'exit code {code}'}")
