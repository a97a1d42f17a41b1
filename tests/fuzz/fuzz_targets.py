"""Coverage-guided fuzzing (atheris on libFuzzer) of the gateway's parsers of input from clients and candidates.

    python tests/fuzz/fuzz_targets.py TARGET [libFuzzer options] [corpus folders, or files to replay]

A target takes any bytes and asserts its properties. libFuzzer ends the process at the first violation, so each target
is a separate run. The byte 1e separates the parts of an input, so that seeds can be read and edited.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import sys
import time
from collections.abc import AsyncIterator, Callable
from itertools import product
from typing import Any, ClassVar, cast

import atheris

with atheris.instrument_imports(include=["nouscoder"]):
    from google.protobuf.message import DecodeError

    from nouscoder.config import SandboxSection
    from nouscoder.data.problem_index import IndexedProblem
    from nouscoder.domain.problem import GradingRules
    from nouscoder.domain.submission import (
        AssertTests,
        CallCase,
        CallTests,
        Comparator,
        ComparatorKind,
        Limits,
        MathCase,
        MathTests,
        Profile,
        StdinCase,
        StdinTests,
        Submission,
    )
    from nouscoder.domain.verdict import Verdict, VerdictKind
    from nouscoder.formats.json_values import ValueCount, json_bytes, json_value, with_whole_characters
    from nouscoder.http_server.memory_budget import MemoryBudget
    from nouscoder.rpc.convert import InvalidMessage
    from nouscoder.rpc.pairs import SUBMISSION
    from nouscoder.v1 import verdict_pb2
    from nouscoder.verifier.api.compat.nemo_gym import parse_row
    from nouscoder.verifier.api.compat.openenv import EpisodeSession
    from nouscoder.verifier.api.compat.problem_set import NoSuchProblem
    from nouscoder.verifier.api.faults import Absent
    from nouscoder.verifier.api.remote_rewards import GetRewardRequest
    from nouscoder.verifier.api.run_code import parse_run_code
    from nouscoder.verifier.api.sandbox_fusion import SubmitRequest
    from nouscoder.verifier.api.schema import parse_submission, parsed_as
    from nouscoder.verifier.api.streaming import batch_lines
    from nouscoder.verifier.grading.extract import extract_code, text_to_grade
    from nouscoder.verifier.grading.grader import OnOutcome
    from nouscoder.verifier.grading.runs import judge_for
    from nouscoder.verifier.grading.validation import Bounds, InvalidSubmission, validate
    from nouscoder.verifier.harness import frames
    from nouscoder.verifier.judges.asserting import AssertJudge
    from nouscoder.verifier.judges.comparators import UnreadableResult, parse_result, same_text, same_value
    from nouscoder.verifier.judges.judge import CLIP_CHARS, Judge, failure_of, outcome_of
    from nouscoder.verifier.judges.lcb import LcbJudge
    from nouscoder.verifier.runner.handshake import MAX_MESSAGE_BYTES, HandshakeError, message_length, unpack
    from nouscoder.verifier.sandbox.base import (
        CompileFailed,
        Exit,
        Program,
        RunResult,
        SandboxError,
        SandboxUnavailable,
    )
    from nouscoder.verifier.sandbox.session import SlotSession
    from nouscoder.verifier.sandbox.slot import Slot
    from nouscoder.verifier.toolchains.languages import SEARCH_PATH, known_tools, registry

SEPARATOR = b"\x1e"
STRETCH = 300
STRETCHED_CPU_S = 5.0  # for at most 300 * 200 bytes; linear work takes milliseconds
_BOUNDS = Bounds()
_MAX_FAULT_CHARS = 3000
_loop = asyncio.new_event_loop()


def _parts(data: bytes, most: int) -> list[bytes]:
    """The parts of an input, padded to exactly `most`."""
    parts = data.split(SEPARATOR, most - 1)
    return parts + [b""] * (most - len(parts))


def _text(data: bytes) -> str:
    return data.decode("utf8", "replace")


# extraction


def extract(data: bytes) -> None:
    """The lines of a found program are parts of the completion, and it is found again where it is the only block."""
    completion = _text(data)
    code = extract_code(completion)
    submission = Submission(StdinTests((StdinCase("", ""),)), completion=completion)
    found = text_to_grade(submission)
    assert (None if found is None else found.code) == code
    if code is None:
        return
    assert code.strip()
    rest = iter(completion.replace("\r\n", "\n").split("\n"))
    assert all(any(line.strip() in whole for whole in rest) for line in code.split("\n"))
    assert "```" in completion or "~~~" in completion
    marks = "`" * max(3, 1 + max(map(len, re.findall("`+", code)), default=0))
    again = f"</think>\n{marks}python\n{code}\n{marks}\nDone."
    assert extract_code(again) == f"{code}\n".replace("\r\n", "\n")[:-1]


# comparators


def text(data: bytes) -> None:
    """Comparators are reflexive, and symmetric but for kattis, which measures a difference by the expected number. A
    stricter one accepts no more than a laxer one.
    """
    one, raw = _parts(data, 2)
    expected, other = _text(one), _text(raw)
    same = {}
    for kind, tolerance in product(ComparatorKind, (0.0, 1e-6, 0.5)):
        comparator = Comparator(kind, tolerance)
        same_text(expected, raw, comparator)
        assert same_text(expected, expected.encode(), comparator)
        same[kind, tolerance] = same_text(expected, other.encode(), comparator)
        if kind is not ComparatorKind.KATTIS:
            assert same[kind, tolerance] is same_text(other, expected.encode(), comparator)
    for stricter, laxer in (
        ((ComparatorKind.EXACT, 0.0), (ComparatorKind.LINES, 0.0)),
        ((ComparatorKind.LINES, 0.0), (ComparatorKind.UNORDERED_LINES, 0.0)),
        ((ComparatorKind.LINES, 0.0), (ComparatorKind.TOKENS, 0.0)),
        ((ComparatorKind.TOKENS, 0.0), (ComparatorKind.TOKENS, 1e-6)),
        ((ComparatorKind.TOKENS, 1e-6), (ComparatorKind.TOKENS, 0.5)),
        ((ComparatorKind.TOKENS, 0.0), (ComparatorKind.KATTIS, 0.0)),
        ((ComparatorKind.KATTIS, 0.0), (ComparatorKind.KATTIS, 1e-6)),
        ((ComparatorKind.KATTIS, 1e-6), (ComparatorKind.KATTIS, 0.5)),
    ):
        assert same[laxer] or not same[stricter], (stricter, laxer)


ANY_VALUE = "[" * 1_000_000  # as an expected value it bounds nothing here


def value(data: bytes) -> None:
    """Values equal themselves in every notation, and the comparison is symmetric."""
    values = []
    for part in _parts(data, 2):
        with contextlib.suppress(UnreadableResult):
            values.append(parse_result(part, ANY_VALUE))
    for one, other in product(values, repeat=2):
        assert same_value(one, other) is same_value(other, one)
        assert same_value(one, other, 0.5) or not same_value(one, other)
    for one in values:
        assert same_value(one, one)
        try:
            expected = json.dumps(one)
            texts = [expected, json.dumps(one, ensure_ascii=False), json.dumps(_with_integers(one))]
        except (TypeError, RecursionError, ValueError):  # a HugeInt; deeper than json can write; too many digits
            continue
        for written in texts:
            with contextlib.suppress(UnicodeEncodeError):  # a lone surrogate has no UTF-8
                assert same_value(one, parse_result(written.encode(), expected)), written


def _with_integers(one: object) -> object:
    """The same value with integral floats as integers, which have more digits."""
    if isinstance(one, list):
        return [_with_integers(item) for item in one]
    if isinstance(one, dict):
        return {key: _with_integers(item) for key, item in one.items()}
    return int(one) if isinstance(one, float) and math.isfinite(one) and one.is_integer() else one


# requests


def _refused_well(act: Callable[[], None]) -> None:
    """Run `act` and check that a refusal is short and names its field."""
    try:
        act()
    except InvalidMessage:
        return
    except InvalidSubmission as error:
        refusal = error
    else:
        return
    assert str(refusal).startswith(f"{refusal.field}: "), refusal
    assert 0 < len(refusal.field) <= 200, refusal
    assert refusal.field.isprintable(), refusal
    assert len(str(refusal)) < _MAX_FAULT_CHARS, refusal


def _take(submission: Submission) -> None:
    """Run all steps of the gateway before it needs a sandbox."""
    validate(submission, _BOUNDS)
    text_to_grade(submission)
    judge = judge_for(submission)
    for index in range(min(judge.num_tests, 3)):
        judge.stdin(index)


def request(data: bytes) -> None:
    """A body is a valid submission, or is refused with its field."""
    _refused_well(lambda: _take(parse_submission(data)))
    _refused_well(lambda: _run(data))


def _run(data: bytes) -> None:
    asked = parse_run_code(data)
    asked.contents()
    asked.program()


def message(data: bytes) -> None:
    """A gRPC message is a valid submission, or is refused with its field."""
    with contextlib.suppress(DecodeError):
        received = verdict_pb2.Submission.FromString(data)
        _refused_well(lambda: _receive(received))


def _receive(received: verdict_pb2.Submission) -> None:
    submission = SUBMISSION.of(received)
    _take(submission)
    assert repr(SUBMISSION.of(SUBMISSION.to(submission))) == repr(submission)


class _Accepting:
    """A grader that accepts every valid submission."""

    backend = "none"
    num_slots = 2
    unfinished = 0

    async def grade(self, submission: Submission, on_outcome: OnOutcome | None = None) -> Verdict:
        """Return an accepted verdict."""
        validate(submission, _BOUNDS)
        return Verdict(VerdictKind.ACCEPTED, 1, 1, 1, 0.0, self.backend)


def batch(data: bytes) -> None:
    """Every line of a batch has one answer, which is one line of strict JSON."""
    lines = data.split(b"\n")
    answers = _loop.run_until_complete(_all(batch_lines(_Accepting(), lines)))
    assert len(answers) == sum(bool(line.strip()) for line in lines)
    for answer in answers:
        assert answer.count(b"\n") == 1
        record = json.loads(answer, parse_constant=_no_constant)
        assert ("verdict" in record) != ("error" in record)
        assert "id" in record


async def _all(items: AsyncIterator[bytes]) -> list[bytes]:
    return [item async for item in items]


def _no_constant(name: str) -> object:
    raise AssertionError(f"{name} is no JSON")


# results of candidates


def _judges() -> list[Judge]:
    stdin = StdinTests((StdinCase("1", "0.5 1e3\nx"), StdinCase("", "")))
    call = CallTests("f", (CallCase(([1],), {}, {"a": [1, 2.5, None]}), CallCase((), {}, "text")))
    submissions = [
        Submission(stdin, "pass"),
        Submission(stdin, "pass", comparator=Comparator(ComparatorKind.UNORDERED_LINES)),
        Submission(stdin, "pass", comparator=Comparator(ComparatorKind.TOKENS, 0.1)),
        Submission(call, "pass"),
        Submission(AssertTests(("assert f()",)), "pass"),
        Submission(MathTests((MathCase("1/2"),)), "pass"),
        Submission(stdin, "pass", profile=Profile.LCB),
        Submission(call, "pass", profile=Profile.LCB),
    ]
    return [judge_for(submission) for submission in submissions]


_JUDGES = _judges()
_EXITS = list(Exit)


def outcome(data: bytes) -> None:
    """Every result of a process has an outcome other than internal_error, and a failure that can be encoded."""
    head = data[0] if data else 0
    stdout, stderr, result = _parts(data[1:], 3)
    exit_ = _EXITS[head % len(_EXITS)]
    ran = RunResult(exit_, head >> 6, head % 32, 0.1, 0.1, 1000, stdout, stderr, result if head & 32 else None)
    for judge in _JUDGES:
        results = judge.split_now(ran) if isinstance(judge, LcbJudge) else [ran] * judge.num_tests
        assert len(results) == judge.num_tests
        for index, one in enumerate(results):
            _check_outcome(judge, index, one)


def _check_outcome(judge: Judge, index: int, result: RunResult) -> None:
    kind = outcome_of(judge, index, result)
    assert kind not in (VerdictKind.INTERNAL_ERROR, VerdictKind.NO_CODE, VerdictKind.COMPILE_ERROR)
    if kind is VerdictKind.ACCEPTED:
        assert result.exit is Exit.EXITED
        assert result.exit_code == 0
        assert not isinstance(judge, AssertJudge)  # its token cannot be guessed
    assert 0 <= result.wall_time_s < math.inf
    assert 0 <= result.cpu_time_s < math.inf
    shown = failure_of(judge, index, kind, result)
    for shown_text in (shown.input, shown.expected, shown.output, shown.stderr):
        assert len(shown_text) <= CLIP_CHARS + 3
        shown_text.encode()  # gRPC allows only UTF-8


# frames


def frame(data: bytes) -> None:
    """A RESULT payload has exactly one encoding, or raises ValueError."""
    with contextlib.suppress(ValueError):
        assert frames.pack_result(frames.unpack_result(data)) == data


# a runner that was taken over


class _Deaf:
    """The writer of a link to a runner that does not read. It is its own transport."""

    def __init__(self) -> None:
        self.transport = self

    def write(self, data: bytes) -> None:
        """Forget the data."""

    def get_write_buffer_size(self) -> int:
        """Nothing waits."""
        return 0


class _Said:
    """The link to a runner that says `data`, and the launch that opens it."""

    pid = None
    use_until_s = math.inf
    tools: ClassVar[dict[str, str]] = {}
    has_dialogue_socket = False

    def __init__(self, data: bytes) -> None:
        self.reader, self.writer, self.is_open = asyncio.StreamReader(limit=1 << 20), _Deaf(), True
        self.reader.feed_data(data)
        self.reader.feed_eof()

    async def open(self) -> _Said:
        """The link."""
        return self

    async def close(self, *, worn: bool = False) -> None:
        """Close it."""
        self.is_open = False

    def last_log_line(self) -> str:
        """None."""
        return ""

    def explain(self, reason: str) -> str:
        """The reason."""
        return reason

    async def lacked_memory(self) -> bool:
        """Not known."""
        return False


_LIMITS = Limits(wall_time_s=60, output_bytes=4096)
_PROGRAMS = (
    Program(registry()["python"], "print(1)", _LIMITS),
    Program(registry()["python"], "def f(): pass", _LIMITS, entry_point="f"),
    Program(registry()["c"], "int main() {}", _LIMITS),
)


def runner(data: bytes) -> None:
    """Whatever a runner says, a session ends with a result, a compile error or a SandboxError."""
    head, rest = (data[0], data[1:]) if data else (0, b"")
    good = frames.encode(frames.FrameKind.HELLO, b"{}") + frames.encode(frames.FrameKind.READY)
    said = rest if head & 64 else good + frames.encode(frames.FrameKind.COMPILED) + rest if head & 32 else good + rest
    with contextlib.suppress(SandboxError, SandboxUnavailable, CompileFailed):
        _loop.run_until_complete(_session(_Said(said), _PROGRAMS[head % len(_PROGRAMS)]))


async def _session(link: _Said, program: Program) -> None:
    slot = Slot(0, SandboxSection(start_limit_s=60), link)  # type: ignore[arg-type]
    try:
        await slot.ensure_usable()
        session = SlotSession(slot, program, SandboxSection())
        session.begin()
        await session.compile()
        for _ in range(3):
            result = await session.run(b"1")
            assert 0 <= result.wall_time_s < math.inf
            assert 0 <= result.cpu_time_s < math.inf
            assert len(result.stdout) <= frames.session_bound(_LIMITS.output_bytes)
    finally:
        await slot.stop()


def greeting(data: bytes) -> None:
    """A message of a handshake is an object of bounded length, and names only tools in known folders."""
    with contextlib.suppress(HandshakeError):
        assert message_length(data[:4].ljust(4, b"\0")) <= MAX_MESSAGE_BYTES
    with contextlib.suppress(HandshakeError):
        message = unpack(data)
        assert isinstance(message, dict)
        for name, path in known_tools(message.get("tools")).items():
            assert path in [f"{folder}/{name}" for folder in SEARCH_PATH.split(":")]


# other forms of requests


def reward(data: bytes) -> None:
    """A body of OpenRLHF's remote reward gives one submission a query, or is refused with its field."""

    def take() -> None:
        asked = parsed_as(GetRewardRequest, data)
        assert len(asked.submissions()) == len(asked.query)

    _refused_well(take)


def submit(data: bytes) -> None:
    """A body of SandboxFusion's /submit is a submission, or is refused with its field."""
    with contextlib.suppress(Absent):
        _refused_well(lambda: _take(parsed_as(SubmitRequest, data).submission()))


def gym(data: bytes) -> None:
    """A row of NeMo Gym comes back with the values that were sent, or is refused with its field."""

    def take() -> None:
        row = parse_row(data, ValueCount.unbounded())
        validate(row.submission, Bounds())
        back, sent = (json_value(with_whole_characters(one)) for one in (row.echoed + b'"reward":0}', data))
        for name in ("responses_create_params", "response"):
            assert repr(back[name]) == repr(sent[name])  # NaN equals nothing

    _refused_well(take)


class _Offered:
    """A problem set whose hidden tests accept everything."""

    problem_ids = ("p",)
    _problem = IndexedProblem("p", "Add.", "", GradingRules(), "sha256:", 1, 1)

    def problem(self, problem_id: str) -> IndexedProblem:
        if problem_id != "p":
            raise NoSuchProblem("there is no such problem")
        return self._problem

    def at(self, place: int) -> IndexedProblem:
        return self.problem("p" if place == 0 else "")

    async def public_verdict(self, *_: object) -> None:
        return None

    async def hidden_verdict(self, *_: object) -> Verdict:
        return Verdict(VerdictKind.ACCEPTED, 1, 1, 1, 0.1, "fake")


class _Silent:
    """A client that says nothing more."""

    async def receive(self) -> None:
        await asyncio.Event().wait()


_CODES = ("INVALID_JSON", "VALIDATION_ERROR", "UNKNOWN_TYPE", "EXECUTION_ERROR")


def session(data: bytes) -> None:
    """Messages of an OpenEnv session: each is answered by a frame, and only a step within an episode has a reward."""
    made = EpisodeSession(cast(Any, _Silent()), cast(Any, _Offered()), MemoryBudget(1 << 20), lambda: None)
    has_episode = False
    for line in data.decode("utf8", "replace").split("\n"):
        frame = _loop.run_until_complete(made._answer(line))
        if frame is None:
            return
        sent = json.loads(json_bytes(frame))
        match sent["type"]:
            case "observation":
                assert (sent["data"]["reward"] is None) == (not sent["data"]["done"]), sent
                assert has_episode or not sent["data"]["done"], sent
                has_episode = not sent["data"]["done"]
            case "error":
                assert sent["data"]["code"] in _CODES, sent
                assert sent["data"]["message"] != "the service failed on this message", sent
                assert len(sent["data"]["message"]) < 10 * _MAX_FAULT_CHARS, sent
            case other:
                assert other in ("state", "mcp"), sent
    if made._reading is not None:
        made._reading.cancel()


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (
        *(extract, text, value, request, message, batch, outcome, frame),
        *(runner, greeting, reward, submit, gym, session),
    )
}
_LINEAR = frozenset({"extract", "text", "value", "outcome"})


def _with_a_clock(target: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """`target`, run again with some inputs repeated STRETCH times, within a bound on CPU time."""

    def timed(data: bytes) -> None:
        target(data)
        if 2 < len(data) <= 200 and sum(data) % 16 == 0:
            begun_s = time.process_time()
            target(data[:1] + data[1:] * STRETCH)
            spent_s = time.process_time() - begun_s
            assert spent_s < STRETCHED_CPU_S, f"{spent_s:.1f} s of CPU for {len(data)} bytes {STRETCH} times over"

    return timed


def main(argv: list[str]) -> None:
    """Fuzz one target within the limits of libFuzzer's options."""
    if len(argv) < 2 or argv[1] not in TARGETS:
        raise SystemExit(f"usage: fuzz_targets.py {'|'.join(TARGETS)} [libFuzzer options] [folders or files]")
    target = TARGETS[argv[1]]
    atheris.Setup([argv[0], *argv[2:]], _with_a_clock(target) if argv[1] in _LINEAR else target)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
