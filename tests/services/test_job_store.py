"""The folders of jobs: one is removed while others come, and a request that is cancelled leaves nothing in the way."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from nouscoder.config import JobsSection
from nouscoder.verifier.access.caller import Caller
from nouscoder.verifier.jobs.folder import JobConflict, JobFolder, JobOptions, UnknownJob
from nouscoder.verifier.jobs.store import JobStore

CALLER = Caller("ann", "request")


async def added(store: JobStore, job_id: str, text: str = "{}\n") -> JobFolder:
    with store.upload(CALLER, job_id) as upload:
        upload.requests.write_text(text)
        return await store.add(upload, JobOptions(), 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "jobs"


def folders_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


async def test_a_key_is_free_again_when_its_job_has_been_removed_and_not_before(folder: Path) -> None:
    store = JobStore(folder, JobsSection())
    job = await added(store, "a")
    async with job.lock:  # as when a thread works on its files
        removal = asyncio.create_task(store.remove(job))
        while "a" in {one.record.job_id for one in store}:
            await asyncio.sleep(0)
        with pytest.raises(JobConflict, match="is being removed"):
            await added(store, "a")
    await removal
    assert (await added(store, "a")).record.job_id == "a"
    store.close()


async def test_a_removal_goes_on_when_its_request_is_cancelled(folder: Path) -> None:
    store = JobStore(folder, JobsSection())
    job = await added(store, "a")
    async with job.lock:
        removal = asyncio.create_task(store.remove(job))
        while "a" in {one.record.job_id for one in store}:
            await asyncio.sleep(0)
        removal.cancel()
        with pytest.raises(asyncio.CancelledError):
            await removal
    await store.removals()
    assert folders_in(folder) == []
    store.close()
    after = JobStore(folder, JobsSection())
    after.load()
    with pytest.raises(UnknownJob):
        after.job("ann", "a")
    after.close()


async def test_what_a_cancelled_upload_leaves_is_in_nobodys_way(folder: Path) -> None:
    store = JobStore(folder, JobsSection())
    with contextlib.suppress(RuntimeError), store.upload(CALLER, "a") as upload:
        left = upload.path
        raise RuntimeError
    left.mkdir()  # a thread of the cancelled request has written once more
    (left / "job.json").write_text("{}")
    await added(store, "a")
    store.close()
    after = JobStore(folder, JobsSection())
    after.load()
    assert folders_in(folder) == ["a"]
    assert after.job("ann", "a").next_request() == (0, b"{}\n")
    after.close()


async def test_a_job_that_cannot_be_read_keeps_its_folder(folder: Path) -> None:
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "job.json").write_text("broken")
    store = JobStore(folder, JobsSection())
    store.load()
    with pytest.raises(JobConflict, match="cannot be read"):
        await added(store, "a")
    assert (folder / "a" / "job.json").read_text() == "broken"
    assert folders_in(folder) == ["a"]
    store.close()


async def test_a_job_that_is_removed_before_its_request_is_answered_is_counted_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = JobStore(folder, JobsSection())
    loop = asyncio.get_running_loop()

    def flush(_: Path) -> None:  # in a thread, between the job's begin and the answer
        asyncio.run_coroutine_threadsafe(store.remove(store.job("ann", "a")), loop).result(60)

    monkeypatch.setattr("nouscoder.verifier.jobs.store.flush", flush)
    with store.upload(CALLER, "a") as upload:
        upload.requests.write_text("{}\n")
        upload.charge(3)
        await store.add(upload, JobOptions(), 1)
    assert store._bytes["ann"] == 0
    store.close()
