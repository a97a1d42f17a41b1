"""Code of the user that a configuration names is loaded once before a run starts, in a process of its own.

That process finds modules as the services of a local run do. What a module does when it is imported ends with it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

from nouscoder.config import Config
from nouscoder.config.generation import EntryPointSection
from nouscoder.domain.reward import RewardRule
from nouscoder.entry_points import load_entry_point
from nouscoder.errors import NousCoderError
from nouscoder.objectives.correction import CorrectionKind
from nouscoder.objectives.entry_point import EntryPointObjective
from nouscoder.run.languages import grades_here
from nouscoder.verifier.judges.users_comparators import load_comparators

_LIMIT_S = 300.0  # to import it; a module may import a model library


def users_code_faults(config: Config) -> list[str]:
    """A sentence for each entry point that cannot be loaded, and for an objective whose options do not fit."""
    if not [*_loads(config)]:
        return []
    command = (sys.executable, "-m", __name__)
    try:
        done = subprocess.run(command, input=config.model_dump_json().encode(), capture_output=True, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        return [f"the modules that entry_point names were not imported within {_LIMIT_S:.0f} s"]
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return [f"the modules that entry_point names end their process: {''.join(last) or done.returncode}"]
    found: list[str] = json.loads(done.stdout.splitlines()[-1])  # a module may print, too
    return found


def _loads(config: Config) -> Iterator[Callable[[], object]]:
    objective, correction = config.learner.objective, config.learner.correction
    reward, environment = config.broker.reward, config.generation.environment
    if isinstance(objective, EntryPointObjective):
        yield objective.loaded
    if correction.kind is CorrectionKind.ENTRY_POINT:
        yield correction.users_function
    if reward.rule is RewardRule.CALLABLE:
        yield partial(load_entry_point, "broker.reward.entry_point", reward.entry_point)
    if isinstance(environment, EntryPointSection):
        yield partial(load_entry_point, "generation.environment.entry_point", environment.entry_point)
    if grades_here(config):
        yield from (partial(load_comparators, [name]) for name in config.verifier.comparators)


def main() -> None:
    """Load the code of the configuration on stdin, and print the faults as a list of JSON in a line."""
    faults = []
    for load in _loads(Config.model_validate_json(sys.stdin.buffer.read())):
        try:
            load()
        except NousCoderError as error:
            faults.append(str(error))
    sys.stdout.write(f"\n{json.dumps(faults)}\n")


if __name__ == "__main__":
    main()
