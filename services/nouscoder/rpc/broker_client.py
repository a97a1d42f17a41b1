"""Client of the broker: takes and returns domain objects.

Each method waits at most `patience_s` seconds for a broker that does not answer, then raises PeerUnreachable. Only
`watch_policy` waits for ever, and some methods make one attempt, as they say. A method raises PeerRefused with the
broker's message when the broker refuses the call, and PeerError for any other failure. Calls are repeated, which is
safe because the broker's transitions are idempotent.

A worker submits rollouts, and pieces of those that are being sampled, in messages of bounded size, because the broker
holds a whole message in memory while it handles it. It reads ranges of records as a stream of pieces, and after an
interruption asks for what is still missing (`RangeReader`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import starmap
from typing import Any, TypeVar

import grpc

from nouscoder.domain.curriculum import CurriculumState
from nouscoder.domain.learner_state import Restored, TrainedState
from nouscoder.domain.lease import (
    LeasedBatch,
    LeasedGrading,
    LeasedGradings,
    LeasedTask,
    LeasedTasks,
    LeaseLoss,
    WorkReport,
)
from nouscoder.domain.partial import EncodedPiece, PartialRollout
from nouscoder.domain.policy import PolicyManifest
from nouscoder.domain.rollout import Rollout
from nouscoder.domain.run_status import DeadLetter, Ledger, RunMode, RunStatus
from nouscoder.domain.stall import Blocker
from nouscoder.domain.verdict import Verdict
from nouscoder.rpc import pairs
from nouscoder.rpc.channel import PeerError, PeerNotFound, PeerUnreachable, ServiceClient, peer_error
from nouscoder.rpc.pairs import HEADER, PIECE, RANGE
from nouscoder.rpc.tls import ChannelTls
from nouscoder.rpc.worker import LeaseKeeper
from nouscoder.store.pieces import decode_pieces, encode_piece
from nouscoder.store.record_layout import RecordError
from nouscoder.store.record_store import ByteRange
from nouscoder.store.rollout_record import decode_text, encode_rollout
from nouscoder.store.tests import UnknownTests
from nouscoder.v1 import broker_pb2, broker_pb2_grpc

log = logging.getLogger(__name__)

PATIENCE_S = 60.0
_CALL_LIMIT_S = 30.0
_PARTIAL_LIMIT_S = 5.0
_PIECE_LIMIT_S = 30.0
_STREAM_ATTEMPTS = 10
_RELEASE_LIMIT_S = 2.0
_READ_CURRICULUM_LIMIT_S = 10.0
_WATCH_AGAIN_S = 0.3
_MESSAGE_BYTES = 2 * 1024**2
_MAX_RANGES = 4096

Item = TypeVar("Item")


def _submitted(lease_id: str, rollout: Rollout) -> broker_pb2.SubmittedRollout:
    header, record = encode_rollout(rollout)
    return broker_pb2.SubmittedRollout(lease_id=lease_id, header=HEADER.encode(header), record=record)


def _piece(lease_id: str, piece: PartialRollout) -> broker_pb2.PartialPiece:
    versions = (piece.oldest_version, piece.newest_version)
    return PIECE.to(EncodedPiece(lease_id, piece.first_token, piece.end_token, *versions, encode_piece(piece)))


def _bounded(items: Iterable[Item], size_of: Callable[[Item], int]) -> Iterator[list[Item]]:
    """The items, cut into messages of at most _MESSAGE_BYTES, or of one item that is larger."""
    message: list[Item] = []
    num_bytes = 0
    for item in items:
        if message and num_bytes + size_of(item) > _MESSAGE_BYTES:
            yield message
            message, num_bytes = [], 0
        message.append(item)
        num_bytes += size_of(item)
    if message:
        yield message


class RangeReader:
    """How far the bytes of some ranges have come. Use: send `next_request`, pass each answer to `take`, then `end`.

    After an interruption, do not call `end`: the next request asks for the rest.
    """

    def __init__(self, ranges: Sequence[ByteRange]) -> None:
        self._ranges = ranges
        self._place = 0  # of the range that is being read
        self._offset = 0  # of the next byte in it
        self._base = 0  # the place of the first range of the last request
        self._num_asked = 0

    @property
    def is_complete(self) -> bool:
        """Nothing is left to read."""
        return self._place == len(self._ranges)

    def next_request(self) -> broker_pb2.StreamRecordsRequest:
        """Asks for what is still missing, at most _MAX_RANGES ranges at once."""
        wanted = self._ranges[self._place : self._place + _MAX_RANGES]
        self._base, self._num_asked = self._place, len(wanted)
        first, *others = wanted
        first = replace(first, offset=first.offset + self._offset, num_bytes=first.num_bytes - self._offset)
        return broker_pb2.StreamRecordsRequest(ranges=map(RANGE.to, (first, *others)))

    def take(self, answer: broker_pb2.StreamRecordsResponse) -> Iterator[tuple[int, bytes]]:
        """The pieces of an answer: (the range's place, bytes)."""
        for piece in answer.pieces:
            place = self._base + piece.range
            if place > self._place:  # the ranges between are of records that are not there, or too short
                self._place, self._offset = place, 0
            yield place, piece.data
            self._offset += len(piece.data)
            if self._offset == self._ranges[place].num_bytes:
                self._place, self._offset = place + 1, 0

    def end(self) -> None:
        """The broker sent everything that it has for the last request."""
        self._place, self._offset = self._base + self._num_asked, 0


class BrokerClient(ServiceClient["broker_pb2_grpc.BrokerServiceAsyncStub"]):
    """Use as `async with BrokerClient(config.broker.grpc, worker_id) as broker:`; worker.py makes the ids."""

    def __init__(
        self,
        address: str,
        worker_id: str,
        patience_s: float = PATIENCE_S,
        credentials: ChannelTls | None = None,
        run: str = "",
        server_name: str = "",
    ) -> None:
        stub = broker_pb2_grpc.BrokerServiceStub
        super().__init__("broker", stub, address, patience_s, credentials, run, server_name)
        self.worker_id = worker_id

    async def lease_tasks(self, max_tasks: int, wait_s: float = 10.0) -> LeasedTasks:
        """Up to `max_tasks` rollouts to sample and what is kept of them, or none after `wait_s` seconds."""
        request = broker_pb2.LeaseTasksRequest(worker_id=self.worker_id, max_tasks=max_tasks, wait_s=wait_s)
        answer = await self._call(lambda: self._stub.LeaseTasks(request, timeout=wait_s + _CALL_LIMIT_S))
        leased = pairs.LEASED_TASKS.of(answer)
        kept = await asyncio.gather(*map(self._kept_tokens, leased.tasks))
        tasks = [replace(item, kept=tokens) for item, tokens in zip(leased.tasks, kept, strict=True)]
        return replace(leased, tasks=tuple(tasks))

    async def keep_partials(self, pieces: Mapping[str, PartialRollout]) -> dict[str, int | None]:
        """Have the broker keep a piece of a rollout for each lease id; a piece from token 0 on replaces what it keeps.

        Returns how many tokens it keeps of each rollout then; None: the lease is lost. Makes one attempt: when
        it fails, some tokens are sampled again.
        """
        kept: dict[str, int | None] = {}
        for items in _bounded(starmap(_piece, pieces.items()), lambda piece: len(piece.data)):
            request = broker_pb2.KeepPartialsRequest(worker_id=self.worker_id, pieces=items)
            call = functools.partial(self._stub.KeepPartials, request, timeout=_PARTIAL_LIMIT_S)
            answer = await self._call(call, patience_s=0.0)
            for item, number in zip(items, answer.num_kept_tokens, strict=True):
                kept[item.lease_id] = number if number >= 0 else None
        return kept

    async def _kept_tokens(self, item: LeasedTask) -> PartialRollout | None:
        """The kept tokens of a leased rollout. When they cannot be read, it is sampled from its start."""
        if not item.num_kept_tokens:
            return None
        request = broker_pb2.ReadPartialRequest(rollout_id=item.task.rollout_id)
        try:
            answer = await self._call(lambda: self._stub.ReadPartial(request, timeout=_PARTIAL_LIMIT_S), patience_s=0.0)
            return decode_pieces(answer.data) if answer.data else None
        except (PeerError, RecordError) as error:
            extra = {"rollout_id": item.task.rollout_id, "reason": str(error)}
            log.warning("a rollout begins again, because its tokens cannot be read", extra=extra)
            return None

    async def submit_rollouts(self, rollouts: Iterable[tuple[str, Rollout]]) -> frozenset[str]:
        """Submit (lease_id, rollout) pairs; returns the rollout ids refused because their lease was lost."""
        refused: frozenset[str] = frozenset()
        for items in _bounded(starmap(_submitted, rollouts), lambda rollout: len(rollout.record)):
            refused |= await self._submit(items)
        return refused

    async def _submit(self, items: list[broker_pb2.SubmittedRollout]) -> frozenset[str]:
        request = broker_pb2.SubmitRolloutsRequest(worker_id=self.worker_id, rollouts=items)
        answer = await self._call(lambda: self._stub.SubmitRollouts(request, timeout=_CALL_LIMIT_S))
        return frozenset(answer.refused_rollout_ids)

    async def lease_grading(self, max_rollouts: int, wait_s: float = 10.0) -> LeasedGradings:
        """Up to `max_rollouts` rollouts to grade with their texts, or none after `wait_s` seconds.

        A rollout whose text cannot be read is left out: its lease expires, and the broker counts the delivery.
        """
        request = broker_pb2.LeaseGradingRequest(worker_id=self.worker_id, max_rollouts=max_rollouts, wait_s=wait_s)
        answer = await self._call(lambda: self._stub.LeaseGrading(request, timeout=wait_s + _CALL_LIMIT_S))
        leased = pairs.LEASED_GRADINGS.of(answer)
        headers = [pairs.HEADER.decode(item.header) for item in leased.gradings]
        ranges = [
            ByteRange(item.record, header.text_offset, header.text_bytes)
            for item, header in zip(leased.gradings, headers, strict=True)
        ]
        sections: list[bytearray] = [bytearray() for _ in ranges]
        async for place, data in self.stream_records(ranges):
            sections[place] += data
        gradings = []
        for item, header, section in zip(leased.gradings, headers, sections, strict=True):
            try:
                text = decode_text(bytes(section))
            except RecordError as error:
                log.error("no text to grade", extra={"rollout_id": header.rollout_id, "reason": str(error)})
                continue
            gradings.append(
                LeasedGrading(item.lease, header.rollout_id, header.problem_id, text, item.tests_digest, item.rules)
            )
        return LeasedGradings(tuple(gradings), leased.run_finished)

    async def stream_records(self, ranges: Sequence[ByteRange]) -> AsyncIterator[tuple[int, bytes]]:
        """The bytes of the ranges, in order, in pieces: (the range's place, bytes).

        After an interruption it continues. If a record is missing or too short, its range has fewer bytes.
        """
        reader = RangeReader(ranges)
        attempts = 0
        while not reader.is_complete:
            request = reader.next_request()
            try:
                async for answer in self._stream(self._stub.StreamRecords(request), _PIECE_LIMIT_S):
                    attempts = 0
                    for place, data in reader.take(answer):
                        yield place, data
                reader.end()
            except PeerUnreachable:
                attempts += 1
                if attempts == _STREAM_ATTEMPTS:
                    raise
                await self.status()  # waits until the broker answers

    async def fetch(self, digest: str) -> AsyncIterator[bytes]:
        """A file of tests in pieces, as store.tests.TestsSource. Raises UnknownTests and PeerError.

        Waits for the broker until the first piece comes. If the broker fails after that, fetch again.
        """
        request = broker_pb2.FetchTestsRequest(tests_digest=digest)

        async def begin() -> tuple[AsyncGenerator[Any, None], Any]:
            answers = self._stream(self._stub.FetchTests(request), _CALL_LIMIT_S)
            return answers, await anext(answers, None)

        try:
            answers, first = await self._call(begin)
        except PeerNotFound as error:
            raise UnknownTests(str(error)) from error
        async with aclosing(answers):
            if first is not None:
                yield first.data
            async for answer in answers:
                yield answer.data

    async def submit_verdicts(self, verdicts: Iterable[tuple[str, str, Verdict]]) -> frozenset[str]:
        """Submit (lease_id, rollout_id, verdict); returns the rollout ids refused because their lease was lost."""
        items = [
            broker_pb2.SubmittedVerdict(lease_id=lease_id, rollout_id=rollout_id, verdict=pairs.VERDICT.to(verdict))
            for lease_id, rollout_id, verdict in verdicts
        ]
        request = broker_pb2.SubmitVerdictsRequest(worker_id=self.worker_id, verdicts=items)
        answer = await self._call(lambda: self._stub.SubmitVerdicts(request, timeout=_CALL_LIMIT_S))
        return frozenset(answer.refused_rollout_ids)

    async def lease_batch(self, wait_s: float = 10.0, run_id: str = "", batches: int = 0) -> LeasedBatch:
        """The next batch, or the same as before when it has not been committed.

        Raises PeerBehind when the broker has another run or another number of committed batches (not compared if
        `run_id` is empty).
        """
        request = broker_pb2.LeaseBatchRequest(worker_id=self.worker_id, wait_s=wait_s, run_id=run_id, batches=batches)
        answer = await self._call(lambda: self._stub.LeaseBatch(request, timeout=wait_s + _CALL_LIMIT_S))
        leased = pairs.LEASED_BATCH.of(answer)
        index = answer.batch.SerializeToString()
        return replace(leased, batch=None if leased.batch is None else replace(leased.batch, index=index))

    async def restore_run(self, trained: TrainedState) -> Restored:
        """Have the broker restore what Redis forgot of the learner's state. PeerRefused: another run."""
        request = pairs.TRAINED_STATE.to(trained)
        return pairs.RESTORED.of(await self._call(lambda: self._stub.RestoreRun(request, timeout=_CALL_LIMIT_S)))

    async def read_curriculum(self) -> tuple[str, CurriculumState]:
        """The name of the run, and its curriculum's cursor and statistics. Makes one attempt."""
        request = broker_pb2.ReadCurriculumRequest()
        answer = await self._call(
            lambda: self._stub.ReadCurriculum(request, timeout=_READ_CURRICULUM_LIMIT_S), patience_s=0.0
        )
        return answer.run, pairs.CURRICULUM.of(answer.curriculum)

    async def commit_batch(self, batch_id: int, step: int, groups: Iterable[int] = ()) -> bool:
        """The batch was trained on, up to `step` of the run, and is on the disk. True: it was committed before.

        Raises PeerBehind when the broker does not have the batch of these groups.
        """
        request = broker_pb2.CommitBatchRequest(batch_id=batch_id, step=step, groups=groups)
        answer = await self._call(lambda: self._stub.CommitBatch(request, timeout=_CALL_LIMIT_S))
        return answer.already_committed

    async def publish_policy(self, manifest: PolicyManifest) -> int:
        """Announce a policy: the newest version + 1, or the newest again. Returns the newest version.

        Raises PeerRefused for an older version or other weights, and PeerBehind when the broker lacks the version
        before it.
        """
        request = broker_pb2.PublishPolicyRequest(manifest=pairs.MANIFEST.to(manifest))
        answer = await self._call(lambda: self._stub.PublishPolicy(request, timeout=_CALL_LIMIT_S))
        return answer.policy_version

    async def watch_policy(self) -> AsyncIterator[PolicyManifest]:
        """The newest policy, then each newer one. Runs for ever, and connects again after each failure."""
        known = -1
        while True:
            request = broker_pb2.WatchPolicyRequest(worker_id=self.worker_id)
            try:
                async for answer in self._stub.WatchPolicy(request):
                    manifest = pairs.MANIFEST.of(answer.manifest)
                    if manifest.policy_version > known:
                        known = manifest.policy_version
                        yield manifest
            except grpc.aio.AioRpcError as error:
                trouble = peer_error(self.name, error)
                if not isinstance(trouble, PeerUnreachable):
                    raise trouble from error
            await asyncio.sleep(_WATCH_AGAIN_S)

    async def heartbeat(self, lease_ids: Sequence[str], report: WorkReport | None = None) -> dict[str, LeaseLoss]:
        """Extend leases; returns the lost ones, each with the reason. `report` says how far the work on them is.

        Makes one attempt.
        """
        request = broker_pb2.HeartbeatRequest(worker_id=self.worker_id, lease_ids=lease_ids)
        if report is not None:
            request.paused = report.paused
            request.progress.extend(report.progress.get(lease_id, 0) for lease_id in lease_ids)
            request.oldest_versions.extend(report.oldest_versions.get(lease_id, -1) for lease_id in lease_ids)
        answer = await self._call(lambda: self._stub.Heartbeat(request, timeout=_CALL_LIMIT_S), patience_s=0.0)
        return dict(zip(answer.lost_lease_ids, map(LeaseLoss, answer.reasons), strict=True))

    def keep_leases(self, report: Callable[[], WorkReport] | None = None) -> LeaseKeeper:
        """A keeper of leases: `async with broker.keep_leases() as keeper: keeper.add(lease) ...`.

        It calls `report` at each heartbeat to learn how far the work on the leases is.
        """
        return LeaseKeeper(self.heartbeat, report)

    async def release_leases(
        self, lease_ids: Iterable[str] = (), refused: str = "", *, abandoned: bool = False
    ) -> None:
        """Give back these leases; none: all, because this worker stops. Makes one attempt.

        `refused` says why no worker can make a rollout of their problems, which are not asked again then. `abandoned`:
        agents have abandoned these rollouts, which are given up.
        """
        request = broker_pb2.ReleaseLeasesRequest(
            worker_id=self.worker_id, lease_ids=lease_ids, refused=refused, abandoned=abandoned
        )
        await self._call(lambda: self._stub.ReleaseLeases(request, timeout=_RELEASE_LIMIT_S), patience_s=0.0)

    async def report_batch_failure(self, batch_id: int, reason: str) -> bool:
        """Report that a batch could not be trained on. True: it is held back until an operator drops it."""
        request = broker_pb2.ReportBatchFailureRequest(batch_id=batch_id, reason=reason)
        answer = await self._call(lambda: self._stub.ReportBatchFailure(request, timeout=_CALL_LIMIT_S))
        return answer.held_back

    async def drop_batch(self, batch_id: int) -> int:
        """Abandon the rollouts of the uncommitted batch; returns how many."""
        request = broker_pb2.DropBatchRequest(batch_id=batch_id)
        answer = await self._call(lambda: self._stub.DropBatch(request, timeout=_CALL_LIMIT_S))
        return answer.dropped_rollouts

    async def set_mode(self, mode: RunMode) -> RunMode:
        """Run, drain or pause the run; returns the mode before."""
        request = broker_pb2.SetRunModeRequest(mode=pairs.MODE.of_member[mode])
        answer = await self._call(lambda: self._stub.SetRunMode(request, timeout=_CALL_LIMIT_S))
        return pairs.MODE[answer.former]

    async def dead_letters(self, max_letters: int = 0) -> list[DeadLetter]:
        """At most `max_letters` rollouts that were given up, newest first; 0: all that are kept."""
        request = broker_pb2.ListDeadLettersRequest(max_letters=max_letters)
        answer = await self._call(lambda: self._stub.ListDeadLetters(request, timeout=_CALL_LIMIT_S))
        return [pairs.DEAD_LETTER.of(letter) for letter in answer.letters]

    async def remove_dead_letters(self, letter_ids: Iterable[str], *, requeue: bool) -> tuple[int, list[str]]:
        """Remove dead letters; returns how many there were, and the problems that are asked again."""
        request = broker_pb2.RemoveDeadLettersRequest(letter_ids=letter_ids, requeue=requeue)
        answer = await self._call(lambda: self._stub.RemoveDeadLetters(request, timeout=_CALL_LIMIT_S))
        return answer.removed, list(answer.requeued_problem_ids)

    async def finish_run(self, reason: str) -> Ledger:
        """End the run; returns the last state of the ledger."""
        request = broker_pb2.FinishRunRequest(reason=reason)
        answer = await self._call(lambda: self._stub.FinishRun(request, timeout=_CALL_LIMIT_S))
        return pairs.LEDGER.of(answer.ledger)

    async def continue_run(self) -> bool:
        """Go on with a run that has ended. False: it has not ended."""
        request = broker_pb2.ContinueRunRequest()
        answer = await self._call(lambda: self._stub.ContinueRun(request, timeout=_CALL_LIMIT_S))
        return answer.had_ended

    async def serve_stage(self, run: str) -> None:
        """Have the broker of a plan serve the stage with this run; at once when it does already."""
        request = broker_pb2.ServeStageRequest(run_name=run)
        await self._call(lambda: self._stub.ServeStage(request, timeout=_CALL_LIMIT_S))

    async def status(self) -> RunStatus:
        """The run at one instant."""
        answer = await self._call(lambda: self._stub.Status(broker_pb2.StatusRequest(), timeout=_CALL_LIMIT_S))
        return pairs.STATUS.of(answer)

    async def why_stalled(self) -> tuple[Blocker, ...]:
        """What blocks the next batch, in the order of domain/stall.py; empty when nothing does."""
        answer = await self._call(lambda: self._stub.WhyStalled(broker_pb2.WhyStalledRequest(), timeout=_CALL_LIMIT_S))
        return tuple(map(pairs.BLOCKER.of, answer.blockers))
