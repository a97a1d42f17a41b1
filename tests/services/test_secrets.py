"""Passwords of URLs are in no file that others may read, on no page, in no log and in no message."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import stat
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from nouscoder.broker.redis_address import configured_url
from nouscoder.config import Config, load_config
from nouscoder.errors import without_secrets
from nouscoder.http_server.bounded_threads import MOST_OPEN
from nouscoder.logs import JsonLines
from nouscoder.run.folder import RunFolder
from nouscoder.run.local_services import rewrite_addresses
from nouscoder.run.pages import open_pages

SECRET = "hunter2"
REDIS = f"redis://:{SECRET}@127.0.0.1:1/0"
SETTINGS = [f"broker.redis_url={REDIS}", f"verifier.tracing_endpoint=http://me:{SECRET}@127.0.0.1:4318"]


def config_in(root: Path) -> Config:
    return load_config(None, [*SETTINGS, f'run.root="{root}"', "run.name=r"])


def readable_by_others(folder: Path) -> list[str]:
    """The files with the secret that another user may read, were the folder open."""
    files = [path for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    return [path.name for path in files if path.stat().st_mode & 0o077]


def test_a_new_run_folder_is_its_users_and_redis_password_is_in_one_file(tmp_path: Path) -> None:
    folder = RunFolder.create(config_in(tmp_path))
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    for config in (rewrite_addresses(folder, config_in(tmp_path)), load_config(folder.config_file)):
        assert readable_by_others(folder.path) == []
        assert REDIS not in folder.config_file.read_text()
        assert configured_url(config.broker) == REDIS, "the services of the run find it"
    folder.close()
    reopened, config = RunFolder.reopen(tmp_path / "r")
    assert configured_url(config.broker) == REDIS
    reopened.close()


def test_the_record_of_an_external_run_has_no_password_at_all(tmp_path: Path) -> None:
    RunFolder.attach(config_in(tmp_path)).close()
    assert SECRET not in (tmp_path / "r" / "config.toml").read_text()


def answer(address: str, path: str, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


def test_the_pages_show_no_password_and_refuse_foreign_sites(tmp_path: Path) -> None:
    folder = RunFolder.create(config_in(tmp_path))
    with open_pages(folder.path, "127.0.0.1:0", ["pages.example.org"]) as address:
        status, text = answer(address, "/config.toml")
        assert (status, SECRET in text, "me:***@127.0.0.1:4318" in text) == (200, False, True)
        assert answer(address, "/config.toml", Host="pages.example.org")[0] == 200
        assert answer(address, "/", Host="run.namespace.svc.cluster.local:8090")[0] == 200
        for path in ("/", "/config.toml", "/rollouts.html"):
            assert answer(address, path, Host="evil.example")[0] == 403
            assert answer(address, path, Origin="https://evil.example")[0] == 403
    folder.close()


def test_clients_that_say_nothing_keep_nobody_from_the_pages(tmp_path: Path) -> None:
    with open_pages(tmp_path, "127.0.0.1:0") as address, ExitStack() as stack:
        host, port = address.split(":")
        idle = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(MOST_OPEN + 20)]
        assert answer(address, "/")[0] == 200
        idle[0].settimeout(60)
        assert idle[0].recv(1) == b"", "the oldest was ended"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"a {REDIS} b", "a redis://:***@127.0.0.1:1/0 b"),
        (f'x = "http://me:{SECRET}@host/p?q=1"', 'x = "http://me:***@host/p?q=1"'),
        (f"redis://h:1/0?password={SECRET}&db=1", "redis://h:1/0?password=***&db=1"),
        (f"redis://u:a@{SECRET}@h", "redis://u:***@h"),
        ("http://127.0.0.1:8080/a:b@c", "http://127.0.0.1:8080/a:b@c"),
        ("no address: me@home", "no address: me@home"),
    ],
)
def test_texts_without_secrets(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_a_log_line_has_no_password() -> None:
    record = logging.makeLogRecord({"msg": f"cannot reach {REDIS}", "url": REDIS, "levelname": "INFO"})
    line = JsonLines("broker").format(record)
    assert SECRET not in line
    assert json.loads(line)["url"] == "redis://:***@127.0.0.1:1/0"


@pytest.mark.parametrize("command", [["serve", "broker"], ["runs", "list", "--json"]])
def test_the_output_of_a_command_has_no_password(command: list[str], tmp_path: Path) -> None:
    options = ["--set", f"broker.redis_url={REDIS}", "--set", f'run.root="{tmp_path}"']
    run = subprocess.run(
        [sys.executable, "-m", "nouscoder", *command, *options], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode != 0
    assert SECRET not in run.stdout + run.stderr, run.stderr
