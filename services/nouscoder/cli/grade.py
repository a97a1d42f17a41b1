"""`nouscoder grade`, `tokens` and `prepare`: the grading service without a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from nouscoder.cli.options import ConfigOption, JsonOption, Opened, SetOption, goes_on, new, only_with, say
from nouscoder.config import load_config


def grade(
    file: Annotated[
        Path, typer.Argument(help="submissions of POST /v1/grade, one JSON a line, or samples; .gz, .zst, - for stdin")
    ],
    out: Annotated[Path | None, new("file", "JSONL of verdicts; default stdout")] = None,
    problems: Annotated[
        Path | None, typer.Option(help="problem file; the input is samples such as {task_id, completion}")
    ] = None,
    server: Annotated[str | None, typer.Option(help="URL of a grading service; default: grade on this machine")] = None,
    token: Annotated[str | None, typer.Option(help="the service's token; default: NOUSCODER_TOKEN")] = None,
    ca: Annotated[Path | None, typer.Option(help="PEM file of the authority of the service's certificate")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="keep the verdicts that --out has already")] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="bad lines do not change the exit code")] = False,
    prefill: Opened = "",
    as_json: JsonOption = False,
    config_file: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Grade a file and print a summary with pass@k. Exit code 0 when each line got a verdict, not internal_error."""
    from nouscoder.grade_files.grade_file import FileRequest, grade_file

    only_with("--server", server, "--token", "--ca")
    request = FileRequest(file, out, problems, server, token, ca, resume, skip_bad, prefill)
    with goes_on("--resume keeps the verdicts that --out has" if out else "with --out FILE it can go on"):
        summary, code = grade_file(request, load_config(config_file, overrides or []))
    text = json.dumps(summary.record()) if as_json else summary.text()
    say(text, err=out is None)
    raise typer.Exit(code)


tokens_app = typer.Typer(help="Tokens of the grading service's clients.", no_args_is_help=True)


@tokens_app.command("new")
def tokens_new(name: Annotated[str, typer.Argument(help="the client's name")]) -> None:
    """Make a token. Prints the line for verifier.tokens_file to stdout, and the token, only this once, to stderr."""
    from nouscoder.http_server.api_keys import new_api_key

    secret, line = new_api_key(name)
    say(line)  # first: a token whose line found no room is of no use
    say(f"token for {name}, shown only now: {secret}", err=True)


def prepare() -> None:
    """Compile what the sandboxes of this host need once: their init process and Go's standard library."""
    from nouscoder.verifier.sandbox.init_build import init_library_path
    from nouscoder.verifier.toolchains.languages import find_installed, registry
    from nouscoder.verifier.toolchains.toolchain_cache import prepare as prepare_language

    say(f"init: {init_library_path()}")
    for language in find_installed(registry()).values():
        if language.prepare is not None:
            say(f"{language.name}: {prepare_language(language)}")
