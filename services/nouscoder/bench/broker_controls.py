"""Controls of the broker's bench: what Redis and protobuf alone need for the bytes of one rollout."""

from __future__ import annotations

import os
import time

import redis
from google.protobuf.wrappers_pb2 import BytesValue

_KEY = "nouscoder:bench:control"
_CHUNK_BYTES = 512 * 1024


def bare_redis_ms(client: redis.Redis, num_bytes: int, times: int) -> float:
    """Milliseconds of SET, GET, GET, DEL of that many bytes."""
    record = os.urandom(num_bytes)
    begun_s = time.perf_counter()
    for _ in range(times):
        client.set(_KEY, record)
        client.get(_KEY)
        client.get(_KEY)
        client.delete(_KEY)
    return 1000 * (time.perf_counter() - begun_s) / times


def bare_protobuf_cpu_ms(num_bytes: int, times: int) -> float:
    """CPU milliseconds to parse a message with that many bytes, and to write them into messages of a chunk each."""
    message = BytesValue(value=os.urandom(num_bytes)).SerializeToString()
    begun_s = time.process_time()
    for _ in range(times):
        record = BytesValue.FromString(message).value
        for start in range(0, num_bytes, _CHUNK_BYTES):
            BytesValue(value=record[start : start + _CHUNK_BYTES]).SerializeToString()
    return 1000 * (time.process_time() - begun_s) / times
