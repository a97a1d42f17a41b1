"""Rows of three published layouts, made up for `nouscoder bench import`, and how to read them with bare libraries.

The sizes: 130 kB a row of TACO, most of it lists of numbers in 20 tests; 13 kB a row of SYNTHETIC-1 in 10 tests;
290 kB a row of LiveCodeBench, whose 40 tests have 420 kB when they are unpacked. Rows are joined from texts that were
encoded before, so that making them is faster than reading them.
"""

from __future__ import annotations

import base64
import json
import pickle
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nouscoder.bench.errors import BenchError
from nouscoder.errors import did_you_mean

Pairs = list[tuple[str, str]]  # input and output of each test

_NUM_TEXTS = 400
_QUESTION = "Print the sum of all numbers of the input. " * 40
_SOLUTION = "import sys\n\n\ndef solve(values):\n    return sum(values)\n\n\nprint(solve(map(int, sys.stdin)))\n"


@dataclass(frozen=True, slots=True)
class Layout:
    """`rows` makes JSON lines without end. `text` is the JSON text of the tests of a row, `pairs` reads its value."""

    rows: Callable[[random.Random], Iterator[bytes]]
    text: Callable[[dict[str, Any]], str | bytes]
    pairs: Callable[[Any], Pairs]


def _taco(draw: random.Random) -> Iterator[bytes]:
    texts = [_inside(_inside(_numbers(draw, 5.7))) for _ in range(_NUM_TEXTS)]
    head = _record(question=_QUESTION, solutions=json.dumps([_SOLUTION] * 4), starter_code="", difficulty="EASY")
    number = 0
    while True:
        inputs = [rb"\"%d %d\\n%b\"" % (number, test, draw.choice(texts)) for test in range(20)]
        outputs = [rb"\"%d\\n\"" % draw.randrange(10**9) for _ in inputs]
        tests = rb"{\"inputs\": [%b], \"outputs\": [%b]}" % (b", ".join(inputs), b", ".join(outputs))
        yield b'%b, "input_output": "%b"}\n' % (head, tests)
        number += 1


def _synthetic1(draw: random.Random) -> Iterator[bytes]:
    texts = [_inside(_inside(_numbers(draw, 4.0))) for _ in range(_NUM_TEXTS)]
    head = _record(task_type="verifiable_code", prompt=_QUESTION, gold_standard_solution=f"```python\n{_SOLUTION}```")
    number = 0
    while True:
        cases = [
            rb"{\"type\": \"stdin_stdout\", \"fn_name\": null, \"input\": \"%d\\n%b\", \"output\": \"%d\\n\"}"
            % (number, draw.choice(texts), draw.randrange(10**9))
            for _ in range(10)
        ]
        tests = rb"{\"language\": \"python\", \"test_cases\": [%b]}" % b", ".join(cases)
        yield b'%b, "problem_id": "vcode_%d", "verification_info": "%b"}\n' % (head, number, tests)
        number += 1


def _livecodebench(draw: random.Random) -> Iterator[bytes]:
    texts = [_numbers(draw, 6.5) for _ in range(_NUM_TEXTS // 4)]
    packed = [_packed([(f"{test} {draw.choice(texts)}", f"{test}\n") for test in range(40)]) for _ in range(4)]
    head = _record(question_content=_QUESTION, starter_code="", difficulty="hard", platform="atcoder", metadata="{}")
    number = 0
    while True:
        public = json.dumps(json.dumps([{"input": f"{number}\n", "output": "1\n", "testtype": "stdin"}])).encode()
        yield b'%b, "question_id": "abc_%d", "public_test_cases": %b, "private_test_cases": "%b"}\n' % (
            head,
            number,
            public,
            draw.choice(packed),
        )
        number += 1


def _unpacked(row: dict[str, Any]) -> bytes:
    """The private tests. Their pickle is one long text, so the text is found without reading a pickle."""
    return zlib.decompress(base64.b64decode(row["private_test_cases"]))[_PICKLE_HEAD:-_PICKLE_TAIL]


def _listed(cases: Any) -> Pairs:
    return [(case["input"], case["output"]) for case in cases]


LAYOUTS = {
    "taco": Layout(
        _taco,
        lambda row: row["input_output"],
        lambda tests: list(zip(tests["inputs"], tests["outputs"], strict=True)),
    ),
    "synthetic1": Layout(_synthetic1, lambda row: row["verification_info"], lambda info: _listed(info["test_cases"])),
    "livecodebench": Layout(_livecodebench, _unpacked, _listed),
}


def layouts_named(names: Sequence[str]) -> tuple[str, ...]:
    """These layouts, or all when none is named. Raises BenchError for an unknown name."""
    for name in names:
        if name not in LAYOUTS:
            raise BenchError(f"there is no layout {name!r}{did_you_mean(name, LAYOUTS)} (known: {', '.join(LAYOUTS)})")
    return tuple(names or LAYOUTS)


def rows(layout: str, num_bytes: int, seed: int = 0) -> Iterator[bytes]:
    """The JSON lines of a set of at least so many bytes. Each row has tests of its own."""
    made = 0
    for row in LAYOUTS[layout].rows(random.Random(seed)):
        yield row
        made += len(row)
        if made >= num_bytes:
            return


def _record(**texts: str) -> bytes:
    """The beginning of a row."""
    return json.dumps(texts).encode()[:-1]


def _inside(text: str | bytes) -> bytes:
    """A text as it stands inside a JSON string."""
    return json.dumps(text if isinstance(text, str) else text.decode()).encode()[1:-1]


def _numbers(draw: random.Random, log_length: float) -> str:
    count = round(draw.lognormvariate(log_length, 1.4))
    return "\n".join(str(draw.randrange(10 ** draw.randint(1, 9))) for _ in range(count)) + "\n"


def _packed(pairs: Pairs) -> bytes:
    cases = [{"input": given, "output": wanted, "testtype": "stdin"} for given, wanted in pairs]
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases), protocol=4)))


_SAMPLE = "x" * 100_000
_PICKLE_HEAD = pickle.dumps(_SAMPLE, protocol=4).index(b"x")
_PICKLE_TAIL = len(pickle.dumps(_SAMPLE, protocol=4)) - _PICKLE_HEAD - len(_SAMPLE)
