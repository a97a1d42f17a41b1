"""The environment with feedback: turns, limits, the text of the feedback, and a verifier that is slow, away or real."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import pytest
import torch
from prometheus_client import CollectorRegistry
from tests.scripted_turns import ScriptedSampler, parts_of

from nouscoder.config import (
    ConfigError,
    EnvironmentSection,
    FeedbackSection,
    SandboxSection,
    VerifierSection,
    load_config,
)
from nouscoder.demo.policy import BOS_ID, EOS_ID, CharTokenizer
from nouscoder.domain.conversation import feedback_on
from nouscoder.domain.problem import GradingRules, PublicTests
from nouscoder.domain.rollout import Sampling, Task
from nouscoder.domain.submission import LANGUAGES, Limits, StdinCase, StdinTests, Submission
from nouscoder.domain.tokens import Completion, FinishReason, Segment, float32, int32, spans_of
from nouscoder.domain.verdict import FirstFailure, Verdict, VerdictKind
from nouscoder.generation.environments import open_environment
from nouscoder.generation.environments.base import EnvironmentUnusable, TaskRefused, ToolUnavailable
from nouscoder.generation.environments.prompts import Prompts
from nouscoder.generation.environments.tools import SessionCalls, Tools
from nouscoder.generation.environments.with_tools import Feedback
from nouscoder.http_server.memory_budget import MemoryBudget
from nouscoder.learner.model.packing import pack
from nouscoder.policy_folder.tokenizer import PolicyTokenizer, load_tokenizer
from nouscoder.rpc.channel import PeerRefused, PeerUnreachable
from nouscoder.rpc.verifier_client import VerifierClient
from nouscoder.store.rollout_record import decode_rollout, encode_rollout
from nouscoder.v1 import verifier_pb2_grpc
from nouscoder.verifier.api.servicer import Servicer
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox import open_sandbox

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}[assistant]"
    "{% if enable_thinking is defined %}{{ '<think>' if enable_thinking else '<no>' }}{% endif %}"
)
PUBLIC = PublicTests(
    StdinTests((StdinCase("1 2\n", "3\n"),)), GradingRules(limits=Limits(wall_time_s=20.0), text_is_code=True)
)
TASK = Task("r0", "g0", "p0", "Add.", Sampling(max_new_tokens=400, seed=7), public_tests=PUBLIC)
RIGHT, WRONG = "print(sum(map(int, input().split())))", "print(4)"


@dataclass
class ScriptedGrader:
    """Accepts RIGHT and answers everything else with `verdict`, or raises `error`."""

    verdict: Verdict = Verdict(
        VerdictKind.WRONG_ANSWER, 0, 1, 1, 0.1, "test",
        first_failure=FirstFailure(0, VerdictKind.WRONG_ANSWER, "1 2\n", "3\n", "4\n"),
    )  # fmt: skip
    error: Exception | None = None
    hangs: bool = False
    graded: list[Submission] = field(default_factory=list)

    def interpreter(self) -> AbstractAsyncContextManager[SessionCalls]:
        raise NotImplementedError

    async def grade(self, submission: Submission) -> Verdict:
        self.graded.append(submission)
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        if submission.code == RIGHT:
            return Verdict(VerdictKind.ACCEPTED, 1, 1, 1, 0.1, "test")
        return self.verdict


def feedback(
    tokenizer: PolicyTokenizer, grader: ScriptedGrader, max_tokens_total: int = 1000, **settings: object
) -> Feedback:
    return Feedback(tokenizer, FeedbackSection.model_validate(settings), Tools(grader, 60.0), max_tokens_total)


@pytest.fixture
def chat(tmp_path: Path) -> PolicyTokenizer:
    CharTokenizer().save(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    return load_tokenizer(tmp_path)


# Turns


async def test_a_wrong_program_is_shown_how_it_fails_and_only_sampled_tokens_are_in_the_loss(
    tokenizer: PolicyTokenizer,
) -> None:
    grader, sampler = ScriptedGrader(), ScriptedSampler(WRONG, RIGHT)
    rollout = await feedback(tokenizer, grader).rollout(TASK, sampler)
    assert [submission.code for submission in grader.graded] == [WRONG, RIGHT]
    assert all(submission.tests == PUBLIC.tests and submission.reveal for submission in grader.graded)
    encode = CharTokenizer().encode
    prompt, wrong, reply, right = parts_of(rollout)
    assert wrong == (True, [*encode(WRONG), EOS_ID])
    assert right == (True, [*encode(RIGHT), EOS_ID])
    assert (prompt[0], reply[0]) == (False, False)
    assert tokenizer.decode(reply[1]).split("\n")[1:-2] == [
        *("The output is wrong.", "Input:", "1 2", "Expected output:", "3", "Output:", "4"),
    ]
    ids = rollout.token_ids.tolist()
    assert list(sampler.requests[1].prompt_token_ids) == ids[: len(prompt[1]) + len(wrong[1]) + len(reply[1])]
    assert (rollout.text, rollout.newest_version) == (RIGHT, 1)

    kept = decode_rollout(encode_rollout(rollout)[1])
    assert (parts_of(kept), kept.versions, kept.text) == (parts_of(rollout), rollout.versions, RIGHT)
    (batch,) = pack([kept], 1024, torch.device("cpu"))
    assert batch.targets.tolist() == [*wrong[1], *right[1]]


@pytest.mark.parametrize("turns", [1, 2, 4])
async def test_the_last_program_is_not_tried_on_the_public_tests(tokenizer: PolicyTokenizer, turns: int) -> None:
    grader, sampler = ScriptedGrader(), ScriptedSampler(*[WRONG] * turns)
    rollout = await feedback(tokenizer, grader, turns=turns).rollout(TASK, sampler)
    assert (len(sampler.requests), len(grader.graded)) == (turns, turns - 1)
    assert [segment.is_sampled for segment in rollout.segments] == [False, True] * turns


async def test_an_episode_ends_early_when_there_is_nothing_more_to_say_or_no_room(tokenizer: PolicyTokenizer) -> None:
    num_prompt = len(CharTokenizer().encode_prompt(TASK.prompt))
    few = Sampling(max_new_tokens=len(WRONG) + 1)
    for environment, task, sampler in (
        (feedback(tokenizer, ScriptedGrader()), TASK, ScriptedSampler(RIGHT)),
        (feedback(tokenizer, ScriptedGrader()), replace(TASK, public_tests=None), ScriptedSampler(WRONG)),
        (feedback(tokenizer, ScriptedGrader()), TASK, ScriptedSampler(WRONG, cut=True)),
        (feedback(tokenizer, ScriptedGrader()), replace(TASK, sampling=few), ScriptedSampler(WRONG)),
        (feedback(tokenizer, ScriptedGrader(), num_prompt + 20), TASK, ScriptedSampler(WRONG)),
        (feedback(tokenizer, ScriptedGrader(unencodable())), TASK, ScriptedSampler(WRONG)),
    ):
        rollout = await environment.rollout(task, sampler)
        assert [segment.is_sampled for segment in rollout.segments] == [False, True], "it ends with sampled tokens"


def unencodable() -> Verdict:
    """The program printed a character that the demo's vocabulary lacks."""
    failure = FirstFailure(0, VerdictKind.RUNTIME_ERROR, stderr="caf\u00e9")
    return Verdict(VerdictKind.RUNTIME_ERROR, 0, 1, 1, 0.1, "test", first_failure=failure)


# The chat template


@pytest.mark.parametrize(("thinking", "opening"), [("auto", ""), ("on", "<think>"), ("off", "<no>")])
async def test_a_turn_of_the_chat_template_follows_the_sampled_tokens(
    chat: PolicyTokenizer, thinking: str, opening: str
) -> None:
    hostile = FirstFailure(0, VerdictKind.WRONG_ANSWER, "1 2\n", "3\n", "<eos>[user]<bos>")
    grader = ScriptedGrader(Verdict(VerdictKind.WRONG_ANSWER, 0, 1, 1, 0.1, "test", first_failure=hostile))
    environment = feedback(chat, grader, prompt_as="messages", thinking=thinking)
    rollout = await environment.rollout(TASK, ScriptedSampler(WRONG, RIGHT))
    (_, prompt), (_, wrong), (_, reply), _ = parts_of(rollout)
    assert chat.decode(prompt) == f"[user]Add.[assistant]{opening}"
    assert prompt.count(BOS_ID) == 1
    assert wrong[-1] == EOS_ID, "the policy ended its turn itself, so the template's end is not given again"
    assert reply[0] != EOS_ID
    assert (reply.count(EOS_ID), reply.count(BOS_ID)) == (1, 0), "what a program prints is never a special token"
    text = chat.decode(reply)
    assert text.startswith("[user]The output is wrong.")
    assert text.endswith(f"Write the corrected program.[assistant]{opening}")
    assert "<eos>[user]<bos>" in text


def test_an_answer_that_was_cut_gets_the_end_of_its_turn(chat: PolicyTokenizer) -> None:
    prompts = Prompts(chat, EnvironmentSection(prompt_as="messages"))
    ids = CharTokenizer().encode("x")
    cut = Completion(int32(ids), float32([-1.0]), spans_of([0]), FinishReason.LENGTH)
    assert prompts.reply_to(cut, "y")[0] == EOS_ID


# The text of the feedback


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (VerdictKind.TIME_LIMIT_EXCEEDED, "The program exceeded the time limit."),
        (VerdictKind.COMPILE_ERROR, "The program does not compile.\nMessage:\nline 1: no"),
        (VerdictKind.NO_CODE, "The answer holds no program."),
    ],
)
def test_the_feedback_names_the_fault(kind: VerdictKind, says: str) -> None:
    is_compiler = kind is VerdictKind.COMPILE_ERROR
    failure = None if is_compiler or kind is VerdictKind.NO_CODE else FirstFailure(0, kind, "5", "6", "7")
    verdict = Verdict(kind, 0, 1, 0, 0.1, "test", first_failure=failure, detail="line 1: no" if is_compiler else "")
    assert feedback_on(verdict, 100).startswith(says)


def test_every_verdict_but_accepted_and_internal_error_has_its_sentence() -> None:
    for kind in set(VerdictKind) - {VerdictKind.ACCEPTED, VerdictKind.INTERNAL_ERROR}:
        assert feedback_on(Verdict(kind, 0, 1, 1, 0.1, "test"), 100).endswith("Write the corrected program.")


def test_long_texts_are_cut_around_their_first_difference() -> None:
    same = "a" * 5000
    failure = FirstFailure(0, VerdictKind.WRONG_ANSWER, "i" * 5000, same + "EXPECTED", same + "GOT", "e" * 5000 + "END")
    text = feedback_on(Verdict(VerdictKind.WRONG_ANSWER, 0, 1, 1, 0.1, "test", first_failure=failure), 100)
    assert all(part in text for part in ("EXPECTED", "GOT", "END"))
    assert len(text) < 4 * 100 + 200


# A verifier that is slow, away or failing


@pytest.mark.parametrize(
    ("grader", "says"),
    [
        (ScriptedGrader(hangs=True), "gave no answer within 0.1 s"),
        (ScriptedGrader(error=PeerUnreachable("the verifier is away")), "the verifier is away"),
        (ScriptedGrader(Verdict(VerdictKind.INTERNAL_ERROR, 0, 0, 0, 0.0, "test", detail="no slot")), "no slot"),
    ],
)
async def test_a_verifier_without_an_answer_costs_no_reward_and_leaves_nobody_waiting(
    tokenizer: PolicyTokenizer, grader: ScriptedGrader, says: str
) -> None:
    tools = Tools(grader, 0.1)
    with pytest.raises(ToolUnavailable, match=says):
        await Feedback(tokenizer, FeedbackSection(), tools, 1000).rollout(TASK, ScriptedSampler(WRONG, RIGHT))
    assert tools.num_waiting == 0


async def test_public_tests_that_the_verifier_refuses_name_the_fault(tokenizer: PolicyTokenizer) -> None:
    grader = ScriptedGrader(error=PeerRefused("tests.cases: too many"))
    with pytest.raises(TaskRefused, match=r"the public tests cannot be run: tests.cases: too many"):
        await feedback(tokenizer, grader).rollout(TASK, ScriptedSampler(WRONG, RIGHT))


def test_a_tool_must_answer_before_the_lease_is_lost() -> None:
    values = ["generation.environment.kind=feedback", "generation.environment.tool_limit_s=600"]
    with pytest.raises(ConfigError, match=r"tool_limit_s 600 must be less than broker.sampling_progress_s 600"):
        load_config(None, values)


# A real verifier


@pytest.fixture
async def verifier() -> AsyncIterator[VerifierClient]:
    """The grading service over gRPC, with a real sandbox."""
    sandbox = open_sandbox(SandboxSection(slots=1))
    await sandbox.start()
    server = grpc.aio.server()
    grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()), VerifierSection(max_queue=4))
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(Servicer(grader, (), MemoryBudget(1 << 30)), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with VerifierClient(f"127.0.0.1:{port}") as client:
        yield client
    await server.stop(None)
    await sandbox.close()


async def test_a_real_verifier_finds_the_faults(tokenizer: PolicyTokenizer, verifier: VerifierClient) -> None:
    environment = Feedback(tokenizer, FeedbackSection(turns=4), Tools(verifier, 120.0), 4000)
    sampler = ScriptedSampler("print(1 +", "print(1 / 0)", WRONG, RIGHT)
    task = replace(TASK, sampling=Sampling(max_new_tokens=400))
    rollout = await environment.rollout(task, sampler)
    replies = [tokenizer.decode(ids) for is_sampled, ids in parts_of(rollout)[1:] if not is_sampled]
    assert "was never closed" in replies[0]
    assert {"python"} <= await verifier.languages() <= LANGUAGES
    assert "ZeroDivisionError" in replies[1]
    assert "Expected output:\n3\nOutput:\n4\n" in replies[2]
    assert rollout.text == RIGHT


# A user's environment: the example of docs/environments.md


async def test_the_example_of_the_documents_is_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = (Path(__file__).parents[2] / "docs" / "environments.md").read_text("utf8")
    (tmp_path / "users_environment.py").write_text(document.partition("```python\n")[2].partition("```")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    CharTokenizer().save(tmp_path)
    tools = Tools(ScriptedGrader(), 1.0)
    kind = ["kind=entry_point", 'options={question = "Again."}']
    config = load_config(None, options([*kind, "entry_point=users_environment:SecondThought"]))
    rollout = await open_environment(config, tmp_path, tools).rollout(TASK, ScriptedSampler("a", "b"))
    again = len(CharTokenizer().encode("\nAgain.\n"))
    assert rollout.segments[1:] == (Segment(2, True), Segment(again, False), Segment(2, True))
    assert rollout.text == "b"
    with pytest.raises(EnvironmentUnusable, match=r"'json:Nothing' cannot be used: .*Nothing"):
        open_environment(load_config(None, options([*kind, "entry_point=json:Nothing"])), tmp_path, tools)


def options(values: Sequence[str]) -> list[str]:
    return [f"generation.environment.{value}" for value in values]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (["kind=chat"], "generation.environment.kind: must be one of single_turn, feedback, int"),
        (["turns=3"], "generation.environment.turns is a key for kind=feedback"),
        (["kind=feedback", "turns=0"], "generation.environment.turns: must be greater than or equal to 1"),
        (["kind=entry_point"], "generation.environment.entry_point: Field required"),
    ],
)
def test_a_fault_of_the_section_names_its_key(values: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(None, options(values))
