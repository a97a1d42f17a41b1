"""A run or a fine-tuning goes on with new values, or after its end.

    config.toml            the values that are in force; a later start without new values has them too
    given.json             what the configuration file and --set said at the last start
    config_history.jsonl   one line for each start with new values: what changed, and after how many policy versions

A value is new when --set has it and it is not in force, or when the configuration file says something else than at the
last start. So a value of --set lasts, although the file still has the old one.

INVARIANT: a start with a new value that the run cannot take changes nothing on the disk. A value that is taken is in
config.toml and in config_history.jsonl before a service starts. Batches that were trained before keep the values of
their first training (learner/state/batch_settings.py), so a crash changes nothing of what is done.

A run has finished when summary.json is there. It goes on when there are batches left and a value of CONTINUES is new.
Its last evaluation becomes one of those during the run, and its last policy and checkpoint are kept like theirs.
"""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nouscoder.atomic_files import link_or_copy, numbered, remove, whole_folder, write_whole
from nouscoder.broker.redis_address import configured_url
from nouscoder.config import Config, ConfigError, load_config
from nouscoder.config.run import merged
from nouscoder.config.tree import Given, sentences
from nouscoder.errors import without_secrets
from nouscoder.policy_folder.inspection import is_hub_id
from nouscoder.run.evaluation_files import evaluation_file, keep_weights, kept_checkpoint_folder
from nouscoder.run.folder import FIXED, RunChanged, RunFolder, newest_version, record_of

GIVEN, HISTORY = "given.json", "config_history.jsonl"
# A local run finds its folder by the first two; the addresses of its services are chosen at each start.
_NOT_VALUES = ("run.name", "run.root")
_ADDRESSES = tuple(
    f"{name}.{kind}" for name in ("broker", "verifier", "generation", "learner") for kind in ("grpc", "metrics")
)
# What the services of a local run keep where these point.
OF_A_RUN = (*FIXED, "run.services", "broker.redis_url", "broker.redis_url_file")
# With another value the same step gives other bits. Steps that no checkpoint holds are computed again after a crash.
_ARITHMETIC = ("learner.device", "learner.threads", "learner.attention", "learner.context_parallel")
# A finished run goes on with a new one of these.
CONTINUES = (
    *("run.total_batches", "run.max_filtered_batches", "run.guards"),
    *("evaluation.end_at_pass_at_1", "evaluation.end_after_no_gain"),
    *("broker.drop_zero_variance", "broker.max_filtered_groups", "broker.curriculum"),
)
_HARMLESS = ("run.pages", "run.pages_hosts", "run.sinks", "run.release", "recipe")  # also for a run that stays finished

Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Resumed:
    """The configuration in force, and the new values: key -> (before, now)."""

    config: Config
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def lines(self) -> list[str]:
        """What is to be said at the start."""
        if not self.changes:
            return []
        said = (f"{key} {_shown(before)} -> {_shown(now)}" for key, (before, now) in self.changes.items())
        return [without_secrets(f"resuming with {', '.join(said)}")]


def resumed(path: Path, recorded: Config, given: Given, fixed: Sequence[str] = OF_A_RUN) -> Resumed:
    """The configuration with which the run goes on. Nothing is written.

    Raises RunChanged naming the new values that the run cannot take, and ConfigError for values that do not fit.
    """
    wanted = _new_values(given, _read_given(path), recorded)
    tree = merged(recorded.model_dump(mode="json", by_alias=True), _nested(wanted))
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(sentences(error, Config))) from error
    found = Resumed(config, _changes(recorded, config))
    if faults := [*_refused(found, fixed, path)]:
        raise RunChanged("\n".join(faults))
    return found


def take(folder: RunFolder, run: Resumed, given: Given, done: int) -> None:
    """Put the new values in force, and note what was given. `done`: policy versions or steps up to now."""
    if run.changes:
        _add_to_history(folder, run, done)
        folder.record(run.config)
    note_given(folder, given)


def external_changes(folder: RunFolder, config: Config) -> Resumed:
    """Note in the history which values of an external run are new, without keys that a newer release added."""
    old, now = (_flat(tomllib.loads(text)) for text in (folder.config_file.read_text("utf8"), record_of(config)))
    run = Resumed(config, {key: (old[key], value) for key, value in now.items() if key in old and old[key] != value})
    if run.changes:
        _add_to_history(folder, run, newest_version(config))
    return run


def _add_to_history(folder: RunFolder, run: Resumed, done: int) -> None:
    """A start that was killed before it took the values has noted them: the next one takes the same."""
    changes = json.loads(without_secrets(json.dumps({key: [*pair] for key, pair in run.changes.items()})))
    line = {"time": time.time(), "done": done, "changes": changes}
    file = folder.path / HISTORY
    known = file.read_text(encoding="utf8") if file.exists() else ""
    if known and json.loads(known.splitlines()[-1])["changes"] == changes:
        return
    write_whole(file, (known + without_secrets(json.dumps(line, ensure_ascii=False)) + "\n").encode())


def note_given(folder: RunFolder, given: Given) -> None:
    """Note what was given at this start, without what is not a value."""
    text = json.dumps({"file": given.file, "sets": given.sets}, ensure_ascii=False, indent=1, default=str)
    write_whole(folder.path / GIVEN, without_secrets(text).encode(), private=True)


def refuse_changes_of(run: Path, given: Given) -> None:
    """Raises RunChanged for new values that the run in this folder cannot take. Nothing is written."""
    resumed(run, load_config(run / "config.toml"), given)


def reopened(path: Path, given: Given, what: str) -> tuple[RunFolder, Config]:
    """The folder and configuration of what takes no new values, but may be given the same again. Raises RunChanged."""
    folder, recorded = RunFolder.reopen(path)
    before = _read_given(path)
    if before is None:
        return folder, recorded
    files, sets = [_flat(each.file) for each in (before, given)], [_flat(each.sets) for each in (before, given)]
    new = {key for key in {*files[0], *files[1]} if files[0].get(key) != files[1].get(key)}
    new |= {key for key, value in sets[1].items() if sets[0].get(key) != value}
    if new := new.difference(_NOT_VALUES):
        folder.close()
        raise RunChanged(
            f"{what} takes no new values with --resume: put back {', '.join(sorted(new))}, or take another run.name"
        )
    return folder, recorded


def continue_finished(folder: RunFolder, run: Resumed, *, is_external: bool = False) -> None:
    """Make a finished run one that goes on, if batches are left and a value of CONTINUES is new.

    Raises RunChanged when a local run stays finished and other values are new. A crash leaves a run that does the same
    again.
    """
    summary = folder.read_json("summary.json")
    if summary is None:
        return
    trained = int(summary["steps"]) // run.config.learner.steps_per_batch
    if any(_is_of(key, CONTINUES) for key in run.changes) and trained < run.config.run.total_batches:
        _keep_last(folder.path, run.config)
        remove(folder.summary_file)
    elif not is_external and (idle := [key for key in run.changes if not _is_of(key, _HARMLESS)]):
        raise RunChanged(
            f"the run in {folder.path} is finished after {trained} batches: {', '.join(idle)} changes nothing; set"
            f" run.total_batches above {trained} to go on"
        )


def _keep_last(run: Path, config: Config) -> None:
    """The last policy was measured after the run. It becomes one of those that were measured during the run."""
    after = run / "evaluation_after.json"
    if not after.exists():
        return
    record = json.loads(after.read_text(encoding="utf8"))
    version = int(record["policy_version"])
    if version:
        keep_weights(run, version)
        checkpoint = numbered(run / "checkpoints").get(version * config.learner.steps_per_batch)
        if checkpoint is not None:
            with whole_folder(kept_checkpoint_folder(run, version)) as part:
                for file in sorted(checkpoint.iterdir()):
                    link_or_copy(file, part / file.name)
        write_whole(run / evaluation_file(version), after.read_bytes())
    remove(after)


def _read_given(path: Path) -> Given | None:
    """What was given at the last start; None for a folder of an earlier release."""
    file = path / GIVEN
    if not file.exists():
        return None
    known = json.loads(file.read_text(encoding="utf8"))
    return Given(known["file"], known["sets"])


def _new_values(given: Given, before: Given | None, recorded: Config) -> Values:
    """By key, unchecked: those of --set, and those that the file says anew."""
    now, found = _flat(given.file), {}
    if before is not None:
        old, usual = _flat(before.file), _flat(Config().model_dump(mode="json", by_alias=True))
        found = {key: value for key, value in now.items() if key not in old or old[key] != value}
        found |= {key: usual[key] for key in old if key not in now and key in usual}
        if any(key.startswith("plan.stages.") for key in old.keys() - now.keys()):  # the file says less of its stages
            found = {key: value for key, value in found.items() if not key.startswith("plan.stages")}
            found["plan.stages"] = given.file.get("plan", {}).get("stages", [])
        for key in [key for key in found if key.rpartition(".")[2] in ("name", "kind")]:
            section = key.rpartition(".")[0]  # another objective: all that the file says of it
            found |= {each: value for each, value in now.items() if each.startswith(f"{section}.")}
    found |= _flat(given.sets)
    return {key: value for key, value in found.items() if not _is_in_force(key, value, recorded)}


def _is_in_force(key: str, value: Any, recorded: Config) -> bool:
    """Whether a key is no value of the run, or says in another form what is in force."""
    if key in _NOT_VALUES or key in _ADDRESSES:
        return True
    if key == "generation.engine" and value == "auto":
        return True  # what it was when the run began
    if key == "policy.path" and is_hub_id(str(value)):
        return f"models--{str(value).replace('/', '--')}" in str(recorded.policy.path)  # the hub's cache
    return key == "broker.redis_url" and value in ("", configured_url(recorded.broker))


def _changes(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    old, new = (_flat(config.model_dump(mode="json", by_alias=True)) for config in (before, after))
    return {key: (old.get(key), value) for key, value in new.items() if key not in old or old[key] != value}


def _refused(run: Resumed, fixed: Sequence[str], folder: Path) -> Iterator[str]:
    for key, (before, now) in run.changes.items():
        if _is_of(key, fixed):
            yield (
                f"{key} is {now!r}, but the run in {folder} began with {before!r}: put it back, or give the run another"
                " run.name"
            )
        elif key in _ARITHMETIC and (steps := _steps_to_repeat(folder)):
            yield (
                f"{key} cannot be {now!r} now: it changes the last bits of each step, and {steps} steps that no"
                " checkpoint holds are computed again; resume without it, stop the run by Ctrl-C, which writes a"
                " checkpoint, and resume with it"
            )


def _steps_to_repeat(run: Path) -> int:
    """Steps with a log line that no checkpoint holds."""
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf8").splitlines() if metrics.exists() else []
    return max(0, len(lines) - max(numbered(run / "checkpoints"), default=0))


def _is_of(key: str, keys: Sequence[str]) -> bool:
    return any(key == each or key.startswith(f"{each}.") for each in keys)


def _flat(tree: Mapping[str, Any], path: str = "") -> Values:
    """The values of a tree by key. A list is one value, but in one of sections each has its index in its keys."""
    found: Values = {}
    for name, value in tree.items():
        key = f"{path}{name}"
        if isinstance(value, list | tuple) and value and all(isinstance(each, Mapping) for each in value):
            value = {str(index): each for index, each in enumerate(value)}
        found |= _flat(value, f"{key}.") if isinstance(value, Mapping) and value else {key: value}
    return found


def _nested(values: Values) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}".replace("e-0", "e-").replace("e+0", "e+")
    text = value if isinstance(value, str) and value else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
