"""Which Redis a broker was given; its password is never reported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nouscoder.broker.core import Broker
from nouscoder.broker.errors import BrokerUnavailable
from nouscoder.broker.redis_address import configured_url, without_password
from nouscoder.config import BrokerSection, Config
from nouscoder.errors import Unusable

SECRET = "hunter2"


def test_the_url_may_be_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "url"
    file.write_text(f"redis://:{SECRET}@redis:6379/0\n")
    assert configured_url(BrokerSection(redis_url_file=str(file))) == f"redis://:{SECRET}@redis:6379/0"
    assert configured_url(BrokerSection(redis_url="redis://here")) == "redis://here"
    assert configured_url(BrokerSection()) == ""


@pytest.mark.parametrize(("content", "sentence"), [(None, "cannot be read: No such file"), ("redis:6379", "no URL")])
def test_a_file_of_no_use_is_one_sentence(tmp_path: Path, content: str | None, sentence: str) -> None:
    file = tmp_path / "url"
    if content is not None:
        file.write_text(content)
    with pytest.raises(Unusable, match=f"redis_url_file {file} .*{sentence}"):
        configured_url(BrokerSection(redis_url_file=str(file)))


@pytest.mark.parametrize(
    ("url", "reported"),
    [
        (f"redis://:{SECRET}@redis:6379/0", "redis://redis:6379/0"),
        (f"rediss://user:{SECRET}@10.0.0.1:6380", "rediss://10.0.0.1:6380"),
        ("redis://redis:6379/0", "redis://redis:6379/0"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
    ],
)
def test_the_reported_address_holds_no_password(url: str, reported: str) -> None:
    assert without_password(url) == reported


async def test_an_error_about_redis_holds_no_password(broker_rig: Any) -> None:
    broker = Broker(Config(), f"redis://:{SECRET}@127.0.0.1:1", broker_rig.index)
    with pytest.raises(BrokerUnavailable) as caught:
        await broker.status()
    assert SECRET not in str(caught.value)
    assert "127.0.0.1:1" in str(caught.value)
    await broker.store.close()


def test_the_process_says_which_file_it_wanted(tmp_path: Path) -> None:
    problems = tmp_path / "train.jsonl"
    tests = {"type": "stdin", "cases": [{"input": "1", "output": "1"}]}
    problems.write_text(json.dumps({"problem_id": "p", "prompt": "?", "tests": tests}) + "\n")
    command = [sys.executable, "-m", "nouscoder", "serve", "broker", "--set", "broker.redis_url_file=/nowhere"]
    answer = subprocess.run(
        [*command, "--set", f"problems.train={problems}"], capture_output=True, text=True, timeout=60
    )
    assert answer.returncode == 78, answer.stderr
    assert "broker.redis_url_file /nowhere cannot be read" in answer.stderr
