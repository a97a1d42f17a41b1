"""The part of the broker's client that keeps and reads the tokens of rollouts that are being sampled."""

from __future__ import annotations

import functools
import logging
from abc import ABC
from collections.abc import Mapping

from nouscoder.domain.lease import LeasedTask
from nouscoder.domain.partial import PartialRollout
from nouscoder.rpc.channel import PeerError, ServiceClient
from nouscoder.rpc.record_transfer import partial_messages
from nouscoder.store.partial_record import decode_pieces
from nouscoder.store.record_sections import RecordError
from nouscoder.v1 import broker_pb2, broker_pb2_grpc

log = logging.getLogger(__name__)

_CALL_LIMIT_S = 5.0


class PartialClient(ServiceClient, ABC):
    """A base of BrokerClient. Each call is one attempt: when it fails, some tokens are sampled again."""

    worker_id: str
    _stub: broker_pb2_grpc.BrokerServiceAsyncStub

    async def keep_partials(self, pieces: Mapping[str, PartialRollout]) -> dict[str, int | None]:
        """Have the broker keep a piece of a rollout for each lease id; a piece from token 0 on replaces what it keeps.

        Returns how many tokens it keeps of each rollout then; None: the lease is lost.
        """
        kept: dict[str, int | None] = {}
        for items in partial_messages(pieces):
            request = broker_pb2.KeepPartialsRequest(worker_id=self.worker_id, pieces=items)
            call = functools.partial(self._stub.KeepPartials, request, timeout=_CALL_LIMIT_S)
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
            answer = await self._call(lambda: self._stub.ReadPartial(request, timeout=_CALL_LIMIT_S), patience_s=0.0)
            return decode_pieces(answer.data) if answer.data else None
        except (PeerError, RecordError) as error:
            extra = {"rollout_id": item.task.rollout_id, "reason": str(error)}
            log.warning("a rollout begins again, because its tokens cannot be read", extra=extra)
            return None
