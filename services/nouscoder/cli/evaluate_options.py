"""The arguments and options of `nouscoder eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nouscoder.domain.submission import Profile

ProblemsArgument = Annotated[Path, typer.Argument(help="problem file: JSON lines or parquet")]
UrlOption = Annotated[str, typer.Option(help="server with OpenAI's API, such as http://127.0.0.1:8000/v1")]
ModelOption = Annotated[str, typer.Option(help="name of the model at the server")]
PolicyOption = Annotated[
    str,
    typer.Option(help="model folder, or ORGANISATION/MODEL of a hub, in place of a server; this process samples it"),
]
YarnFactorOption = Annotated[float, typer.Option(min=0.0, help="with --policy: YaRN's factor; 0: none")]
YarnOriginalOption = Annotated[
    int, typer.Option("--yarn-original-tokens", min=0, help="positions that the model was trained for before YaRN")
]
SamplesOption = Annotated[
    Path | None, typer.Option(help="file of samples, in place of a server; as `nouscoder grade` reads")
]
OutOption = Annotated[
    Path | None, typer.Option(help="folder; default: evaluations/MODEL; an evaluation there is continued")
]
NumSamplesOption = Annotated[int, typer.Option("--n", min=1, help="samples of each problem")]
TemperatureOption = Annotated[float, typer.Option(min=0.0, help="of the sampling")]
TopPOption = Annotated[float, typer.Option(min=0.0, max=1.0, help="of the sampling")]
MaxTokensOption = Annotated[int, typer.Option(min=1, help="of one completion")]
SeedOption = Annotated[int, typer.Option(help="of the sampling; each sample has a seed of its own")]
PromptOption = Annotated[str, typer.Option(help="prompt format: plain, or lcb (LiveCodeBench's)")]
ExtraOption = Annotated[str, typer.Option(help="JSON object of further fields of each request")]
ProfileOption = Annotated[
    list[Profile] | None, typer.Option(help="grading semantics; give it twice to compare; default: the problems'")
]
AllTestsOption = Annotated[bool, typer.Option("--all-tests", help="run every test, also after a failure")]
WindowOption = Annotated[str, typer.Option(help="a named window of dates: lcb-v6")]
SinceOption = Annotated[str, typer.Option(help="first date, such as 2024-08-01")]
UntilOption = Annotated[str, typer.Option(help="last date, such as 2025-05-01")]
AtOnceOption = Annotated[int, typer.Option(min=1, help="requests to the server at the same time")]
VerifierOption = Annotated[str | None, typer.Option(help="URL of a grading service; default: this machine")]
TokenOption = Annotated[str | None, typer.Option(help="the service's token; default: NOUSCODER_TOKEN")]
CaOption = Annotated[Path | None, typer.Option(help="PEM file of the authority of the service's certificate")]
