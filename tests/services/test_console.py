"""The live console of a run over HTTP: what is served and to whom, and what an open stream costs."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.report_pages import write_lines
from tests.services.test_console_follow import append, lines_of

from nouscoder.atomic_files import write_whole
from nouscoder.broker.process import serve_broker
from nouscoder.cli.status import why_stalled_text
from nouscoder.config import load_config
from nouscoder.demo import run as demo
from nouscoder.domain.run_status import Ledger, RunMode
from nouscoder.run import pages
from nouscoder.run.console import events as told
from nouscoder.run.console.feed import MOST_WATCHERS, Feed
from nouscoder.run.folder import RunFolder
from nouscoder.run.pages import open_pages
from nouscoder.run.snapshot import Snapshot
from nouscoder.run.view import View
from nouscoder.run.watch import RunWatch

LEDGER = Ledger(admitted=20, trained=8, filtered=4, stale=0, abandoned=0, in_flight={"sampling": 8})
SNAPSHOT = Snapshot("learning", 1, 4, 2, 8, pass_rate=0.5, ledger=LEDGER, blockers=("No learner runs.",))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    write_lines(folder / "metrics.jsonl", lines_of(8))
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told, "TICK_S", 0.02)


class Events:
    """A connection to /events. `query` and `headers` as a browser sends them."""

    def __init__(self, address: str, query: str = "", **headers: str) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=30)
        self._connection.request("GET", f"/events{query}", headers=headers)
        self.answer = self._connection.getresponse()
        self.last_id = ""

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        kind = ""
        for line in self.answer:
            assert not line.startswith(b":"), "nothing has come for a while"
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name == "event":
                kind = value
            elif name == "id":
                self.last_id = value
            elif name == "data":
                yield kind, json.loads(value)

    def until(self, wanted: str) -> Any:
        """The next event of a kind."""
        return next(record for kind, record in self if kind == wanted)

    def close(self) -> None:
        self.answer.close()
        self._connection.close()


def until(condition: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> None:
    """Wait for a condition, a minute at most."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        meanwhile()
        time.sleep(0.01)


def get(address: str, path: str, **headers: str) -> tuple[int, bytes, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection(address, timeout=30)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.read(), answer.headers
    connection.close()
    return found


def test_a_stream_tells_the_state_and_then_only_what_is_new(run: Path) -> None:
    feed = Feed()
    feed.show(SNAPSHOT)
    feed.say("redis://me:secret@host/0 is slow")
    with open_pages(run, "127.0.0.1:0", feed=feed) as address:
        events = Events(address)
        assert events.answer.getheader("Content-Type") == "text/event-stream"
        first = dict(zip(("run", "summary", "state", "points"), (record for _, record in events), strict=False))
        assert first["run"] == {"name": "mine"}
        assert first["summary"] is None
        state = first["state"]
        assert (state["phase"], state["done"], state["total"]) == ("learning", 2, 8)
        assert state["figures"]["pass rate"] == "0.500"
        assert (state["ledger"]["trained"], state["ledger"]["balanced"]) == (8, True)
        assert state["blockers"] == ["No learner runs."]
        assert state["said"] == ["redis://me:***@host/0 is slow"]
        feed.progress("evaluating after", 3, 6)
        assert events.until("state")["done"] == 3, "nothing else came meanwhile that was not new"
        append(run / "metrics.jsonl", lines_of(12)[8:])  # as a run writes its log
        again = events.until("points")
        assert again["after"] == {"step": 4.0, "batch": 0.0}
        write_whole(run / "summary.json", json.dumps({"steps": 12, "ledger": {"admitted": 1}}).encode())
        assert events.until("summary")["steps"] == 12
        (run / "tokens").mkdir()
        (run / "tokens" / "00000002.json").write_text('{"batch_id": 2, "rollouts": []}')
        assert events.until("rollouts") == {"batches": [2]}
        events.close()
    assert [*Events.__iter__(events)] == [], "the stream ends with the pages"


def test_a_browser_that_comes_back_to_another_process_misses_nothing(run: Path) -> None:
    with open_pages(run, "127.0.0.1:0") as address:
        events = Events(address)
        events.until("points")
        last = events.last_id
        events.close()
    write_lines(run / "metrics.jsonl", lines_of(16))
    for headers, query in (({"Last-Event-ID": last}, ""), ({}, f"?after={last}")):
        with open_pages(run, "127.0.0.1:0") as address:
            events = Events(address, query, **headers)
            found = events.until("points")
            assert found["after"] == {"step": 4.0, "batch": 0.0}
            (loss,) = [chart for chart in found["charts"] if chart["title"] == "Loss"]
            assert [x for x, _ in loss["series"][0]["points"]] == [*range(5, 17)]
            events.close()


def test_nothing_is_asked_and_nothing_is_computed_while_nobody_watches(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed, made = Feed(), list[Snapshot | None]()

    def counted(snapshot: Snapshot | None) -> dict[str, Any]:
        made.append(snapshot)
        return {}

    monkeypatch.setattr("nouscoder.run.console.feed._state", counted)
    with open_pages(run, "127.0.0.1:0", feed=feed) as address:
        for _ in range(100):
            feed.show(SNAPSHOT)
        assert (made, feed.shows_blockers) == ([], False)
        first, second = Events(address), Events(address)
        first.until("state")
        second.until("state")
        assert (made, feed.shows_blockers) == ([SNAPSHOT], True), "one text for both"
        first.close()
        second.close()
    feed.closed.clear()
    with open_pages(run, "127.0.0.1:0", feed=feed):
        pass
    assert len(made) == 1


def test_the_number_of_watchers_is_bounded_and_one_that_goes_makes_room(run: Path) -> None:
    feed = Feed()
    with open_pages(run, "127.0.0.1:0", feed=feed) as address:
        events = [Events(address) for _ in range(MOST_WATCHERS)]
        for one in events:
            one.until("run")
        status, text, _ = get(address, "/events")
        assert (status, text) == (503, f"{MOST_WATCHERS} pages watch this run already: close one\n".encode())
        assert get(address, "/")[0] == 200
        events.pop().close()
        until(lambda: feed._num_watchers < MOST_WATCHERS, lambda: feed.say("the next event finds that nobody reads"))
        events.append(Events(address))
        events[-1].until("run")
        for one in events:
            one.close()


def test_a_reader_that_takes_nothing_is_dropped(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of its stream ends, whether its buffers are full or not."""
    monkeypatch.setattr(pages, "_SILENCE_LIMIT_S", 0.2)
    monkeypatch.setattr(pages._Handler, "timeout", 0.2)
    monkeypatch.setattr(pages, "_UNSENT_BYTES", 4096)
    feed = Feed()
    with open_pages(run, "127.0.0.1:0", feed=feed) as address:
        host, port = address.split(":")
        with socket.socket() as silent:
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            silent.connect((host, int(port)))
            silent.sendall(b"GET /events HTTP/1.0\r\nHost: localhost\r\n\r\n")
            until(lambda: feed.shows_blockers)
            until(lambda: not feed.shows_blockers, lambda: feed.say("x" * 10_000))
        assert feed._num_watchers == 0


def test_a_foreign_site_gets_neither_the_page_nor_an_event(run: Path) -> None:
    with open_pages(run, "127.0.0.1:0", hosts=("runs.example",)) as address:
        for path in ("/", "/events", "/runs", "/tokens/0", "/console/console.js", "/metrics.jsonl"):
            assert get(address, path, Host="evil.example")[0] == 403, path
            assert get(address, path, Origin="http://evil.example")[0] == 403, path
        assert get(address, "/", Host="runs.example")[0] == 200


def test_the_page_loads_its_own_parts_only(run: Path) -> None:
    with open_pages(run, "127.0.0.1:0") as address:
        status, _, headers = get(address, "/")
        policy = headers["Content-Security-Policy"]
        assert (status, "default-src 'none'" in policy, "unsafe" in policy) == (200, True, False)
        for name in pages.PARTS:
            status, part, headers = get(address, f"/{name}")
            assert (status, headers["Content-Type"]) == (200, pages.PARTS[name])
            assert b"innerHTML" not in part, name
            assert b"eval(" not in part
        for path in (
            "/console/",
            "/console/console.html",
            "/console/../pages.py",
            "/console/uPlot.LICENSE",
            "/tokens/x",
        ):
            assert get(address, path)[0] == 404, path


def test_of_another_run_only_curves_and_evaluations_are_told(run: Path, tmp_path: Path) -> None:
    other = run.parent / "other & <b>"
    other.mkdir()
    write_lines(other / "metrics.jsonl", lines_of(4))
    (other / "evaluation_before.json").write_text('{"policy_version": 0, "pass_at_1": 0.5}')
    (other / "tokens").mkdir()
    (other / "tokens" / "00000000.json").write_text('{"batch_id": 0, "rollouts": [{}]}')
    outside = tmp_path / "outside"
    outside.mkdir()
    write_lines(outside / "metrics.jsonl", lines_of(4))
    (run.parent / "link").symlink_to(outside)
    (run.parent / "no run").mkdir()
    feed = Feed()
    feed.show(SNAPSHOT)
    with open_pages(run, "127.0.0.1:0", feed=feed) as address:
        assert json.loads(get(address, "/runs")[1]) == ["other & <b>"]
        events = Events(address, "?run=other%20%26%20%3Cb%3E")
        kinds = [kind for _, (kind, _) in zip(range(4), events, strict=False)]
        assert kinds == ["run", "summary", "points", "evaluations"], "no state, and no rollouts"
        events.close()
        for name in ("../outside", "link", "no%20run", "mine", "/etc", "%2e%2e/outside", "other"):
            assert get(address, f"/events?run={name}")[0] == 404, name


async def test_what_blocks_is_what_why_stalled_says_and_is_asked_only_when_wanted(broker_rig: Any) -> None:
    config = broker_rig.config("broker.grpc=127.0.0.1:0")
    async with AsyncExitStack() as stack:
        broker = broker_rig.broker(config)
        address = await serve_broker(broker, config, asyncio.Event(), stack)
        await broker.operations.set_mode(RunMode.PAUSED)
        config = load_config(None, [f'broker.grpc="{address}"'])
        async with RunWatch(config) as watch:
            unasked = await watch.snapshot("learning", [])
            asked = await watch.snapshot("learning", [], with_blockers=True)
        assert unasked.blockers is None
        assert asked.blockers is not None
        assert "The run was paused by `nouscoder pause`" in asked.blockers[0]
        said = await why_stalled_text(config, as_json=False)
        assert said.splitlines()[0].partition("paused")[2] == " ".join(asked.blockers).partition("paused")[2]


def test_the_commands_of_the_document_are_understood() -> None:
    text = (Path(__file__).parents[2] / "docs" / "console.md").read_text(encoding="utf8")
    settings = re.findall(r"--set (\S+)", text)
    assert [load_config(None, [setting]).run.pages for setting in settings] == ["127.0.0.1:8088"] * 2


async def test_the_demo_is_shown_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    async def stand_in(folder: RunFolder, config: Any, view: View, started_s: float) -> None:
        view.show(SNAPSHOT)
        (text,) = [text for text in said if "is shown at" in text]
        address = text.partition("http://")[2].rstrip("/")
        events = await asyncio.to_thread(Events, address)
        seen.append(await asyncio.to_thread(events.until, "state"))
        events.close()

    async def at_once() -> None:
        return None

    said: list[str] = []
    say = Feed.say

    def heard(self: Feed, text: str) -> None:
        said.append(text)
        say(self, text)

    monkeypatch.setattr(Feed, "say", heard)
    monkeypatch.setattr(demo, "prepare_and_run", stand_in)
    monkeypatch.setattr(demo, "until_cancelled", at_once)
    overrides = [f'run.root="{tmp_path}"', 'run.pages="127.0.0.1:0"']
    assert await demo.demo_run(seed=0, name="shown", resume=False, overrides=overrides) == 0
    assert [state["phase"] for state in seen] == ["learning"]
    assert any(text.endswith("until Ctrl-C") for text in said)
