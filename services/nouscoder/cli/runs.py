"""`nouscoder runs`, `export`, `report` and `objectives`: the runs that there are, and what one has left."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nouscoder.cli.options import ConfigOption, JsonOption, RunByDefault, SetOption, new, say
from nouscoder.config import load_config

if TYPE_CHECKING:
    from nouscoder.run.runs import FoundRun


def _line(run: FoundRun) -> str:
    parts = []
    if run.in_folder is not None:
        step = run.in_folder.step
        parts.append(f"folder {run.in_folder.folder}, {f'checkpoint of step {step}' if step else 'no checkpoint'}")
    if run.in_redis is not None:
        state = "finished" if run.in_redis.finished else "not finished"
        parts.append(f"Redis: {run.in_redis.batches} batches, step {run.in_redis.step}, {state}")
    if not run.belongs_together:
        parts.append("the folder and Redis hold different runs of this name")
    return f"{run.name}: {'; '.join(parts)}"


runs_app = typer.Typer(no_args_is_help=True, help="The runs in the run folders and in Redis.")


@runs_app.command("list")
def runs_list(config_file: ConfigOption = None, overrides: SetOption = None, as_json: JsonOption = False) -> None:
    """List the runs in run.root and in broker.redis_url: how far they are, and whether the two belong together."""
    from nouscoder.run.runs import list_runs

    runs = asyncio.run(list_runs(load_config(config_file, overrides or [])))
    records = [asdict(run) | {"belongs_together": run.belongs_together} for run in runs]
    lines = "\n".join(map(_line, runs)) or "there are no runs"
    say(json.dumps(records, indent=1) if as_json else lines)


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a run folder: runs/NAME, or that of a plan")],
    to: Annotated[Path, new("folder", "the new folder", "--to")],
    version: Annotated[str, typer.Option("--version", help="a policy version, last or best by evaluation")] = "last",
    adapter: Annotated[
        bool, typer.Option("--adapter", help="only the adapter (LoRA) of the version, in the form of PEFT")
    ] = False,
) -> None:
    """Write a policy of a run as a Hugging Face folder, with a model card from its settings and evaluations."""
    from nouscoder.run.export import export as export_version

    number = export_version(run, to, version, adapter=adapter)
    is_first = ", the first policy: no evaluation was better" if version == "best" and not number else ""
    say(f"version {number} of {run} is in {to}{is_first}")


@runs_app.command("rm")
def runs_rm(
    name: Annotated[str, typer.Argument(help="name of the run")],
    config_file: ConfigOption = None,
    overrides: SetOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove a run for good: its folder with checkpoints and report, and its keys in Redis."""
    from nouscoder.run.runs import remove_run

    config = load_config(config_file, [*(overrides or []), f"run.name={name}"])
    if not yes:
        typer.confirm(f"Remove run {name}, its folder {config.run.folder} and its state in Redis?", abort=True)
    removed = asyncio.run(remove_run(config))
    lines = "\n".join(f"removed {what}" for what in removed)
    say(json.dumps({"removed": removed}, indent=1) if as_json else lines)


@runs_app.command("backup")
def runs_backup(
    to: Annotated[Path, new("folder", "the folder of the backups, best on another disk", "--to")],
    keep: Annotated[int, typer.Option(min=1, help="how many backups stay, besides the last one of each run")] = 7,
    config_file: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Copy the runs in run.root, as they are at one instant each, into a new folder; they may go on meanwhile."""
    from nouscoder.run.backups import back_up
    from nouscoder.run.runs import runs_in

    made = back_up(load_config(config_file, overrides or []), to, keep)
    runs = ", ".join(f"{name} at step {run.step or 0}" for name, run in runs_in(made).items())
    say(f"backup {made.name} is whole: {runs}")


@runs_app.command("restore")
def runs_restore(
    backup: Annotated[Path, typer.Argument(metavar="BACKUP", help="a folder that `runs backup` has made")],
    set_aside: Annotated[str, typer.Option("--set-aside", help="the new name of the run that is there")] = "",
    config_file: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Make the folder of the run run.name from a backup. A run that is there needs --set-aside; none is removed."""
    from nouscoder.run.backups import restore

    say(restore(load_config(config_file, overrides or []), backup, set_aside))


report_app = typer.Typer(
    cls=RunByDefault,
    no_args_is_help=True,
    help="The pages of runs, also of stopped ones. `report RUN` is `report run RUN`.",
)


@report_app.command("run")
def report_run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a run folder: runs/NAME, or that of a plan's stage")],
    as_json: JsonOption = False,
) -> None:
    """Write report.html and rollouts.html of a run into its folder, and say which problems gave no training."""
    from nouscoder.report.page import write_report
    from nouscoder.report.run_data import run_folder
    from nouscoder.report.untrained import read_untrained

    report, left = write_report(run_folder(run)), read_untrained(run)
    lines = "\n".join([*(left.lines(run) if left else ()), f"the report is in {report}"])
    record = {"report": str(report), "untrained": asdict(left) if left else None}
    say(json.dumps(record, indent=1) if as_json else lines)


@report_app.command("compare")
def report_compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="run folders, at most 8")],
    to: Annotated[Path, new("file", "the page", "--to")] = Path("comparison.html"),
) -> None:
    """Write one page with the curves of several runs: reward, evaluations, lengths, pass@k, entropy."""
    from nouscoder.report.compare import write_comparison

    say(f"the comparison is in {write_comparison(to, runs)}")


objectives_app = typer.Typer(no_args_is_help=True, help="Training objectives on recorded batches.")


@objectives_app.command("compare")
def objectives_compare(
    batch: Annotated[Path, typer.Argument(metavar="BATCH", help="a saved batch: runs/NAME/batches/NUMBER.batch")],
    policy: Annotated[
        int | None, typer.Option(min=0, help="policy version in training; default: the one that the batch made")
    ] = None,
    old_policy: Annotated[
        int | None, typer.Option(min=0, help="policy version before the batch; default: the batch's own")
    ] = None,
    html: Annotated[Path | None, new("file", "write the figures and their charts to this page, too")] = None,
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Evaluate one batch under every objective: loss, gradient, cosines between gradients, share of clipped tokens."""
    from nouscoder.learner import compare
    from nouscoder.report.objectives_page import write_objectives_page

    comparisons = compare.compare_file(batch, overrides or [], policy, old_policy)
    if html is not None:
        run = batch.resolve().parents[1].name
        write_objectives_page(html, f"batch {batch.stem} of {run}", [asdict(item) for item in comparisons])
    say(compare.as_json(comparisons) if as_json else compare.as_table(comparisons))
