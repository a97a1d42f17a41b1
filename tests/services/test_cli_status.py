"""`nouscoder status` and `why-stalled`: over mutual TLS, which needs a certificate, and while Redis stands still."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests import command_line
from tests.certificates import make_certificate
from tests.free_addresses import free_addresses

from nouscoder.bench.forgetful_redis import ForgetfulRedis
from nouscoder.broker.core import Broker
from nouscoder.broker.process import serve_broker
from nouscoder.cli.status import status_text, why_stalled_text
from nouscoder.config import dump_config
from nouscoder.data.problems import save_problems
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import StdinCase, StdinTests
from nouscoder.errors import ExitCode
from nouscoder.rpc.channel import PeerUnreachable


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tls.crt, tls.key and ca.crt for 127.0.0.1."""
    return make_certificate(tmp_path_factory.mktemp("tls"))


async def nouscoder(*arguments: str) -> tuple[int, str, str]:
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "nouscoder", *arguments), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(running.communicate(), 60)
    return running.returncode or 0, out.decode(), err.decode()


async def test_over_mutual_tls_the_broker_and_certificates_come_from_the_configuration(
    broker_rig: Any, certificate: Path, tmp_path: Path
) -> None:
    files = {"certificate": "tls.crt", "key": "tls.key", "ca": "ca.crt"}
    tls = [f"tls.{name}={certificate / file}" for name, file in files.items()]
    both = [f"verifier.tls.{name}={certificate / files[name]}" for name in ("certificate", "key")]
    config = broker_rig.config("broker.grpc=127.0.0.1:0", *tls, *both)
    file = tmp_path / "config.toml"
    file.write_text(dump_config(config))
    async with AsyncExitStack() as stack:
        address = await serve_broker(broker_rig.broker(config), config, asyncio.Event(), stack)
        asked = await nouscoder("status", "--config", str(file), "--broker", address, "--json")
        stalled = await nouscoder("why-stalled", "--config", str(file), "--set", f'broker.grpc="{address}"')
        plain = await nouscoder("status", "--broker", address)
    assert (asked[0], json.loads(asked[1])["balanced"]) == (0, True), asked
    assert (stalled[0], stalled[2]) == (0, ""), stalled
    assert plain[0] == ExitCode.UNAVAILABLE
    assert plain[2] == f"nouscoder: broker at {address} has not answered for 3 s\n"


@pytest.mark.timeout(300)
@pytest.mark.heavy
async def test_status_and_why_stalled_name_a_redis_that_is_stopped(tmp_path: Path, broker_rig: Any) -> None:
    """It accepts connections and answers nothing. The answer comes long before redis-py gives its attempts up."""
    redis = ForgetfulRedis(tmp_path / "redis")
    config = broker_rig.config("broker.grpc=127.0.0.1:0")
    named = r"broker at .* has not answered for 3 s: Redis at .* does not answer: nothing came for 5 s"
    async with AsyncExitStack() as stack:
        stack.callback(redis.close)
        broker = Broker(config, redis.url, broker_rig.index)
        address = await serve_broker(broker, config, asyncio.Event(), stack)
        config = config.model_copy(update={"broker": config.broker.model_copy(update={"grpc": address})})
        redis.stop()
        stack.callback(redis.go_on)
        for tell in (status_text, why_stalled_text):
            with pytest.raises(PeerUnreachable, match=named):
                await tell(config, as_json=False)


def test_status_alone_shows_the_newest_run_here_and_other_commands_name_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody_listens(*_: object) -> None:
        raise ConnectionRefusedError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nouscoder.cli.status.socket.create_connection", nobody_listens)
    (address,) = free_addresses(1)
    for number, name in enumerate(("old", "mine")):
        file = tmp_path / "runs" / name / "config.toml"
        file.parent.mkdir(parents=True)
        file.write_text(f'[run]\nname = "{name}"\n[broker]\ngrpc = "{address}"\n')
        os.utime(file, (number, number))
    for command in ("status", "why-stalled"):
        shown = command_line.nouscoder(command)
        assert (shown.exit_code, shown.stderr) == (0, "")
        assert "run mine" in shown.stdout
    named = "nouscoder: name the run, such as --config runs/mine/config.toml; runs here, newest first: mine, old\n"
    for words in ("pause", "resume", "drain", "batch drop 1", "dead-letters", "dead-letters drop --all"):
        refused = command_line.nouscoder(*words.split())
        assert (refused.exit_code, refused.stderr) == (2, named)


def test_a_problem_file_is_described(tmp_path: Path) -> None:
    tests = [StdinTests((StdinCase("1", "2"),) * number) for number in (1, 2, 6)]
    problems = [Problem(f"p{n}", "Add  one." if n else "Add one.", one) for n, one in enumerate(tests)]
    save_problems(tmp_path / "p.jsonl", [*problems[:2], replace(problems[2], prompt="Two.", languages=("cpp", "c"))])
    ended = command_line.nouscoder("data", "stats", tmp_path / "p.jsonl")
    assert ended.stdout.splitlines() == [
        "problems: 3",
        "tests a problem: 1 to 6, median 2",
        "characters a prompt: 4 to 9, median 8",
        "languages: 2 python, 1 cpp, c",
        "problems with the prompt of another one: 1",
    ]
    assert json.loads(command_line.nouscoder("data", "stats", tmp_path / "p.jsonl", "--json").stdout)["problems"] == 3
