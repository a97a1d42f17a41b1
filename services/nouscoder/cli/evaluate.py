"""`nouscoder eval`: pass@k of a model on problems, and the comparison of two such evaluations."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from nouscoder.cli.options import ConfigOption, JsonOption, RunByDefault, SetOption, json_fields
from nouscoder.domain.submission import Profile
from nouscoder.errors import Unusable

eval_app = typer.Typer(cls=RunByDefault, no_args_is_help=True)


@eval_app.callback()
def _eval() -> None:
    """pass@k of a model on problems. `eval PROBLEMS ...` is `eval run PROBLEMS ...`."""


@eval_app.command("run")
def eval_run(
    problems: Annotated[Path, typer.Argument(help="problem file: JSON lines or parquet")],
    url: Annotated[str, typer.Option(help="server with OpenAI's API, such as http://127.0.0.1:8000/v1")] = "",
    model: Annotated[str, typer.Option(help="name of the model at the server")] = "",
    samples: Annotated[
        Path | None, typer.Option(help="file of samples, in place of a server; as `nouscoder grade` reads")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="folder; default: evaluations/MODEL; an evaluation there is continued")
    ] = None,
    num_samples: Annotated[int, typer.Option("--n", min=1, help="samples of each problem")] = 8,
    temperature: Annotated[float, typer.Option(min=0.0, help="of the sampling")] = 0.6,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="of the sampling")] = 0.95,
    max_tokens: Annotated[int, typer.Option(min=1, help="of one completion")] = 32_768,
    seed: Annotated[int, typer.Option(help="of the sampling; each sample has a seed of its own")] = 0,
    prompt: Annotated[str, typer.Option(help="prompt format: plain, or lcb (LiveCodeBench's)")] = "plain",
    extra: Annotated[str, typer.Option(help="JSON object of further fields of each request")] = "{}",
    profile: Annotated[
        list[Profile] | None, typer.Option(help="grading semantics; give it twice to compare; default: the problems'")
    ] = None,
    window: Annotated[str, typer.Option(help="a named window of dates: lcb-v6")] = "",
    since: Annotated[str, typer.Option(help="first date, such as 2024-08-01")] = "",
    until: Annotated[str, typer.Option(help="last date, such as 2025-05-01")] = "",
    at_once: Annotated[int, typer.Option(min=1, help="requests to the server at the same time")] = 16,
    verifier: Annotated[str | None, typer.Option(help="URL of a grading service; default: this machine")] = None,
    token: Annotated[str | None, typer.Option(help="the service's token; default: NOUSCODER_TOKEN")] = None,
    ca: Annotated[Path | None, typer.Option(help="PEM file of the authority of the service's certificate")] = None,
    as_json: JsonOption = False,
    config_file: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Sample a model on problems, grade the samples, and report pass@k. Run again, it continues where it stopped."""
    from nouscoder.config import load_config
    from nouscoder.evaluation.evaluate import EvaluationRequest, evaluate
    from nouscoder.evaluation.problems import Window, window_named
    from nouscoder.evaluation.samples import SamplingSettings
    from nouscoder.evaluation.summary import summary_text

    if url and not model:
        raise Unusable("--url needs --model, the name of the model at the server")
    if window and (since or until):
        raise Unusable("give either --window, or --since and --until")
    sampling = SamplingSettings(
        model, num_samples, temperature, top_p, max_tokens, seed, _prompt_format(prompt), json_fields("--extra", extra)
    )
    folder = out or Path("evaluations") / re.sub(r"[^\w.-]+", "_", model or (samples.stem if samples else "samples"))
    request = EvaluationRequest(
        problems=problems,
        out=folder,
        sampling=sampling,
        url=url,
        samples=samples,
        window=window_named(window) if window else Window(since, until),
        profiles=tuple(profile or ()),
        at_once=at_once,
        verifier=verifier,
        token=token,
        ca=ca,
    )
    record = evaluate(request, load_config(config_file, overrides or []))
    typer.echo(json.dumps(record) if as_json else summary_text(record, folder))


@eval_app.command("compare")
def eval_compare(
    a: Annotated[Path, typer.Argument(help="folder of an evaluation")],
    b: Annotated[Path, typer.Argument(help="folder of another one, of the same problems")],
    profile: Annotated[str, typer.Option(help="whose verdicts count; default: A's first")] = "",
    as_json: JsonOption = False,
) -> None:
    """Compare two evaluations problem by problem: exact test, paired bootstrap, and the problems that differ."""
    from nouscoder.evaluation.compare import compare

    found = compare(a, b, profile)
    typer.echo(json.dumps(found.record()) if as_json else found.text())


def _prompt_format(name: str) -> Any:
    from nouscoder.evaluation.prompts import PromptFormat

    try:
        return PromptFormat(name)
    except ValueError:
        raise Unusable(f"--prompt {name!r} is none of {', '.join(PromptFormat)}") from None
