"""The environment with an interpreter: turns, limits, the reply to a call, and a verifier that is away or real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import pytest
import torch
from prometheus_client import CollectorRegistry
from tests.scripted_turns import ScriptedSampler, parts_of

from nouscoder.broker.rewards import Rewards
from nouscoder.config import (
    ConfigError,
    InterpreterSection,
    SandboxSection,
    ToolSessionsSection,
    VerifierSection,
    load_config,
)
from nouscoder.demo.policy import EOS_ID, CharTokenizer
from nouscoder.domain.conversation import CallEnd, InterpreterAnswer
from nouscoder.domain.rollout import Sampling, Task
from nouscoder.domain.submission import Submission
from nouscoder.domain.tokens import Completion
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.generation.engines.base import SampleRequest
from nouscoder.generation.environments import open_environment
from nouscoder.generation.environments.base import TaskRefused, ToolUnavailable
from nouscoder.generation.environments.tools import Tools
from nouscoder.generation.environments.with_tools import WithInterpreter, call_in, reply_to_call
from nouscoder.http_server.memory_budget import MemoryBudget
from nouscoder.learner.model.packing import pack
from nouscoder.policy_folder.tokenizer import PolicyTokenizer
from nouscoder.rpc.channel import PeerBehind, PeerError, PeerRefused, PeerUnreachable
from nouscoder.rpc.status_codes import StatusCodes
from nouscoder.rpc.verifier_client import VerifierClient
from nouscoder.store.rollout_record import decode_rollout, encode_rollout
from nouscoder.v1 import verifier_pb2_grpc
from nouscoder.verifier.access.quotas import Quotas
from nouscoder.verifier.api.servicer import FULL_NAME, STATUS_CODES, Servicer
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.grading.time_limits import ExclusiveRunLock
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox import SandboxUnavailable, open_sandbox
from nouscoder.verifier.tools.sessions import ToolSessions

TASK = Task("r0", "g0", "p0", "What is 12 times 12?", Sampling(max_new_tokens=400, seed=7))
CALL = "<python>12 * 12</python>"


@dataclass
class ScriptedVerifier:
    """Answers each call with `answer`, or raises `error`. Counts open sessions."""

    answer: InterpreterAnswer = InterpreterAnswer(CallEnd.DONE, "144\n")
    error: Exception | None = None
    hangs: bool = False
    called: list[str] = field(default_factory=list)
    num_open: int = 0

    async def grade(self, submission: Submission) -> Verdict:
        raise NotImplementedError

    @asynccontextmanager
    async def interpreter(self) -> AsyncIterator[ScriptedVerifier]:
        self.num_open += 1
        try:
            yield self
        finally:
            self.num_open -= 1

    async def run(self, code: str) -> InterpreterAnswer:
        self.called.append(code)
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return self.answer


def environment(
    tokenizer: PolicyTokenizer, verifier: ScriptedVerifier, max_tokens_total: int = 1000, **settings: object
) -> WithInterpreter:
    section = InterpreterSection.model_validate(settings)
    return WithInterpreter(tokenizer, section, Tools(verifier, 60.0), max_tokens_total)


async def test_a_call_is_answered_and_only_sampled_tokens_are_in_the_loss(tokenizer: PolicyTokenizer) -> None:
    verifier, sampler = ScriptedVerifier(), ScriptedSampler(CALL, "144")
    rollout = await environment(tokenizer, verifier).rollout(TASK, sampler)
    assert (verifier.called, verifier.num_open) == (["12 * 12"], 0)
    encode = CharTokenizer().encode
    prompt, call, reply, answer = parts_of(rollout)
    assert call == (True, [*encode(CALL), EOS_ID])
    assert reply == (False, encode("\n<output>\n144\n</output>\n"))
    assert answer == (True, [*encode("144"), EOS_ID])
    ids = rollout.token_ids.tolist()
    assert list(sampler.requests[1].prompt_token_ids) == ids[: len(prompt[1]) + len(call[1]) + len(reply[1])]
    assert (rollout.text, rollout.newest_version) == ("144", 1)

    kept = decode_rollout(encode_rollout(rollout)[1])
    assert (parts_of(kept), kept.versions, kept.text) == (parts_of(rollout), rollout.versions, "144")
    (batch,) = pack([kept], 1024, torch.device("cpu"))
    assert batch.targets.tolist() == [*call[1], *answer[1]]


@pytest.mark.parametrize("calls", [1, 3])
async def test_the_turn_after_the_last_call_is_the_answer(tokenizer: PolicyTokenizer, calls: int) -> None:
    verifier, sampler = ScriptedVerifier(), ScriptedSampler(*[CALL] * (calls + 1))
    rollout = await environment(tokenizer, verifier, calls=calls).rollout(TASK, sampler)
    assert len(verifier.called) == calls
    assert [segment.is_sampled for segment in rollout.segments] == [False, True] * (calls + 1)


async def test_an_episode_ends_with_a_turn_that_calls_nothing_or_has_no_room(tokenizer: PolicyTokenizer) -> None:
    num_prompt = len(CharTokenizer().encode_prompt(TASK.prompt))
    few = replace(TASK, sampling=Sampling(max_new_tokens=len(CALL) + 1))
    unencodable = ScriptedVerifier(InterpreterAnswer(CallEnd.DONE, "caf\u00e9"))
    for made, task, sampler in (
        (environment(tokenizer, ScriptedVerifier()), TASK, ScriptedSampler("144")),
        (environment(tokenizer, ScriptedVerifier()), TASK, ScriptedSampler(CALL, cut=True)),
        (environment(tokenizer, ScriptedVerifier()), few, ScriptedSampler(CALL)),
        (environment(tokenizer, ScriptedVerifier(), num_prompt + 30), TASK, ScriptedSampler(CALL)),
        (environment(tokenizer, unencodable), TASK, ScriptedSampler(CALL)),
    ):
        rollout = await made.rollout(task, sampler)
        assert [segment.is_sampled for segment in rollout.segments] == [False, True], "it ends with sampled tokens"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("<python>x</python>", "x"),
        ("I look.\n<python>\nx\n</python>\n", "x"),
        ("<python>a</python> and <python>b</python>", "b"),
        ("<python>x</python> done", None),
        ("x</python>", None),
        ("<python>x", None),
        ("<python></python>", ""),
        ("", None),
    ],
)
def test_a_call_is_what_the_turn_ends_in(text: str, code: str | None) -> None:
    assert call_in(text, "<python>", "</python>") == code


def test_every_end_of_a_call_has_its_sentence_and_a_long_output_loses_its_middle() -> None:
    for end in set(CallEnd) - {CallEnd.DONE}:
        reply = reply_to_call(InterpreterAnswer(end, "x"), "<", ">", 100)
        assert reply.startswith("<x\nThe code ")
        assert reply.endswith("fresh interpreter.>" if end is not CallEnd.EXITED else "fresh one.>")
    reply = reply_to_call(InterpreterAnswer(CallEnd.DONE, "a" * 500 + "z" * 500), "<", ">", 100)
    assert reply == f"<{'a' * 50}\n...\n{'z' * 50}>"
    assert reply_to_call(InterpreterAnswer(CallEnd.DONE, "\n"), "<", ">", 100) == "<>"


# A verifier that is slow, away or has no interpreters


@pytest.mark.parametrize(
    ("verifier", "error", "says"),
    [
        (ScriptedVerifier(hangs=True), ToolUnavailable, "no answer within 0.1 s"),
        (ScriptedVerifier(error=PeerUnreachable("the verifier is away")), ToolUnavailable, "the verifier is away"),
        (ScriptedVerifier(error=PeerRefused("no tool sessions")), TaskRefused, "the code cannot be run: no tool sess"),
    ],
)
async def test_without_an_answer_the_session_is_left_and_nobody_waits(
    tokenizer: PolicyTokenizer, verifier: ScriptedVerifier, error: type[Exception], says: str
) -> None:
    tools = Tools(verifier, 0.1)
    with pytest.raises(error, match=says):
        await WithInterpreter(tokenizer, InterpreterSection(), tools, 1000).rollout(TASK, ScriptedSampler(CALL, "x"))
    assert (tools.num_waiting, verifier.num_open) == (0, 0)


async def test_a_rollout_that_waits_for_its_call_needs_no_place_in_the_engine(tokenizer: PolicyTokenizer) -> None:
    verifier = ScriptedVerifier(hangs=True)
    tools = Tools(verifier, 60.0)
    made = WithInterpreter(tokenizer, InterpreterSection(), tools, 1000)
    rollout = asyncio.create_task(made.rollout(TASK, ScriptedSampler(CALL, "x")))
    async with asyncio.timeout(60):
        while not tools.num_waiting:
            await asyncio.sleep(0)
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    assert (tools.num_waiting, verifier.num_open) == (0, 0)


@dataclass
class ForgetfulVerifier:
    """Sessions that count: each call is answered with the number of calls of its session. Each ends after `lives`."""

    lives: list[int]  # of the sessions, in calls; the last one lives on
    says: list[str] = field(default_factory=list)  # the answers of all, or empty for the number
    num_sessions: int = 0
    error: type[PeerError] = PeerBehind

    async def grade(self, submission: Submission) -> Verdict:
        raise NotImplementedError

    @asynccontextmanager
    async def interpreter(self) -> AsyncIterator[ForgetfulSession]:
        self.num_sessions += 1
        yield ForgetfulSession(self, self.lives.pop(0) if self.lives else 1000)


@dataclass
class ForgetfulSession:
    """One of them."""

    verifier: ForgetfulVerifier
    left: int
    codes: list[str] = field(default_factory=list)

    async def run(self, code: str) -> InterpreterAnswer:
        if not self.left:
            raise self.verifier.error("the session has ended: another client was waiting")
        self.left -= 1
        self.codes.append(code)
        text = self.verifier.says.pop(0) if self.verifier.says else " ".join(self.codes)
        return InterpreterAnswer(CallEnd.DONE, text)


@pytest.mark.parametrize("lives", [[], [1], [2], [2, 3]])
@pytest.mark.parametrize("error", [PeerBehind, PeerUnreachable])
async def test_a_rollout_whose_session_was_given_to_another_client_is_the_same_as_without(
    tokenizer: PolicyTokenizer, lives: list[int], error: type[PeerError]
) -> None:
    texts = [f"<python>{code}</python>" for code in "abcd"]
    verifier = ForgetfulVerifier(list(lives), error=error)
    made = WithInterpreter(tokenizer, InterpreterSection(), Tools(verifier, 60.0), 4000)
    rollout = await made.rollout(TASK, ScriptedSampler(*texts, "144"))
    replies = [tokenizer.decode(ids) for is_sampled, ids in parts_of(rollout)[1:] if not is_sampled]
    assert [reply.split("\n")[2] for reply in replies] == ["a", "a b", "a b c", "a b c d"]
    assert (rollout.text, verifier.num_sessions) == ("144", 1 + len(lives))


async def test_a_rollout_whose_state_cannot_be_made_again_is_given_back(tokenizer: PolicyTokenizer) -> None:
    """Its code gives another answer the second time: the policy would go on with a state that it has not seen."""
    verifier = ForgetfulVerifier([1], says=["0.123", "0.456"])
    made = WithInterpreter(tokenizer, InterpreterSection(), Tools(verifier, 60.0), 4000)
    with pytest.raises(ToolUnavailable, match="its code gives other answers now"):
        await made.rollout(TASK, ScriptedSampler(CALL, CALL, "144"))


async def test_a_rollout_whose_sessions_always_end_is_given_back(tokenizer: PolicyTokenizer) -> None:
    verifier = ForgetfulVerifier([1, 1, 1, 1])
    made = WithInterpreter(tokenizer, InterpreterSection(), Tools(verifier, 60.0), 4000)
    with pytest.raises(ToolUnavailable, match="another client was waiting"):
        await made.rollout(TASK, ScriptedSampler(CALL, CALL, "144"))
    assert verifier.num_sessions == 2


# A real verifier


class EndingSampler(ScriptedSampler):
    """The session of the rollout is told to end while the policy samples its second turn, as for another client."""

    tools: ToolSessions

    def sample(self, request: SampleRequest) -> asyncio.Future[Completion]:
        """See `Sampler`."""
        for place in self.tools._places._open:
            place.tell()
        return super().sample(request)


async def test_a_real_interpreter_keeps_its_state_within_a_rollout_only(tokenizer: PolicyTokenizer) -> None:
    section = ToolSessionsSection(sessions=1, call_s=120.0)
    sandbox = open_sandbox(SandboxSection(slots=1), tool_slots=1)
    try:
        await sandbox.start()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    server = grpc.aio.server(interceptors=[StatusCodes(STATUS_CODES, [FULL_NAME])])
    metrics = VerifierMetrics(CollectorRegistry())
    run_lock = ExclusiveRunLock()
    grader = Grader(sandbox, metrics, VerifierSection(tools=section), run_lock)
    tools = ToolSessions(sandbox, 1, run_lock, Quotas(), metrics, section)
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(Servicer(grader, (), MemoryBudget(1 << 30), tools), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with VerifierClient(f"127.0.0.1:{port}") as client:
            made = WithInterpreter(tokenizer, InterpreterSection(), Tools(client, 240.0), 4000)
            texts = ("<python>n = 12 * 12</python>", "<python>n + 1</python>", "145")
            rollout = await made.rollout(TASK, ScriptedSampler(*texts))
            replies = [tokenizer.decode(ids) for is_sampled, ids in parts_of(rollout)[1:] if not is_sampled]
            assert replies == ["\n<output>\n\n</output>\n", "\n<output>\n145\n</output>\n"]
            ending = EndingSampler(*texts)
            ending.tools = tools
            assert encode_rollout(await made.rollout(TASK, ending)) == encode_rollout(rollout)
            rollout = await made.rollout(TASK, ScriptedSampler("<python>n</python>", "?"))
            assert "NameError" in tokenizer.decode(parts_of(rollout)[2][1])
    finally:
        await server.stop(None)
        await sandbox.close()


# The configuration, and the rewards of R1-Code-Interpreter


SECTION = ["generation.environment.kind=interpreter", "verifier.tools.sessions=4"]


def test_the_section_makes_the_environment(tmp_path: Path) -> None:
    config = load_config(None, [*SECTION, "generation.environment.calls=8"])
    CharTokenizer().save(tmp_path)
    made = open_environment(config, tmp_path, Tools(ScriptedVerifier(), 1.0))
    assert isinstance(made, WithInterpreter)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([SECTION[0]], r"kind interpreter needs verifier.tools.sessions of 1 or more"),
        ([*SECTION, "generation.environment.calls=17"], r"calls 17 must not exceed verifier.tools.calls 16"),
        ([*SECTION, "generation.environment.tool_limit_s=60"], r"tool_limit_s 60 must be more than verifier"),
    ],
)
def test_a_configuration_without_working_interpreters_is_refused(values: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(None, values)


@pytest.mark.parametrize(
    ("num_calls", "kind", "reward"),
    [
        (0, VerdictKind.ACCEPTED, 1.1),
        (5, VerdictKind.ACCEPTED, 1.1),
        (6, VerdictKind.ACCEPTED, 1.0),
        (1, VerdictKind.WRONG_ANSWER, 0.1),
        (1, VerdictKind.NO_CODE, -0.1),
        (6, VerdictKind.NO_CODE, -0.2),
    ],
)
async def test_the_rewards_count_the_turns(
    tokenizer: PolicyTokenizer, num_calls: int, kind: VerdictKind, reward: float
) -> None:
    made = environment(tokenizer, ScriptedVerifier(), 4000, calls=8)
    rollout = await made.rollout(TASK, ScriptedSampler(*[CALL] * num_calls, "144"))
    header, _ = encode_rollout(rollout)
    rewards = Rewards(load_config(None, ["broker.reward.rule=r1_code_interpreter"]))
    assert rewards.of(header, Verdict(kind, 0, 1, 1, 0.1, "test")) == pytest.approx(reward)
