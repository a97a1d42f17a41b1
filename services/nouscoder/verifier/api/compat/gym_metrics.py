"""What NeMo Gym's /aggregate_metrics answers: statistics of the rewards of a whole evaluation.

Reading 90,000 responses takes seconds. A thread that works so long shares the interpreter with the event loop and the
health port, and delays both. So a process with limits of memory and time reads a body above SMALL_BYTES.
"""

from __future__ import annotations

import json
import math
import resource
import statistics
import subprocess
import sys
from collections import defaultdict

from nouscoder.formats.json_values import json_bytes, json_value
from nouscoder.formats.sent_tests import NotTests, fields_of, item_spans
from nouscoder.http_server.body import ENVIRONMENT, SMALL_BYTES
from nouscoder.http_server.freed_memory import LARGE_BYTES

MAX_ROLLOUTS = 100_000
_COUNTED = ("_ng_task_index", "reward")
_MOST_MARKS = 5_000_000  # begins of texts, lists and objects; each takes half a microsecond
_MOST_REWARD = 1e100  # so that a square is finite
_NUMBER_BYTES = 400  # as many digits as a float may have before its point, and more
_MEMORY_BYTES = 1024**3  # beside the body
_CPU_TIME_S = 60
_PATIENCE_S = 300.0
_REFUSED = 3  # the exit code with `field` and `detail` of a fault on stdout


def of_any_size(body: bytes) -> bytes:
    """Like `aggregated`, but a process reads a body above SMALL_BYTES. Raises NotTests, also beyond its limits."""
    if len(body) <= SMALL_BYTES:
        return aggregated(body)
    command = (sys.executable, "-m", __name__, str(_MEMORY_BYTES + 4 * len(body)))
    try:
        done = subprocess.run(command, input=body, stdout=subprocess.PIPE, env=ENVIRONMENT, timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        done = None
    if done is not None and done.returncode == _REFUSED:
        raise NotTests(**json.loads(done.stdout))
    if done is None or done.returncode != 0:
        raise NotTests("body", "cannot be read within the limits of memory and time: send parts")
    return done.stdout


def aggregated(body: bytes) -> bytes:
    """The answer to /aggregate_metrics as JSON. Only the two fields that count are decoded.

    Memory and time are bounded by MAX_ROLLOUTS and _MOST_MARKS. Raises NotTests.
    """
    tasks: dict[int, list[float]] = defaultdict(list)
    pieces = (body[at : at + LARGE_BYTES] for at in range(0, len(body), LARGE_BYTES))
    if sum(piece.count(mark) for piece in pieces for mark in (b"[", b"{", b'"')) > _MOST_MARKS:
        raise NotTests("body", f"holds more than {_MOST_MARKS:,} texts, lists and objects: send fewer fields")
    begin, _ = dict(fields_of(body)).get("verify_responses", (0, 0))
    if body[begin : begin + 1] != b"[":
        raise NotTests("verify_responses", "must be a list")
    for number, span in enumerate(item_spans(body, begin)):
        if number == MAX_ROLLOUTS:
            raise NotTests("verify_responses", f"may hold at most {MAX_ROLLOUTS:,}: send parts")
        reward, task = _counted(body[slice(*span)])
        tasks[task].append(reward)
    groups = (json_bytes({"_ng_task_index": task, **_statistics(rewards)}) for task, rewards in sorted(tasks.items()))
    found = json_bytes(_statistics([reward for rewards in tasks.values() for reward in rewards]) if tasks else {})
    parts = (b'{"group_level_metrics":[', b",".join(groups), b'],"agent_metrics":', found, b',"key_metrics":', found)
    return b"".join((*parts, b"}"))


def _counted(response: bytes) -> tuple[float, int]:
    """Reward and task of a response. Raises NotTests."""
    spans = {name: at for name, at in fields_of(response) if name in _COUNTED}
    try:
        values = {name: json_value(response[at : min(end, at + _NUMBER_BYTES)]) for name, (at, end) in spans.items()}
        reward, task = float(values["reward"]), int(values.get("_ng_task_index", 0))
        if abs(reward) <= _MOST_REWARD:  # not NaN
            return reward, task
    except (KeyError, TypeError, ValueError, OverflowError):
        pass
    why = "each must have a finite number as reward, and a whole one as _ng_task_index"
    raise NotTests("verify_responses", why)


def _statistics(rewards: list[float]) -> dict[str, float]:
    mean = statistics.fmean(rewards)
    squares = math.fsum((reward - mean) ** 2 for reward in rewards)
    deviation = math.sqrt(squares / (len(rewards) - 1)) if len(rewards) > 1 else 0.0
    named = {"mean": mean, "max": max(rewards), "min": min(rewards), "std": deviation}
    return {f"{name}/reward": value for name, value in named.items()}


def main(memory_bytes: int) -> int:
    """Read a body from stdin, and print the answer, or the field at fault with the exit code _REFUSED."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_TIME_S, _CPU_TIME_S))
    try:
        sys.stdout.buffer.write(aggregated(sys.stdin.buffer.read()))
    except NotTests as error:
        sys.stdout.write(json.dumps({"field": error.field, "message": str(error)}))
        return _REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
