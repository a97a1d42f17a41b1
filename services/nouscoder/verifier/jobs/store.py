"""All jobs of the service, in one folder.

INVARIANT: the jobs of one client and of all clients stay within the bounds of `verifier.jobs`, in number, in
submissions that are left, and in bytes. A client can neither use nor see the job of another client. An upload has a
folder of its own, which gets the job's name when it is whole; what is left of others is removed at the next start. A
removal that has begun ends, whatever becomes of its request, and its job's id is not used before.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nouscoder.atomic_files import flush, lock_file, naming_storage_faults, write_whole
from nouscoder.config import JobsSection
from nouscoder.private_folder import PRIVATE, refuse_foreign
from nouscoder.verifier.access.caller import Caller
from nouscoder.verifier.jobs.folder import (
    RECORD,
    REQUESTS,
    JobBroken,
    JobConflict,
    JobEnd,
    JobFolder,
    JobOptions,
    JobRecord,
    JobsFull,
    JobState,
    UnknownJob,
    UploadsFull,
)

log = logging.getLogger(__name__)

_CLIENT_UPLOADS = 2
_UPLOADS = 8
_UPLOAD = ".upload-"  # in the name of its folder
_REMOVAL_PATIENCE_S = 10.0


class Upload:
    """A job that is being received. `charge` counts each byte that it takes on the disk."""

    def __init__(self, store: JobStore, path: Path, job_id: str, caller: Caller) -> None:
        self.path = path
        self.job_id = job_id
        self.caller = caller
        self.num_bytes = 0
        self.is_added = False
        self._store = store

    @property
    def requests(self) -> Path:
        """The file of its submissions."""
        return self.path / REQUESTS

    def charge(self, num_bytes: int) -> None:
        """Count bytes; less than 0 frees them. Raises JobsFull."""
        self._store.charge(self.caller.client, num_bytes)
        self.num_bytes += num_bytes


class JobStore:
    """The jobs in `folder`, which this process locks. `clock` returns seconds since 1970."""

    def __init__(self, folder: Path, bounds: JobsSection, clock: Callable[[], float] = time.time) -> None:
        """Raises FolderInUse, StorageError and NotPrivate. Call `load` before anything else."""
        self.bounds = bounds
        self.clock = clock
        self._folder = folder
        self._jobs: dict[str, JobFolder] = {}
        self._uploads: dict[str, str] = {}  # client by job id
        self._bytes: Counter[str] = Counter()
        self._adding = asyncio.Lock()
        self._removals: dict[str, asyncio.Task[None]] = {}
        self._unreadable: set[str] = set()
        with naming_storage_faults(folder):
            folder.mkdir(parents=True, exist_ok=True, mode=PRIVATE)
        refuse_foreign(folder)
        self._lock = lock_file(folder / "lock", f"another service uses the jobs in {folder}: give each its own folder")

    def load(self) -> None:
        """Read all jobs. Blocks. A job that cannot be read is left alone and logged."""
        for path in sorted(self._folder.iterdir()):
            if not path.is_dir():
                continue
            if _UPLOAD in path.name or not (path / RECORD).exists():
                shutil.rmtree(path, ignore_errors=True)
                continue
            try:
                job = JobFolder.opened(path)
            except JobBroken as error:
                log.error("a job cannot be read", extra={"detail": str(error)})
                self._unreadable.add(path.name)
                continue
            self._jobs[job.record.job_id] = job
            self._bytes[job.record.client] += job.num_bytes

    def close(self) -> None:
        """Close all files."""
        for job in self._jobs.values():
            job.close()
        self._lock.close()

    def __iter__(self) -> Iterator[JobFolder]:
        return iter([*self._jobs.values()])

    def job(self, client: str, job_id: str) -> JobFolder:
        """A job of this client. Raises UnknownJob, also for a job of another client."""
        job = self._jobs.get(job_id)
        if job is None or job.record.client != client:
            raise UnknownJob(f"there is no job {job_id:.80}, or it was removed")
        return job

    def jobs_of(self, client: str) -> list[JobFolder]:
        """The client's jobs, the newest first."""
        own = [job for job in self._jobs.values() if job.record.client == client]
        return sorted(own, key=lambda job: -job.record.created_s)

    def job_id(self, caller: Caller, idempotency_key: str | None) -> str:
        """The id of a new job: that of the client's key, else a new one."""
        if idempotency_key is None:
            return secrets.token_hex(16)
        text = f"{caller.client}\0{idempotency_key}"
        return hashlib.sha256(text.encode("utf8", "surrogatepass")).hexdigest()[:32]

    @contextmanager
    def upload(self, caller: Caller, job_id: str) -> Iterator[Upload]:
        """A place for a new job. It is removed unless `add` was called. Raises JobsFull, JobConflict, StorageError."""
        self._admit(caller.client, job_id)
        path = self._folder / f"{job_id}{_UPLOAD}{secrets.token_hex(4)}"
        upload = Upload(self, path, job_id, caller)
        self._uploads[job_id] = caller.client
        try:
            with naming_storage_faults(path):
                path.mkdir(mode=0o700)
            yield upload
        finally:
            del self._uploads[job_id]
            if not upload.is_added:
                shutil.rmtree(path, ignore_errors=True)
                self._bytes[caller.client] -= upload.num_bytes

    def _admit(self, client: str, job_id: str) -> None:
        if job_id in self._uploads:
            raise JobConflict("a job with this Idempotency-Key is being received")
        if job_id in self._removals:
            raise JobConflict("the job with this Idempotency-Key is being removed; retry")
        if job_id in self._unreadable:
            raise JobConflict("the job with this Idempotency-Key cannot be read; use another key")
        own = sum(owner == client for owner in self._uploads.values())
        if own >= _CLIENT_UPLOADS or len(self._uploads) >= _UPLOADS:
            raise UploadsFull(5, "too many jobs are being received; retry")
        if own + len(self.jobs_of(client)) >= self.bounds.client_jobs:
            raise JobsFull(f"the client has {self.bounds.client_jobs} jobs, the most that are kept; delete one")

    async def add(self, upload: Upload, options: JobOptions, total: int) -> JobFolder:
        """Make a job of a whole upload. Raises JobsFull and StorageError."""
        async with self._adding:  # one at a time, because the bounds apply to sums
            own = sum(job.num_left for job in self._jobs.values() if job.record.client == upload.caller.client)
            if own + total > self.bounds.client_submissions:
                raise JobsFull(
                    f"{total} submissions and {own} of the client's unfinished jobs are more than"
                    f" {self.bounds.client_submissions}"
                )
            if total + sum(job.num_left for job in self._jobs.values()) > self.bounds.submissions:
                raise JobsFull(f"the unfinished jobs would have more than {self.bounds.submissions} submissions")
            await asyncio.to_thread(self._write_record, upload, options, total)
            # Nothing is awaited here: the job is in its folder and in `_jobs`, or in neither.
            job = self._jobs[upload.job_id] = self._named(upload)
            upload.is_added = True
        with naming_storage_faults(self._folder):
            await asyncio.to_thread(flush, self._folder)
        return job

    def _write_record(self, upload: Upload, options: JobOptions, total: int) -> None:
        quota = upload.caller.quota
        record = JobRecord(
            job_id=upload.job_id,
            client=upload.caller.client,
            max_in_flight=quota.max_in_flight,
            submissions_per_minute=quota.submissions_per_minute,
            options=options,
            created_s=self.clock(),
            total=total,
        )
        write_whole(upload.path / RECORD, record.model_dump_json().encode())

    def _named(self, upload: Upload) -> JobFolder:
        """The job of a whole upload, whose folder gets the job's name. Raises StorageError."""
        path = self._folder / upload.job_id
        with naming_storage_faults(path):
            shutil.rmtree(path, ignore_errors=True)  # the rest of a removal that failed
            upload.path.rename(path)
        try:
            return JobFolder.opened(path)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise

    def charge(self, client: str, num_bytes: int) -> None:
        """Count bytes of the client's jobs. Raises JobsFull when they are too many."""
        if num_bytes > 0 and self._bytes[client] + num_bytes > self.bounds.client_bytes:
            raise JobsFull(f"the client's jobs would take more than {self.bounds.client_bytes} bytes; delete one")
        if num_bytes > 0 and self._bytes.total() + num_bytes > self.bounds.store_bytes:
            raise JobsFull(f"all jobs together would take more than {self.bounds.store_bytes} bytes")
        self._bytes[client] += num_bytes

    async def end(self, job: JobFolder, state: JobState, detail: str = "") -> None:
        """End a job, unless it has ended. Cancels what is graded of it. Raises StorageError."""
        job.cancel()
        async with job.lock:
            if job.ended is not None or job.is_removed:
                return
            before = job.num_bytes
            await asyncio.to_thread(job.end, JobEnd(state=state, ended_s=self.clock(), detail=detail))
            self._bytes[job.record.client] -= before - job.num_bytes
        job.notify()

    async def remove(self, job: JobFolder) -> None:
        """Remove a job with its results, also when this call is cancelled. Cancels what is graded of it."""
        job.cancel()
        job_id = job.record.job_id
        if self._jobs.pop(job_id, None) is None:
            return
        removal = self._removals[job_id] = asyncio.create_task(self._remove(job))
        removal.add_done_callback(lambda _: self._removals.pop(job_id))
        await asyncio.shield(removal)

    async def _remove(self, job: JobFolder) -> None:
        async with job.lock:
            self._bytes[job.record.client] -= job.num_bytes
            job.is_removed = True
            await asyncio.to_thread(job.remove)
        job.notify()

    async def removals(self, job_id: str | None = None) -> None:
        """Wait for the removal of this job, else for all that have begun, for _REMOVAL_PATIENCE_S at most."""
        ending = {task for name, task in self._removals.items() if job_id in (None, name)}
        if ending:
            await asyncio.wait(ending, timeout=_REMOVAL_PATIENCE_S)
