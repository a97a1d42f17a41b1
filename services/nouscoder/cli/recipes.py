"""`nouscoder recipes`: the published recipes, and all that the file of one says."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from nouscoder.cli.options import JsonOption
from nouscoder.config import Config, load_config

recipes_app = typer.Typer(invoke_without_command=True, help="Published recipes.")


@recipes_app.callback()
def recipes(context: typer.Context, as_json: JsonOption = False) -> None:
    """List the published recipes; `show NAME` prints one, and `nouscoder train --recipe NAME` runs it."""
    if context.invoked_subcommand is not None:
        return
    records = recipe_list()
    if as_json:
        typer.echo(json.dumps(records, indent=1))
        return
    width = max(len(record["name"]) for record in records)
    models = max(len(record["base_model"]) for record in records)
    for record in records:
        stages = " > ".join(record["stages"]) or "one run"
        typer.echo(f"{record['name']:<{width}}  {record['base_model'] or '-':<{models}}  {stages}")


@recipes_app.command("show")
def recipes_show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="name of the recipe")], as_json: JsonOption = False
) -> None:
    """Print a recipe: model, data commands, hardware, results, and which value is exact, approximate or unknown."""
    record = recipe_record(name)
    typer.echo(json.dumps(record, indent=1) if as_json else recipe_text(record))


def recipe_list() -> list[dict[str, Any]]:
    """What the table has of each recipe."""
    from nouscoder.config.recipe import recipe_names, recipe_path

    found = []
    for name in recipe_names():
        config = load_config(recipe_path(name))
        if config.recipe.source:
            found.append({"name": name, **_described(config)})
    return found


def recipe_record(name: str) -> dict[str, Any]:
    """All that the file of a recipe says. Raises ConfigError for an unknown name."""
    from nouscoder.config.recipe import recipe_head, recipe_path, recipe_values

    file = recipe_path(name)
    config = load_config(file)
    values = [
        {"key": each.key, "value": each.value, "comment": each.comment, "origin": each.origin.value}
        for each in recipe_values(file)
    ]
    train = f"nouscoder train --recipe {name}"
    return {"name": name, "file": str(file), "about": recipe_head(file), **_described(config)} | {
        "data": list(config.recipe.data),
        "run": train,
        "values": values,
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
