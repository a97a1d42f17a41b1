"""`nouscoder recipes` and `nouscoder plan`: the published recipes, and the stages of a configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from nouscoder.cli.options import JsonOption, SetOption, say
from nouscoder.config import Config, StageSection, load_config

recipes_app = typer.Typer(invoke_without_command=True, help="Published recipes.")


@recipes_app.callback()
def recipes(context: typer.Context, as_json: JsonOption = False) -> None:
    """List the published recipes; `show NAME` prints one, and `nouscoder train --recipe NAME` runs it."""
    if context.invoked_subcommand is not None:
        return
    from nouscoder.config.recipe import recipe_names, recipe_path

    records = []
    for name in recipe_names():
        config = load_config(recipe_path(name))
        if config.recipe.source:
            records.append({"name": name, **_described(config)})
    if as_json:
        say(json.dumps(records, indent=1))
        return
    width = max(len(record["name"]) for record in records)
    models = max(len(record["base_model"]) for record in records)
    for record in records:
        stages = " > ".join(record["stages"]) or "one run"
        say(f"{record['name']:<{width}}  {record['base_model'] or '-':<{models}}  {stages}")


@recipes_app.command("show")
def recipes_show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="name of the recipe")],
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Print a recipe: model, data commands, hardware, results, and which value is exact, approximate or unknown.

    With --set it also says what that changes, as `train` takes it.
    """
    record = recipe_record(name, overrides or [])
    say(json.dumps(record, indent=1) if as_json else recipe_text(record))


def recipe_record(name: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """All that the file of a recipe says, and what overrides change. Raises ConfigError for an unknown name or key."""
    from nouscoder.config.recipe import recipe_head, recipe_path, recipe_values

    file = recipe_path(name)
    config, changed = load_config(file), load_config(file, overrides)
    before, after = (dict(_flat(each, ())) for each in (config, changed))
    values = [
        {"key": each.key, "value": each.value, "comment": each.comment, "origin": each.origin.value}
        for each in recipe_values(file)
    ]
    train = f"nouscoder train --recipe {name}"
    return {"name": name, "file": str(file), "about": recipe_head(file), **_described(config)} | {
        "data": list(config.recipe.data),
        "run": train,
        "values": values,
        "set": {key: value for key, value in after.items() if key not in before or before[key] != value},
    }


def recipe_text(record: dict[str, Any]) -> str:
    """The record for people."""
    from nouscoder.config.recipe import Origin

    lines = [record["name"], record["about"], ""]
    for key in ("source", "base_model", "hardware"):
        lines.append(f"{key.replace('_', ' '):<12}{record[key] or 'unknown'}")
    lines += [f"{'expected':<12}{each}" for each in record["expected"] or ["unknown: no figure was found"]]
    lines += ["", "data and training", *(f"  {command}" for command in [*record["data"], record["run"]])]
    for origin in Origin:
        values = [each for each in record["values"] if each["origin"] == origin.value]
        lines += ["", f"{origin.value}: {len(values)} values"]
        for each in values:
            comment = f"  # {each['comment']}" if each["comment"] else ""
            lines.append(f"  {each['key']} = {each['value']}{comment}")
    given = [f"  {key} = {json.dumps(value)}" for key, value in record["set"].items()]
    lines += ["", f"changed by --set: {len(given)} values", *given] if given else []
    return "\n".join([*lines, "", f"the file is {record['file']}"])


def _described(config: Config) -> dict[str, Any]:
    recipe = config.recipe
    return {
        "source": recipe.source,
        "base_model": recipe.base_model,
        "hardware": recipe.hardware,
        "expected": list(recipe.expected),
        "stages": [stage.name for stage in config.plan.stages],
    }


def plan_text(config: Config, *, as_json: bool) -> str:
    """The stages of the configuration, one paragraph each, or as JSON."""
    from nouscoder.run.plan import plan_record

    states = plan_record(config)["stages"]
    changes = [dict(_changed(config, index)) for index in range(len(config.plan.stages))]
    if as_json:
        found = zip(config.plan.stages, changes, states, strict=True)
        return json.dumps([_record(stage, changed) | state for stage, changed, state in found], indent=1)
    if not states:
        return "there is no plan: nouscoder train makes one run"
    paragraphs = []
    for index, stage in enumerate(config.plan.stages):
        paragraphs.append("\n".join(_lines(config.of_stage(index), index, stage, changes[index], states[index])))
    return "\n\n".join(paragraphs)


def _record(stage: StageSection, changed: Mapping[str, Any]) -> dict[str, Any]:
    return {"from": stage.start.value, "changes": {key: after for key, (_, after) in changed.items()}} | (
        {"yarn": stage.yarn.model_dump()} if stage.yarn.factor else {}
    )


def _lines(
    config: Config, index: int, stage: StageSection, changed: Mapping[str, Any], state: Mapping[str, Any]
) -> Iterator[str]:
    begins = f"the {stage.start} policy of the stage before" if index else "the first policy"
    yield f"{index + 1}. {stage.name}: begins with {begins}; {_state(state)}"
    for key, (before, after) in changed.items():
        yield f"   {key} = {json.dumps(after)}  (was {json.dumps(before)})"
    if stage.yarn.factor:
        yield f"   YaRN: {stage.yarn.positions} positions, {stage.yarn.factor:g} * {stage.yarn.original_tokens}"
    yield f"   ends after {_end(config)}"


def _state(state: Mapping[str, Any]) -> str:
    word = "finished" if state["finished"] else "begun" if state["begun"] else "not begun"
    if "best_version" not in state:
        return word
    return f"{word}, best pass@1 {state['pass_at_1_best']:.3f} at version {state['best_version']}"


def _end(config: Config) -> str:
    run = config.run
    if not run.total_batches:
        return "its evaluation: it trains nothing"
    ends = [f"{run.total_batches} batches"]
    if config.evaluation.end_at_pass_at_1:
        ends.append(f"an evaluation with pass@1 {config.evaluation.end_at_pass_at_1:g}")
    if config.evaluation.end_after_no_gain:
        ends.append(f"{config.evaluation.end_after_no_gain} evaluations without a gain")
    return ", or ".join(ends)


def _changed(config: Config, index: int) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """(key, (value before, value now)) of every key that differs from the stage before; from the base for the first."""
    before = config.of_stage(index - 1) if index else config
    flat_before, flat_now = (dict(_flat(each)) for each in (before, config.of_stage(index)))
    for key in sorted({*flat_before, *flat_now} - {"run.name"}):
        pair = (flat_before.get(key), flat_now.get(key))
        if pair[0] != pair[1]:
            yield key, pair


def _flat(config: Config, without: Sequence[str] = ("plan",)) -> Iterator[tuple[str, Any]]:
    def walk(node: Any, path: str) -> Iterator[tuple[str, Any]]:
        if path == "plan.stages":
            node = {str(index): stage for index, stage in enumerate(node)}
        if isinstance(node, dict):
            for name, child in node.items():
                yield from walk(child, f"{path}.{name}" if path else name)
        else:
            yield path, node

    return walk(config.model_dump(mode="json", by_alias=True, exclude={*without}), "")


plan_app = typer.Typer(no_args_is_help=True, help="The stages of a training.")


@plan_app.command("show")
def plan_show(
    config_file: Annotated[Path, typer.Argument(metavar="CONFIG", help="configuration with plan.stages, TOML or JSON")],
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Print each stage: what it begins with, what it changes, when it ends, and what came of it so far."""
    say(plan_text(load_config(config_file, overrides or []), as_json=as_json))
