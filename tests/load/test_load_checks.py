"""The checks of an overload: each fault gives one complaint, and a client counts its answers."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from typing import Any

import pytest
from tests.load.lean_client import Answer, LeanClient
from tests.load.load_client import Graded, OpenLoopClient, Tally
from tests.load.load_pace import Pace
from tests.load.load_result import ClientFigures, LoadPlan, LoadResult, as_text, complaints
from tests.load.load_watch import Holding, first_and_last
from tests.load.mixture import Sample

from nouscoder.bench.http_load import LoadFault


def client(name: str, count: int) -> ClientFigures:
    return ClientFigures(name, 10.0, 200, 50, count, count, 200 - count, 5, 0.5, 0.1, 0.2)


GOOD = LoadResult(
    backend="local",
    num_cores=2,
    num_slots=2,
    plan=LoadPlan(),
    idle_per_second=20.0,
    capacity_per_second=21.0,
    wall_s=600.0,
    verdicts={"accepted": 500},
    clients=(client("a", 100), client("b", 105)),
    statuses={200: 205, 429: 195},
    retry_after_s={1: 195},
    num_unanswered=0,
    num_faults=0,
    num_wrong=0,
    num_metered=205,
    num_internal_errors=0,
    num_stray_bytes=0,
    still_ready=True,
    first_minute=Holding(0.0, 100 << 20, 30, 10),
    last_minute=Holding(600.0, 120 << 20, 31, 10),
    peak_memory_bytes=130 << 20,
    client_cpu_share=0.05,
    notes=(),
)


def test_a_good_run_gives_no_complaint() -> None:
    assert complaints(GOOD) == []
    assert as_text(GOOD).endswith("all checks passed")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"still_ready": False}, "not ready"),
        ({"num_unanswered": 1}, "never answered"),
        ({"num_faults": 1}, "1 requests failed"),
        ({"num_wrong": 1}, "1 answers are wrong"),
        ({"num_stray_bytes": 9}, "9 bytes answer no request"),
        ({"num_metered": 206}, "205 verdicts came, the service counted 206"),
        ({"statuses": {200: 205, 429: 194, 500: 1}}, "500"),
        ({"retry_after_s": {}}, "not overloaded"),
        ({"num_internal_errors": 1}, "internal error"),
        ({"clients": (client("a", 100), client("b", 111))}, "shares differ by 11.0%"),
        ({"last_minute": Holding(600.0, 150 << 20, 30, 10)}, "memory grew from 100 to 150 MiB"),
        ({"last_minute": Holding(600.0, 100 << 20, 60, 10)}, "descriptors grew from 30 to 60"),
    ],
)
def test_each_fault_gives_one_complaint(change: dict[str, Any], complaint: str) -> None:
    (found,) = complaints(dataclasses.replace(GOOD, **change))
    assert complaint in found
    assert as_text(dataclasses.replace(GOOD, **change)).endswith(f"FAILED: {found}")


def test_the_rate_follows_the_capacity_that_the_service_sustains() -> None:
    pace = Pace(LoadPlan(overload=2.0, num_clients=4, greed=5.0), 10.0, window_s=20.0)
    assert [pace.per_second(index) for index in range(4)] == [25.0, 5.0, 5.0, 5.0]
    for second in range(19):  # 50 verdicts a second, but not for long
        pace.note(float(second), 50 * second)
    assert pace.capacity_per_second == 10.0
    for second in range(19, 60):
        pace.note(float(second), 19 * 50 + 20 * (second - 19))
    assert 20.0 < pace.capacity_per_second <= 50.0
    before = pace.capacity_per_second
    pace.note(90.0, 19 * 50 + 20 * 41)
    assert pace.capacity_per_second == before


def test_the_first_and_the_last_minute_have_separate_medians() -> None:
    held = [Holding(float(at), at, at, 1) for at in range(0, 601, 5)]
    first, last = first_and_last(held, 60.0)
    assert (first.at_s, last.at_s) == (30.0, 570.0)
    with pytest.raises(ValueError, match="no samples"):
        first_and_last([], 60.0)


class ScriptedHttp(LeanClient):
    """Gives the scripted answers in turn."""

    def __init__(self, *answers: tuple[int, dict[str, str], object] | LoadFault) -> None:
        super().__init__("http://127.0.0.1:1")
        self._answers = list(answers)
        self.asked: list[tuple[float, bytes]] = []

    async def post(self, path: str, body: bytes, headers: Mapping[str, str] = {}) -> Answer:
        self.asked.append((time.monotonic(), body))
        answer = self._answers.pop(0) if self._answers else accepted()
        if isinstance(answer, LoadFault):
            raise answer
        status, more, content = answer
        return status, {"x-request-id": headers["X-Request-Id"], **more}, json.dumps(content).encode()


def accepted(passed: int = 2) -> tuple[int, dict[str, str], object]:
    return 200, {}, {"verdict": "accepted", "passed": passed, "total": 2, "first_failure": None}


async def tally_of(http: ScriptedHttp, seconds: float = 0.1) -> Tally:
    expected = {1: Graded("accepted", 2, 2, None)}
    asking = OpenLoopClient("a", http, [Sample(1, "accepted", b"one")], expected, lambda: 400.0, seed=0)
    await asking.run(time.monotonic() + seconds)
    assert asking.tally.num_sent == len(http.asked) == asking.tally.num_ended
    return asking.tally


@pytest.mark.parametrize(
    ("answer", "wrong", "faults", "note"),
    [
        (accepted(passed=1), 1, 0, "passed=1"),
        ((200, {"x-request-id": "b/7"}, accepted()[2]), 1, 0, "got the answer to b/7"),
        ((429, {}, {}), 1, 0, "429 with Retry-After ''"),
        ((429, {"retry-after": "0"}, {}), 1, 0, "429 with Retry-After '0'"),
        ((500, {}, {}), 0, 0, "status 500"),
        (LoadFault("gone"), 0, 1, "gone"),
    ],
)
async def test_a_client_counts_wrong_answers_and_faults(answer: Any, wrong: int, faults: int, note: str) -> None:
    tally = await tally_of(ScriptedHttp(accepted(), answer))
    assert (tally.num_wrong, tally.num_faults) == (wrong, faults)
    (message,) = tally.notes
    assert note in message


async def test_a_refused_submission_is_sent_again_after_its_retry_after() -> None:
    http = ScriptedHttp((429, {"retry-after": "1"}, {}))
    tally = await tally_of(http, seconds=0.3)
    assert (tally.num_sent_again, tally.statuses[429], tally.retry_after_s) == (0, 1, {1: 1})
    http = ScriptedHttp((429, {"retry-after": "1"}, {}))
    tally = await tally_of(http, seconds=1.9)
    assert (tally.num_sent_again, tally.num_given_up, tally.num_wrong) == (1, 0, 0)
