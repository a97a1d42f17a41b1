"""Running workers never share a name, and a restarted worker has its former name: see rpc/worker_id.py."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from nouscoder.broker.process import serve_broker
from nouscoder.domain.lease import worker_name
from nouscoder.rpc import worker_id
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.worker_id import held_worker_id, observer_id, sole_worker_id

_PROGRAM = """
import sys
from nouscoder.rpc.worker_id import held_worker_id
with held_worker_id("generation", sys.argv[1]) as worker_id:
    print(worker_id, flush=True)
    sys.stdin.read()
"""


@contextmanager
def worker_process(run: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A process that holds a worker id until its stdin closes or it is killed."""
    command = [sys.executable, "-c", _PROGRAM, run]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process
        process.kill()


async def test_two_workers_on_one_host_keep_their_leases_and_a_restarted_one_frees_its_own(
    broker_rig: Any,
) -> None:
    config = broker_rig.config("broker.grpc=127.0.0.1:0")
    run = config.run.name
    broker = broker_rig.broker(config)
    await broker.publish_policy(broker_rig.manifest(0))
    async with AsyncExitStack() as stack:
        address = await serve_broker(broker, config, asyncio.Event(), stack)

        async def connect(worker_id: str) -> BrokerClient:
            return await stack.enter_async_context(BrokerClient(address, worker_id, patience_s=2))

        first = await connect(stack.enter_context(held_worker_id("generation", run)))
        with held_worker_id("generation", run) as second_id:
            second = await connect(second_id)
            leases = [item.lease.lease_id for item in (await first.lease_tasks(4)).tasks]
            others = [item.lease.lease_id for item in (await second.lease_tasks(4)).tasks]
            assert (len(leases), len(others)) == (4, 4)
            assert await first.heartbeat(leases) == {}
            assert await second.heartbeat(others) == {}
        restarted = await connect(stack.enter_context(held_worker_id("generation", run)))
        again = (await restarted.lease_tasks(4)).tasks
        assert [item.lease.delivery for item in again] == [2] * 4, (
            "the leases of the second worker must be free at once"
        )
        assert await first.heartbeat(leases) == {}


def test_processes_get_separate_slots_and_the_next_one_gets_the_name_of_a_killed_one() -> None:
    with worker_process("run") as (first, _), worker_process("run") as (second, process):
        assert worker_name(first) != worker_name(second)
        process.kill()
        process.wait()
        with worker_process("run") as (third, _):
            assert worker_name(third) == worker_name(second)
            assert third != second


def test_runs_and_services_have_separate_slots() -> None:
    with held_worker_id("generation", "a" * 100) as one, held_worker_id("generation", "b" * 100) as two:
        assert worker_name(one) == worker_name(two), "names must be unique only within a run"
        with held_worker_id("verifier", "a" * 100) as three:
            assert worker_name(three).rpartition("-")[2] == "0"


def test_another_network_namespace_gives_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with held_worker_id("generation", "r") as here:
        pass
    monkeypatch.setattr(worker_id, "_NETWORK_NAMESPACE", Path("/proc/self/ns/mnt"))
    with held_worker_id("generation", "r") as there:
        assert worker_name(here) != worker_name(there)


def test_a_name_is_unique_when_the_kernel_does_not_identify_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_id, "_BOOT_ID", Path("/no/such/file"))
    with held_worker_id("generation", "r") as one:
        pass
    with held_worker_id("generation", "r") as two:
        assert worker_name(one) != worker_name(two)


def test_who_holds_every_slot_keeps_no_worker_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Abstract sockets have no owner: another user of the host can hold all of them."""
    monkeypatch.setattr(worker_id, "_MAX_SLOTS", 1)
    held = held_worker_id("generation", "r")
    with held as first, held_worker_id("generation", "r") as one, held_worker_id("generation", "r") as other:
        assert len({worker_name(each) for each in (first, one, other)}) == 3


def test_a_sole_worker_has_the_same_name_everywhere_and_an_observer_has_an_incarnation() -> None:
    first, second = sole_worker_id("learner"), sole_worker_id("learner")
    assert first != second
    assert worker_name(first) == worker_name(second) == "learner"
    assert observer_id("watch") != observer_id("watch")
    assert worker_name("plain") == "plain"
