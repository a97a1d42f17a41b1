"""The options of `nouscoder demo` become values of its configuration."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from typer.testing import CliRunner

from nouscoder.cli.app import app


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ([], ["generation.engine=torch"]),
        (
            ["--engine", "vllm"],
            [
                "generation.engine=vllm",
                "generation.vllm.enforce_eager=true",
                "generation.vllm.dtype=float32",
                "generation.vllm.kv_cache_memory_bytes=268435456",
            ],
        ),
        (["--set", "generation.engine=fake"], ["generation.engine=torch", "generation.engine=fake"]),
    ],
)
def test_the_demo_has_an_option_for_the_engine(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], values: list[str]
) -> None:
    given: list[Sequence[str]] = []

    async def noted(*, overrides: Sequence[str], **_: object) -> int:
        given.append(overrides)
        return 0

    monkeypatch.setattr("nouscoder.demo.run.demo_run", noted)
    answer = CliRunner().invoke(app, ["demo", *arguments])
    assert answer.exit_code == 0, answer.output
    assert given == [values]
