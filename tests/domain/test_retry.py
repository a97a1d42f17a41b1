"""Every retry has a bound, stops at it, repeats only after the errors that its policy names, and is logged."""

from __future__ import annotations

import asyncio
import logging

import pytest

from nouscoder.retry import Retry


class Away(Exception):
    """Represents an unreachable peer."""


class Broken(Exception):
    """Represents a permanent error."""


class Work:
    """Raises the scripted errors, one per try, then returns the number of tries."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.num_tries = 0

    async def __call__(self) -> int:
        self.num_tries += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.num_tries


async def test_work_is_repeated_until_it_answers() -> None:
    assert await Retry("work", (Away,), max_tries=5, wait_s=0.001).call(Work(Away(), Away())) == 3


async def test_the_last_error_is_raised_after_the_maximum_of_tries() -> None:
    work = Work(*(Away(str(number)) for number in range(9)))
    with pytest.raises(Away, match="2"):
        await Retry("work", (Away,), max_tries=3, wait_s=0.001).call(work)
    assert work.num_tries == 3


async def test_a_time_limit_of_0_allows_one_try() -> None:
    work = Work(Away())
    with pytest.raises(Away):
        await Retry("work", (Away,), for_s=0.0).call(work)
    assert work.num_tries == 1


async def test_the_time_limit_is_enforced() -> None:
    work = Work(*(Away() for _ in range(10_000)))
    async with asyncio.timeout(60):
        with pytest.raises(Away):
            await Retry("work", (Away,), for_s=0.05, wait_s=0.001, max_wait_s=0.01).call(work)
    assert work.num_tries < 10_000


@pytest.mark.parametrize("retry", [Retry("work", (Away,), max_tries=5), Retry("work", (Away, Broken), for_s=60)])
async def test_an_error_that_the_policy_does_not_name_is_raised_at_once(retry: Retry) -> None:
    work = Work(Broken())
    policy = Retry(retry.name, retry.on, retry.for_s, retry.max_tries, is_passing=lambda error: isinstance(error, Away))
    with pytest.raises(Broken):
        await policy.call(work)
    assert work.num_tries == 1


def test_a_policy_without_a_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="the retry of work has no bound"):
        Retry("work", (Away,))


async def test_a_lasting_failure_is_logged_at_its_beginning_and_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    policy = Retry("asking", (Away,), max_tries=9, wait_s=0.001, log_after_s=0.0)
    await policy.call(Work(Away("gone"), Away("gone"), Away("gone")))
    assert [record.getMessage() for record in caplog.records] == ["trying again", "succeeded again"]
    first = vars(caplog.records[0])
    assert (first["what"], first["max_tries"], first["reason"]) == ("asking", 9, "gone")


async def test_a_failure_that_goes_on_is_logged_again_with_the_time_that_is_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = Retry("asking", (Away,), for_s=600.0, max_tries=3, wait_s=0.001, log_after_s=0.0, log_every_s=0.0)
    with pytest.raises(Away, match="3"):
        await policy.call(Work(Away("1"), Away("2"), Away("3")))
    assert [(vars(each)["reason"], vars(each)["left_s"]) for each in caplog.records] == [("1", 600), ("2", 600)]


async def test_each_error_is_reported_before_the_next_try() -> None:
    heard: list[str] = []
    with pytest.raises(Away, match="3"):
        await Retry("asking", (Away,), max_tries=3, wait_s=0.001).call(
            Work(Away("1"), Away("2"), Away("3")), lambda error: heard.append(str(error))
        )
    assert heard == ["1", "2"]


async def test_a_short_failure_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await Retry("asking", (Away,), max_tries=9, wait_s=0.001).call(Work(Away()))
    assert caplog.records == []
