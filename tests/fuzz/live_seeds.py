"""Valid requests of every kind, and their mutations, for test_fuzz_live.py."""

from __future__ import annotations

import json
import random
from typing import Any

from nouscoder.v1 import verdict_pb2, verifier_pb2

MAX_BYTES = 1 << 20
LIMITS = {"wall_time_s": 0.5, "cpu_time_s": 0.5, "memory_bytes": 1 << 27}
CASES = {"type": "stdin", "cases": [{"input": "1 2\n", "output": "3\n", "args": ["a"]}]}
GRADE = {"code": "print(sum(map(int, input().split())))", "tests": CASES, "limits": LIMITS, "reveal": "all"}
CALL = {"type": "call", "entry_point": "f", "cases": [{"args": [[1, 2.5, None]], "kwargs": {}, "expected": {"a": 1}}]}
JUDGE = {"language": "python", "code": "import sys; sys.exit(0)"}
GYM = {
    "responses_create_params": {"input": "x"},
    "response": {"output": [{"type": "message", "content": [{"type": "output_text", "text": "```\nprint(3)\n```"}]}]},
    "verifier_metadata": {"unit_tests": {"inputs": ["1 2\n"], "outputs": ["3\n"], "fn_name": None}},
}
WORDS = [
    b"null",
    b"[]",
    b"{}",
    b"NaN",
    b"1e999",
    b"-1",
    b"\x00",
    b"\xff",
    b"\xed\xa0\x80",
    b'"\\ud800"',
    b"[" * 999,
    b"9" * 400,
]
WORDS += [
    b'"type": "math"',
    b'"profile": "lcb"',
    b'"digest": "sha256:0"',
    b'"problem_id": "p"',
    b'"language": "c"',
    b"\r\n",
]
# Items of which a body can hold very many.
ITEMS = (b"1,", b"[],", b'"",', b"{},", b'{"a":1},', b'{"input":"","output":""},', b'{"args":[[]],"expected":0},')
CROWDED_BYTES = 4 << 20


def bodies() -> dict[str, list[bytes]]:
    """Valid bodies by path."""
    made: dict[str, list[Any]] = {
        "/v1/grade": [
            GRADE,
            {**GRADE, "code": "def f(x): return {'a': 1}", "tests": CALL},
            {**GRADE, "tests": {**CASES, "type": "checker", "checker": JUDGE}},
            {**GRADE, "tests": {**CASES, "type": "interactive", "interactor": JUDGE}},
            {**GRADE, "tests": {"type": "assert", "cases": ["assert f(1) == 2"], "setup": "x = 1"}},
            {
                **GRADE,
                "tests": {"type": "pytest", "file": "from solution import f\ndef test_f():\n    assert f(1) == 2\n"},
            },
            {**GRADE, "tests": {"inputs": ["1"], "outputs": ["1"], "fn_name": None}},
            {
                **GRADE,
                "profile": "lcb",
                "files": {"a.py": "x = 1"},
                "comparator": {"kind": "tokens", "float_tolerance": 0.1},
            },
            {"completion": "```python\nprint(3)\n```", "tests": CASES, "limits": LIMITS, "prelude": "lcb"},
        ],
        "/run_code": [
            {"code": "print(1)", "language": "python", "run_timeout": 1, "stdin": "x", "files": {"a": "eA=="}}
        ],
        "/get_reward": [{"query": ["p```python\nprint(3)\n```"], "prompts": ["p"], "labels": [{"tests": CASES}]}],
        "/verify": [GYM],
        "/seed_session": [GYM],
        "/aggregate_metrics": [{"verify_responses": [{"_ng_task_index": 0, "reward": 1.0, "more": [1, "x"]}]}],
        "/submit": [
            {
                "dataset": "d",
                "id": 1,
                "completion": "```python\nprint(3)\n```",
                "config": {
                    "language": "python",
                    "run_timeout": 1,
                    "provided_data": {"test": [{"input": {"stdin": "1 2"}, "output": {"stdout": "3"}}]},
                },
            }
        ],
        "/v1/tests": [CASES, CALL],
    }
    found = {path: [json.dumps(one).encode() for one in some] for path, some in made.items()}
    lines = b"\n".join(found["/v1/grade"])
    found |= {"/v1/grade/stream": found["/v1/grade"], "/v1/grade/batch": [lines], "/v1/jobs": [lines]}
    return found


BODIES = bodies()
QUERIES = (
    "",
    "?priority=5",
    "?priority=x",
    "?webhook=http://169.254.169.254/",
    "?tests=true",
    "?offset=-1",
    "?wait_s=1e9",
    "?a=%00",
)


def mutated(data: bytes, draw: random.Random) -> bytes:
    """`data` after a few random changes; sometimes as it is."""
    made = bytearray(data)
    if draw.random() < 0.05:
        return crowded(data, draw)
    for _ in range(draw.choice((0, 1, 1, 2, 4, 16))):
        at = draw.randrange(len(made) + 1)
        match draw.randrange(6):
            case 0:
                made[at : at + draw.randrange(1, 9)] = b""
            case 1:
                made[at:at] = draw.choice(WORDS)
            case 2:
                made[at : at + 1] = bytes([draw.randrange(256)])
            case 3:
                end = min(len(made), at + draw.randrange(1, 200))
                made[at:at] = made[at:end] * draw.choice((1, 1, 3, 50))
            case 4:
                made[at : at + draw.randrange(1, 5)] = draw.choice(WORDS)
            case _:
                made = made[:at] if draw.random() < 0.2 else made
    return bytes(made[:MAX_BYTES])


def crowded(data: bytes, draw: random.Random) -> bytes:
    """`data` with very many items in one of its lists, or very many fields in one of its objects."""
    opens = [at for at, byte in enumerate(data) if byte in b"[{"]
    at = draw.choice(opens) + 1 if opens else 0
    num_bytes = draw.choice((20_000, 200_000, CROWDED_BYTES))
    if data[at - 1 : at] == b"{":
        items = b"".join(b'"%d":1,' % number for number in range(num_bytes // 10))
    else:
        item = draw.choice(ITEMS)
        items = item * (num_bytes // len(item))
    return data[:at] + items + data[at:]


def _messages() -> list[bytes]:
    tests = verdict_pb2.Tests(stdin=verdict_pb2.StdinTests(cases=[verdict_pb2.StdinCase(input="1", output="1")]))
    call = verdict_pb2.Tests(
        call=verdict_pb2.CallTests(
            entry_point="f", cases=[verdict_pb2.CallCase(args_json="[1]", kwargs_json="{}", expected_json="1")]
        )
    )
    limits = verdict_pb2.Limits(wall_time_s=0.5, cpu_time_s=0.5, memory_bytes=1 << 27)
    made = [verdict_pb2.Submission(code="print(input())", tests=one, limits=limits) for one in (tests, call)]
    return [verifier_pb2.GradeRequest(submission=one).SerializeToString() for one in made] + [b""]


MESSAGES = _messages()
CELLS = [
    verifier_pb2.InterpretRequest(code=code).SerializeToString() for code in ("1 + 1", "import os; os._exit(0)", "")
]


def heavy_body(draw: random.Random) -> bytes:
    """A valid request with about as many values as one may have: of one call, or of four."""
    item, most = draw.choice((("7", 490_000), ("[]", 245_000), ("0.5", 490_000), ('{"a":1}', 40_000)))
    num_cases = draw.choice((1, 1, 4))
    values = f"[{','.join([item] * (most // num_cases))}]"
    case = draw.choice((f'{{"args":[{values}],"expected":0}}', f'{{"args":[0],"expected":{values}}}'))
    tests = f'{{"type":"call","entry_point":"f","cases":[{",".join([case] * num_cases)}]}}'
    profile, last = draw.choice(("process", "process", "lcb")), draw.choice(("x", "0", "[x] * 9"))
    return f'{{"code":"def f(x): return {last}","profile":"{profile}","tests":{tests}}}'.encode()


def heavy_tests(draw: random.Random) -> bytes:
    """Tests for PUT /v1/tests with more values or bytes than a body may have."""
    tests = json.loads(heavy_body(draw))["tests"]
    return json.dumps(tests | {"cases": tests["cases"] * 8} if draw.random() < 0.8 else "1," * 5_000_000).encode()


def heavy_message(draw: random.Random) -> bytes:
    """A valid message with very many values, or with more cases than it may have, or with a long text."""
    tests = verdict_pb2.Tests()
    match draw.randrange(3):
        case 0:
            tests.json = json.dumps(json.loads(heavy_body(draw))["tests"]).encode()
        case 1:
            tests.stdin.cases.extend([verdict_pb2.StdinCase(input="1", output="1")] * draw.choice((12_000, 300_000)))
        case _:
            tests.stdin.cases.add(input="1 " * 8_000_000, output="1")
    return verifier_pb2.GradeRequest(
        submission=verdict_pb2.Submission(code="print(1)", tests=tests)
    ).SerializeToString()
