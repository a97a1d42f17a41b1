"""`nouscoder export`: a policy version of a run as a Hugging Face folder, or its adapter, with a model card."""

from __future__ import annotations

from pathlib import Path

from nouscoder.atomic_files import is_taken
from nouscoder.config import Config, load_config
from nouscoder.domain.plan import best_of
from nouscoder.errors import Unusable
from nouscoder.policy_folder.compose import compose_adapter, compose_policy
from nouscoder.policy_folder.prompt_file import trained_prompt
from nouscoder.policy_folder.weights_files import is_adapter
from nouscoder.run.evaluation_files import recorded_evaluations, weights_folder
from nouscoder.run.folder import newest_version
from nouscoder.run.model_card import base_model, model_card
from nouscoder.run.plan import histories


def export(run: Path, to: Path, version: str, *, adapter: bool = False) -> int:
    """Write the policy `version` (a number, "last" or "best") of the run folder `run` to the new folder `to`.

    The weights are whole; with `adapter` the folder holds only the adapter of a run that publishes adapters. The run of
    a plan is that of the last stage that was begun. Returns the number of the version. Raises Unusable,
    NoSuchVersion, PolicyFilesMissing, WeightsMissing, WeightsUnusable and StorageError.
    """
    if is_taken(to):
        raise Unusable(f"{to} exists already: give another folder")
    name, config = _config_of(run)
    number = _number(config, version)
    weights = weights_folder(config, number)
    first = config.in_run_folder(config.policy.path)
    base = base_model(first)
    if adapter and not is_adapter(weights):
        raise Unusable(
            f"version {number} has no adapter of its own: export it without --adapter"
            " (a run publishes adapters with learner.lora.publication adapter, from version 1 on)"
        )
    card = model_card(name, config, number, recorded_evaluations(config.run.folder), base, adapter=adapter)
    if adapter:
        compose_adapter(to, weights, base, trained_prompt(config), card, config.run.folder)
    else:
        compose_policy(to, first, weights, prompt=trained_prompt(config), card=card, trained=config.run.folder)
    return number


def _config_of(run: Path) -> tuple[str, Config]:
    """The name that the run had, and its configuration with the folder where it is now."""
    file = run / "config.toml"
    if not file.is_file():
        raise Unusable(f"{run} is not a run folder: it has no config.toml")
    config = load_config(file)
    name, place = config.run.name, run.resolve()
    config = config.changed(run={"root": place.parent, "name": place.name})
    begun = [index for index, history in enumerate(histories(config)) if history.begun]
    if config.plan.stages and not begun:
        raise Unusable(f"no stage of the plan in {run} was begun")
    return _config_of(config.of_stage(begun[-1]).run.folder) if begun else (name, config)


def _number(config: Config, version: str) -> int:
    if version == "last":
        newest = newest_version(config)
        if newest == 0:
            raise Unusable(
                f"the run in {config.run.folder} has trained nothing yet, so its last version is the first policy,"
                f" {config.in_run_folder(config.policy.path)}; --version 0 exports that one"
            )
        return newest
    if version == "best":
        evaluations = recorded_evaluations(config.run.folder)
        if not evaluations:
            raise Unusable(f"{config.run.folder} has no evaluation, so no version is the best: name one, or last")
        return best_of(evaluations).policy_version
    if not (version.isascii() and version.isdecimal()):
        raise Unusable(f"{version[:100]!r} is not a version: give a number, last or best")
    return int(version)
