"""`nouscoder eval`: pass@k of a model on problems, and the comparison of two such evaluations."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from nouscoder.cli.options import (
    AGAIN,
    ConfigOption,
    JsonOption,
    Opened,
    RunByDefault,
    SetOption,
    goes_on,
    json_fields,
    new,
    only_with,
)
from nouscoder.config import Config, load_config
from nouscoder.domain.prompt import PromptForm, PromptSettings
from nouscoder.domain.submission import Profile
from nouscoder.errors import WrongUse, for_terminal

eval_app = typer.Typer(
    cls=RunByDefault,
    no_args_is_help=True,
    help="pass@k of a model on problems. `eval PROBLEMS ...` is `eval run PROBLEMS ...`.",
)


@eval_app.command("run")
def eval_run(
    problems: Annotated[Path, typer.Argument(help="problem file: JSON lines or parquet")],
    url: Annotated[str, typer.Option(help="server with OpenAI's API, such as http://127.0.0.1:8000/v1")] = "",
    model: Annotated[str, typer.Option(help="name of the model at the server")] = "",
    policy: Annotated[
        str,
        typer.Option(
            help="model folder, or ORGANISATION/MODEL of a hub, in place of a server; this process samples it"
        ),
    ] = "",
    yarn_factor: Annotated[float, typer.Option(min=0.0, help="with --policy: YaRN's factor; 0: none")] = 0.0,
    yarn_original: Annotated[
        int, typer.Option("--yarn-original-tokens", min=0, help="positions that the model was trained for before YaRN")
    ] = 0,
    samples: Annotated[
        Path | None, typer.Option(help="file of samples, in place of a server; as `nouscoder grade` reads")
    ] = None,
    out: Annotated[
        Path | None, new("folder", "folder; default: evaluations/MODEL; an evaluation there is continued")
    ] = None,
    num_samples: Annotated[int, typer.Option("--n", min=1, help="samples of each problem")] = 8,
    temperature: Annotated[float, typer.Option(min=0.0, help="of the sampling")] = 0.6,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="of the sampling")] = 0.95,
    max_tokens: Annotated[int, typer.Option(min=1, help="of one completion")] = 32_768,
    seed: Annotated[int, typer.Option(help="of the sampling; each sample has a seed of its own")] = 0,
    prompt: Annotated[
        str,
        typer.Option(
            help="generation.environment.prompt_form: plain, livecodebench (or lcb), nouscoder, deepcoder, acereason;"
            " default: the configuration's, or that of the policy's training"
        ),
    ] = "",
    extra: Annotated[str, typer.Option(help="JSON object of further fields of each request")] = "{}",
    prefill: Opened = "",
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
    all_tests: Annotated[bool, typer.Option("--all-tests", help="run every test, also after a failure")] = False,
    as_json: JsonOption = False,
    config_file: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Sample a model on problems, grade the samples, and report pass@k. Run again, it continues where it stopped."""
    from nouscoder.evaluation.evaluate import EvaluationRequest, evaluate
    from nouscoder.evaluation.outcomes import summary_text
    from nouscoder.evaluation.samples import SamplingSettings

    sampled = ("--n", "--temperature", "--top-p", "--max-tokens", "--seed", "--prompt", "--extra", "--at-once")
    only_with("a model that is sampled: --url or --policy", not samples, *sampled)
    only_with("--verifier", verifier, "--token", "--ca")
    if url and not model:
        raise WrongUse("--url needs --model, the name of the model at the server")
    checkpoint = _checkpoint(policy, yarn_factor, yarn_original)
    if checkpoint:
        model = checkpoint.model(model)
    config = load_config(config_file, overrides or [])
    name = model or (samples.stem if samples else "samples")
    folder = out or Path("evaluations") / re.sub(r"[^\w.-]+", "_", name)
    asked, lines = _asked(config, checkpoint.folder if checkpoint else None, prompt, folder)
    checkpoint = checkpoint and replace(checkpoint, date=asked.date)
    for line in () if samples else lines:
        typer.echo(for_terminal(line), err=True)
    settings = SamplingSettings(
        model, num_samples, temperature, top_p, max_tokens, seed, asked, json_fields("--extra", extra), prefill
    )
    dates, profiles = _window(window, since, until), tuple(profile or ())
    request = EvaluationRequest(
        problems, folder, settings, url, samples, dates, profiles, at_once, verifier, token, ca, all_tests, checkpoint
    )
    with goes_on(AGAIN):
        record = evaluate(request, config)
    typer.echo(for_terminal(json.dumps(record) if as_json else summary_text(record, folder)))


@eval_app.command("compare")
def eval_compare(
    a: Annotated[Path, typer.Argument(help="folder of an evaluation")],
    b: Annotated[Path, typer.Argument(help="folder of another one, of the same problems")],
    profile: Annotated[str, typer.Option(help="whose verdicts count; default: A's first")] = "",
    as_json: JsonOption = False,
) -> None:
    """Compare two evaluations problem by problem: exact test, paired bootstrap, and the problems that differ."""
    from nouscoder.evaluation.comparison import compare

    found = compare(a, b, profile)
    typer.echo(for_terminal(json.dumps(found.record()) if as_json else found.text()))


def _checkpoint(policy: str, yarn_factor: float, yarn_original: int) -> Any:
    from nouscoder.evaluation.served_policy import ServedPolicy

    if policy:
        return ServedPolicy.named(policy, yarn_factor, yarn_original)
    if yarn_factor or yarn_original:
        raise WrongUse("--yarn-factor and --yarn-original-tokens need --policy; a server has a context of its own")
    return None


def _window(name: str, since: str, until: str) -> Any:
    from nouscoder.evaluation.problems import Window, window_named

    if name and (since or until):
        raise WrongUse("give either --window, or --since and --until")
    return window_named(name) if name else Window(since, until)


def _asked(
    config: Config, folder: Path | None, form: str, begun: Path | None = None
) -> tuple[PromptSettings, list[str]]:
    """How problems are asked, and what is to be said of it. `folder` is the policy's; None for a server.

    An evaluation that was begun before in the folder `begun` goes on with its date.
    """
    from nouscoder.policy_folder.prompt_file import prompt_lines, prompt_of, with_date, with_recorded_prompt

    if folder:
        config = with_date(with_recorded_prompt(config, folder), folder, begun)
    environment = config.generation.environment
    if form:
        try:
            environment = environment.model_copy(update={"prompt_form": PromptForm(form)})
        except ValueError:
            raise WrongUse(f"--prompt {form!r} is none of {', '.join(PromptForm)}") from None
    if folder is None:
        return environment.record(PromptSettings).resolved(has_chat_template=True), []
    return prompt_of(environment, folder), [*prompt_lines(environment, folder)]
