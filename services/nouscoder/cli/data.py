"""`nouscoder data`: problem files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from nouscoder.cli.options import AGAIN, ConfigOption, JsonOption, SetOption, goes_on, new, only_with, say
from nouscoder.cli.status import BrokerOption, broker_at, broker_of
from nouscoder.config import Config, load_config
from nouscoder.domain.curriculum import CurriculumState, ProblemStatistics
from nouscoder.errors import Unusable
from nouscoder.rpc.addresses import require_url

_HEAD = ("problem", "groups", "filtered", "sampled", "accepted", "pass rate", "in a row", "last groups")


async def stats_text(config: Config, *, live: bool, limit: int, as_json: bool) -> str:
    """The statistics of the run `config.run.name`: `live` from its broker, else from the copy in the run folder.

    Without a copy the broker is asked. Raises Unusable, and PeerError when the broker does not answer.
    """
    from nouscoder.learner.state.curriculum_copy import FILE, read_copy
    from nouscoder.rpc.channel import PeerUnreachable

    file = config.run.folder / FILE
    try:
        state = None if live else read_copy(file)
    except ValueError as error:
        raise Unusable(str(error)) from error
    source = str(file)
    if state is None:
        source = f"the broker at {config.broker.grpc}"
        try:
            async with broker_of(config) as broker:
                run, state = await broker.read_curriculum()
        except PeerUnreachable as silence:
            if live or config.run.folder.is_dir():
                raise
            raise PeerUnreachable(f"no run {config.run.name} is in {config.run.root}/, and {silence}") from silence
        if run != config.run.name:
            raise Unusable(f"{source} serves run {run}, not {config.run.name}: give its address with --broker")
    records = sorted(state.problems, key=lambda record: (record.pass_rate, record.problem_id))
    if as_json:
        return json.dumps([_as_json(record) for record in records], indent=1)
    return "\n".join([f"from {source}", *_summary(state), *_table(records[:limit] if limit else records)])


def _as_json(record: ProblemStatistics) -> dict[str, object]:
    """A record of a file of pass rates (data/pass_rates.py), with the other facts."""
    facts = asdict(record)
    counts = {"problem_id": facts.pop("problem_id"), "passed": facts.pop("accepted"), "sampled": facts.pop("sampled")}
    return counts | facts | {"pass_rate": record.pass_rate, "last_pass_rate": record.last_pass_rate}


def _summary(state: CurriculumState) -> list[str]:
    records = state.problems
    groups, filtered = sum(r.groups for r in records), sum(r.filtered for r in records)
    sampled, accepted = sum(r.sampled for r in records), sum(r.accepted for r in records)
    always = sum(r.accepted == r.sampled for r in records)
    never, codeless = sum(not r.accepted for r in records), sum(r.no_code == r.sampled for r in records)
    return [
        f"{len(records)} problems with complete groups, curriculum at place {state.cursor}",
        f"{groups} groups, {filtered} filtered; {sampled} rollouts graded, {accepted} accepted",
        f"{always} problems always solved, {never} never ({codeless} without code in any answer)",
    ]


def _table(records: Sequence[ProblemStatistics]) -> list[str]:
    """Aligned columns, the lowest pass rate first."""
    rows: list[tuple[str, ...]] = [_HEAD]
    for one in records:
        counts = map(str, (one.groups, one.filtered, one.sampled, one.accepted))
        last = " ".join(f"{accepted}/{sampled}" for accepted, sampled in one.history)
        rows.append((one.problem_id, *counts, f"{one.pass_rate:.3f}", str(one.solved_in_row), last))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


data_app = typer.Typer(no_args_is_help=True, help="Problem files.")


@data_app.command("inspect")
def data_inspect(
    file: Annotated[Path, typer.Argument(help="problems: NousCoder's JSONL, LeetCodeDataset or CodeContests (.gz)")],
    flaky: Annotated[bool, typer.Option("--flaky", help="run the reference solutions several times")] = False,
    rounds: Annotated[int, typer.Option(min=2, help="runs of each reference on each test")] = 5,
    prompt: Annotated[
        bool, typer.Option("--prompt", help="show how a problem with starter code and one without are asked")
    ] = False,
    as_json: JsonOption = False,
    config_file: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Count the problems and tests of a file, and find what cannot be graded.

    With --flaky, find unreliable tests; exit code 1 when there are any.
    """
    only_with("--flaky", flaky, "--rounds")
    only_with("an inspection without --prompt", not prompt, "--flaky", "--json")
    from nouscoder.data import inspect
    from nouscoder.policy_folder.prompt_file import prompt_of, with_recorded_prompt
    from nouscoder.verifier.toolchains.languages import ON_THIS_MACHINE

    if prompt:
        config = load_config(config_file, overrides or [])
        folder = config.in_run_folder(config.policy.path)
        environment = with_recorded_prompt(config, folder).generation.environment
        text, code = inspect.prompts_of(file, prompt_of(environment, folder)), 0
    elif flaky:
        section = load_config(config_file, overrides or []).verifier
        text, code = inspect.audit_file(file, section, rounds, as_json=as_json)
    else:
        section = load_config(config_file, overrides or []).verifier
        here = section if section.sandbox.backend in ON_THIS_MACHINE else None
        text, code = inspect.inspect_file(file, as_json=as_json, here=here)
    say(text)
    raise typer.Exit(code)


@data_app.command("import")
def data_import(
    name: Annotated[
        str,
        typer.Argument(metavar="FORMAT", help="the data set's layout: `list` lists them; or package.module:name"),
    ],
    files: Annotated[
        list[str] | None,
        typer.Argument(help="parquet, JSON lines or an array, .gz, .zst; hub:ORGANISATION/NAME for a hub's data set"),
    ] = None,
    out: Annotated[Path, new("file", "the problem file to make")] = Path("problems.parquet"),
    tests: Annotated[str, typer.Option(help="folder or URL (s3://...) of the tests; default: OUT.index")] = "",
    prompt: Annotated[
        str, typer.Option(metavar="FORM|FILE", help="template: lcb, plain, ..., or a file with {prompt}")
    ] = "",
    comparator: Annotated[str | None, typer.Option(help="exact, lines, tokens, lcb, ...: docs/verdicts.md")] = None,
    float_tolerance: Annotated[float | None, typer.Option(help="allowed difference of numbers; 0: none")] = None,
    time_limit: Annotated[float | None, typer.Option(help="seconds of each test")] = None,
    memory_limit: Annotated[str, typer.Option(help="memory of each test, such as 4GiB")] = "",
    max_tests: Annotated[int | None, typer.Option(help="tests kept of each problem, those with long inputs")] = None,
    after: Annotated[str, typer.Option(metavar="DAY", help="contests of this day and later")] = "",
    before: Annotated[str, typer.Option(metavar="DAY", help="contests from before this day")] = "",
    languages: Annotated[str, typer.Option(help="such as python,cpp: languages of problems that name none")] = "",
    columns: Annotated[list[str] | None, typer.Option("--column", help="FIELD=COLUMN of the files; repeatable")] = None,
    as_json: JsonOption = False,
) -> None:
    """Import a data set as a problem file. Run again after an interruption, it continues where it stopped."""
    from nouscoder.data.importers.formats import FORMATS
    from nouscoder.data.importers.options import options_given
    from nouscoder.data.importers.run import import_files, source_named

    if name == "list":
        width = max(map(len, FORMATS)) + 2
        say("\n".join(f"{known:<{width}}{form.about}" for known, form in FORMATS.items()))
        return
    only_with("--out FILE.parquet: JSON lines hold the tests", out.suffix == ".parquet", "--tests")
    options = options_given(
        prompt,
        memory_limit,
        columns or [],
        comparator=comparator,
        float_tolerance=float_tolerance,
        time_limit_s=time_limit,
        max_tests=max_tests,
        after=after,
        before=before,
        languages=[name.strip() for name in languages.split(",") if name.strip()],
    )
    with goes_on(AGAIN):
        summary = import_files(name, [source_named(file) for file in files or []], out, tests, options)
    say(json.dumps(asdict(summary), indent=1) if as_json else summary.text())


@data_app.command("export")
def data_export(
    name: Annotated[str, typer.Argument(metavar="FORMAT", help="harbor: a Harbor task folder for each problem")],
    file: Annotated[Path, typer.Argument(help="a problem file")],
    out: Annotated[Path, new("folder", "the folder to make")] = Path("harbor"),
    image: Annotated[str, typer.Option(help="image of the containers, with Python 3.11 or later")] = "python:3.12-slim",
    as_json: JsonOption = False,
) -> None:
    """Export problems to the format of another project. Problems that it cannot express are left out and named."""
    from nouscoder.data.harbor.export import NotForHarbor, export_harbor

    if name != "harbor":
        raise NotForHarbor(f"there is no format {name!r} to export to (known formats: harbor)")
    summary = export_harbor(file, out, image)
    say(json.dumps(asdict(summary), indent=1) if as_json else summary.text())


@data_app.command("filter")
def data_filter(
    recipe: Annotated[
        Path,
        typer.Argument(metavar="RECIPE.toml", help="inputs and steps; or the name of a published one"),
    ],
    out: Annotated[Path, new("file", "the problem file to make")] = Path("selection.parquet"),
    folder: Annotated[
        Path | None,
        typer.Option(help="where relative paths start; default: the recipe's folder; of a name: the working directory"),
    ] = None,
    tests: Annotated[str, typer.Option(help="folder or URL (s3://...) of the tests; default: OUT.index")] = "",
    server: Annotated[str | None, typer.Option(help="URL of a grading service; default: grade on this machine")] = None,
    token: Annotated[str | None, typer.Option(help="the service's token; default: NOUSCODER_TOKEN")] = None,
    as_json: JsonOption = False,
    config_file: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Select problems by the steps of a recipe. Prints the counts of each step and the hash of the output.

    Files that the recipe names and that do not exist are imported first, as it says.
    """
    from nouscoder.config.recipe import SELECTIONS, recipe_path
    from nouscoder.data.filters.run import import_missing, read_recipe, select
    from nouscoder.grade_files.answers import GradingTarget

    only_with("--server", server, "--token")
    if not recipe.suffix and not recipe.exists():
        recipe, folder = recipe_path(str(recipe), SELECTIONS), folder or Path.cwd()
    grading = GradingTarget(load_config(config_file, overrides or []).verifier, server, token)
    known = read_recipe(recipe, folder)
    for summary in import_missing(known):
        say(summary.text(), err=as_json)
    selection = select(known, out, tests, grading)
    say(json.dumps(asdict(selection), indent=1) if as_json else selection.text())


@data_app.command("synthesize")
def data_synthesize(
    seeds: Annotated[Path, typer.Argument(metavar="SEEDS", help='lines {"seed_id": ..., "text": ...}')],
    url: Annotated[str, typer.Option(help="server with OpenAI's API that writes, such as http://127.0.0.1:8000/v1")],
    model: Annotated[str, typer.Option(help="name of the model at the server")],
    solver_url: Annotated[str, typer.Option(help="server of the solver; default: --url")] = "",
    solver_model: Annotated[str, typer.Option(help="name of the solver, a strong model; default: --model")] = "",
    out: Annotated[Path, new("file", "the problem file to make")] = Path("synthetic.parquet"),
    num_tests: Annotated[int, typer.Option("--tests", min=1, help="tests that are asked for")] = 20,
    at_least: Annotated[int, typer.Option(min=1, help="tests that a solver's program must pass")] = 5,
    solutions: Annotated[int, typer.Option(min=1, help="programs of the solver for each problem")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="of both models")] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1, help="of one answer")] = 8192,
    at_once: Annotated[int, typer.Option(min=1, help="requests at the same time")] = 16,
    server: Annotated[str | None, typer.Option(help="URL of a grading service; default: grade on this machine")] = None,
    token: Annotated[str | None, typer.Option(help="the service's token; default: NOUSCODER_TOKEN")] = None,
    as_json: JsonOption = False,
    config_file: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Have models write problems with tests, and keep the tests that a solver passes. Run again, it goes on."""
    from nouscoder.data.asking import ServedModel
    from nouscoder.data.synthesis import SynthesisSettings, synthesize
    from nouscoder.grade_files.answers import GradingTarget

    for option, given in (("--url", url), ("--solver-url", solver_url or url)):
        require_url(given, option)
    only_with("--server", server, "--token")
    writer = ServedModel(url=url, model=model)
    solver = ServedModel(url=solver_url or url, model=solver_model or model)
    settings = SynthesisSettings(writer, solver, num_tests, at_least, solutions, temperature, max_tokens, at_once)
    verifier = GradingTarget(load_config(config_file, overrides or []).verifier, server, token)
    with goes_on(AGAIN):
        summary = synthesize(seeds, out, settings, verifier)
    say(json.dumps(asdict(summary), indent=1) if as_json else summary.text())


@data_app.command("stats")
def data_stats(
    run: Annotated[str, typer.Argument(metavar="RUN|FILE", help="name or folder of a run, or a problem file")],
    address: BrokerOption = "",
    limit: Annotated[int, typer.Option(min=0, help="problems shown, the lowest pass rate first; 0: all")] = 50,
    as_json: JsonOption = False,
    config_file: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Print the statistics of a run's problems: groups, pass rates, filtered groups; or what a problem file holds.

    With --broker they are those of this moment, else those of the copy in the run folder. --json prints all problems,
    as a file of pass rates for broker.curriculum.pass_rates of a later run and for the filters of `data filter`.
    """
    if Path(run).exists() and not Path(run).is_dir():
        only_with("the name of a run", False, "--broker", "--limit", "--config", "--set")
        from nouscoder.data.inspect import describe

        say(describe(Path(run), as_json=as_json))
        return
    named = [f"run.name={json.dumps(run)}"]
    if (made := Path(run) / "config.toml").is_file():
        config_file = config_file or made
        named = [f"run.root={json.dumps(str(Path(run).parent))}", f"run.name={json.dumps(Path(run).name)}"]
    config = load_config(config_file, [*(overrides or []), *named, *broker_at(address)])
    say(asyncio.run(stats_text(config, live=bool(address), limit=limit, as_json=as_json)))


@data_app.command("schema")
def data_schema() -> None:
    """Print the JSON Schema of a problem file's lines, with an example for each type of tests."""
    from nouscoder.data.problems import problem_schema

    say(json.dumps(problem_schema(), indent=1))
