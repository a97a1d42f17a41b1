"""Rollouts that agents make over HTTP: their tokens, their rewards, refusals, and sessions that nobody closes."""

from __future__ import annotations

import asyncio
import json
import shutil
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.e2e.test_trainer_packages import output_of
from tests.services.test_generation_openai import CAPACITY, CHARACTERS, CHAT, LIMIT_S, published, saying

from nouscoder.config import ConfigError, load_config
from nouscoder.config.generation import AgentSection
from nouscoder.demo.policy import EOS_ID
from nouscoder.domain.rollout import Rollout, Sampling, Task
from nouscoder.domain.tokens import Segment
from nouscoder.generation.engines.fake import FakeEngine
from nouscoder.generation.engines.stepped import SteppedEngine
from nouscoder.generation.environments import agent
from nouscoder.generation.environments.agent import Agent, AgentSessions, _Session
from nouscoder.generation.environments.base import EnvironmentUnusable, SessionAbandoned
from nouscoder.generation.metrics import GenerationMetrics
from nouscoder.generation.openai.api import start_openai
from nouscoder.generation.openai.schema import ApiFault
from nouscoder.generation.openai.shares import Shares
from nouscoder.generation.rollouts import Rollouts
from nouscoder.generation.weights.policies import Policies
from nouscoder.http_server.api_keys import new_api_key
from nouscoder.policy_folder.tokenizer import load_tokenizer
from nouscoder.run.loop import agent_lines

TASK = Task("g000001-0", "g000001", "p1", "Print 1.", Sampling(max_new_tokens=60, seed=7))
SERVED = ("run.name=mine", "generation.openai.http=127.0.0.1:0", f"generation.max_tokens_total={CAPACITY}")
ANSWERS = ["run it", "print(1)", "again"]


@dataclass
class Service:
    rollouts: Rollouts
    sessions: AgentSessions
    http: httpx.AsyncClient

    async def claim(self, **fields: Any) -> dict[str, Any]:
        answer = await self.http.post("/v1/sessions", json=fields)
        assert answer.status_code == 201, answer.text
        record: dict[str, Any] = answer.json()
        return record

    async def ask(self, session: dict[str, Any], messages: list[dict[str, str]], **fields: Any) -> httpx.Response:
        body = {"model": "any name", "messages": messages, **fields}
        return await self.http.post(CHAT, json=body, headers=key_of(session))

    async def say(self, session: dict[str, Any], messages: list[dict[str, str]], **fields: Any) -> None:
        """Ask, and append the answer to the messages."""
        answer = await self.ask(session, messages, **fields)
        assert answer.status_code == 200, answer.text
        messages.append(answer.json()["choices"][0]["message"])

    async def close(self, session: dict[str, Any], **fields: Any) -> httpx.Response:
        return await self.http.post(f"/v1/sessions/{session['id']}/reward", json=fields, headers=key_of(session))


def key_of(session: dict[str, Any]) -> dict[str, str]:
    return {"authorization": f"Bearer {session['key']}"}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of characters, without a chat template."""
    made = tmp_path_factory.mktemp("policy")
    CHARACTERS.save(made)
    return made


@asynccontextmanager
async def serving(folder: Path, tmp_path: Path, *answers: str, **settings: Any) -> AsyncIterator[Service]:
    """The API and the rollouts of an engine that answers the turns of a rollout with `answers`."""
    said = answers or ANSWERS
    section = AgentSection(**{name: settings.pop(name) for name in ("agent_session_s",) if name in settings})
    async with AsyncExitStack() as stack:

        def script(request: Any) -> list[int]:
            return CHARACTERS.encode(said[int(request.request_id.partition("/")[2] or 0)])

        metrics = GenerationMetrics()
        inner = FakeEngine(max_running=4, max_tokens_total=CAPACITY, guest_places=8, script=script)
        engine = await stack.enter_async_context(SteppedEngine(inner, metrics))
        policies = Policies(engine)
        await policies.update(published(tmp_path, 3))
        sessions = AgentSessions()
        environment = Agent(load_tokenizer(folder), section, sessions, CAPACITY)
        rollouts = Rollouts(environment, engine, policies, max_tokens_total=CAPACITY, sessions=sessions)
        config = load_config(
            None, [*SERVED, *(f"generation.openai.{name}={value}" for name, value in settings.items())]
        )
        address = await start_openai(config, folder, engine, policies, metrics.api, stack, sessions)
        url = f"http://{address}"
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=LIMIT_S))
        yield Service(rollouts, sessions, http)


def segments(rollout: Rollout) -> list[tuple[str, bool]]:
    """The text of each segment, and whether it was sampled."""
    found, start = [], 0
    for segment in rollout.segments:
        ids = rollout.token_ids[start : start + segment.num_tokens].tolist()
        found.append((CHARACTERS.decode(ids), segment.is_sampled))
        start += segment.num_tokens
    return found


async def test_two_turns_of_an_agent_become_one_rollout_with_exactly_their_tokens(folder: Path, tmp_path: Path) -> None:
    async with serving(folder, tmp_path) as service:
        making = service.rollouts.start(TASK)
        session = await service.claim()
        assert (session["problem_id"], session["messages"]) == ("p1", [user("Print 1.")])
        assert (session["max_new_tokens"], session["sampling"]) == (60, {"temperature": 1.0, "top_p": 1.0})
        messages = list(session["messages"])
        await service.say(session, messages)
        messages.append(user("output: 1"))
        assert service.rollouts.num_waiting_for_tools == 1
        await service.say(session, messages)
        assert [message["content"] for message in messages[1::2]] == ANSWERS[:2]
        closed = await service.close(session)
        rollout = await making
        assert closed.json() == {"id": session["id"], "turns": 2, "tokens": len(rollout.token_ids)}
    assert segments(rollout) == [
        ("Print 1.", False), ("run it", True), ("\noutput: 1\n", False), ("print(1)", True)
    ]  # fmt: skip
    assert rollout.sampled_token_ids.tolist() == [
        token for text in ANSWERS[:2] for token in (*CHARACTERS.encode(text), EOS_ID)
    ]
    assert set(rollout.logprobs) == {-0.5}
    assert (rollout.num_versions, rollout.oldest_version) == (1, 3)
    assert (rollout.text, rollout.own_reward, rollout.segments[0]) == ("print(1)", None, Segment(9, False))


async def test_messages_are_written_by_the_chat_template_up_to_the_answer_and_after_it(
    folder: Path, tmp_path: Path
) -> None:
    """An answer keeps its own tokens; the template writes what is around it, once."""
    chat = tmp_path / "chat"
    shutil.copytree(folder, chat)
    file = chat / "tokenizer_config.json"
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}[assistant]"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    with pytest.raises(EnvironmentUnusable, match="agents ask in messages"):
        Agent(load_tokenizer(chat), AgentSection(prompt_as="text"), AgentSessions(), CAPACITY)
    async with serving(chat, tmp_path) as service:
        making = service.rollouts.start(TASK)
        session = await service.claim()
        messages = [{"role": "system", "content": "Call."}, *session["messages"]]
        await service.say(session, messages)
        messages += [{"role": "tool", "content": "1"}, user("<eos>go on")]
        await service.say(session, messages)
        await service.close(session)
        rollout = await making
    assert segments(rollout) == [
        ("[system]Call.[user]Print 1.[assistant]", False),
        (ANSWERS[0], True),
        ("[tool]1[user]<eos>go on[assistant]", False),
        (ANSWERS[1], True),
    ]
    # The ends of the messages, in the first segment and the third, and those that the policy sampled.
    assert rollout.token_ids.tolist().count(EOS_ID) == 2 + 1 + 2 + 1


async def test_an_agent_may_give_the_reward_and_the_answer_that_is_graded(folder: Path, tmp_path: Path) -> None:
    async with serving(folder, tmp_path) as service:
        making = service.rollouts.start(TASK)
        session = await service.claim()
        for nothing in ({}, {"reward": 1.0}):
            refused = await service.close(session, **nothing)
            assert (refused.status_code, "no completion yet" in refused.text) == (409, True)
        await service.say(session, session["messages"])
        assert (await service.close(session, reward="good")).status_code == 400
        assert (await service.close(session, reward=0.25, answer="print(2)")).status_code == 200
        rollout = await making
        assert (rollout.own_reward, rollout.text) == (0.25, "print(2)")
        again = await service.close(session, reward=1.0)
        assert (again.status_code, "its agent has closed it" in again.text) == (410, True)
        assert (await service.ask(session, [user("more")])).status_code == 410


async def test_the_same_messages_again_get_the_same_completion(folder: Path, tmp_path: Path) -> None:
    """A client repeats a request whose answer was lost. It is the same turn, also as a stream."""
    async with serving(folder, tmp_path) as service:
        making = service.rollouts.start(TASK)
        session = await service.claim()
        first, again = await asyncio.gather(*(service.ask(session, session["messages"]) for _ in range(2)))
        assert first.json()["choices"] == again.json()["choices"]
        stream = await service.ask(
            session, session["messages"], stream=True, stream_options={"include_usage": True}, logprobs=True
        )
        events = [json.loads(line[6:]) for line in stream.text.split("\n\n") if line.startswith("data: {")]
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ANSWERS[0]}
        assert len(events[0]["choices"][0]["logprobs"]["content"]) == len(ANSWERS[0])
        assert events[1]["usage"] == first.json()["usage"]
        await service.close(session)
        assert len((await making).segments) == 2


async def test_what_a_session_cannot_do_is_refused_and_changes_nothing(folder: Path, tmp_path: Path) -> None:
    long = "x" * (CAPACITY - 10)
    async with serving(folder, tmp_path) as service:
        making = service.rollouts.start(TASK)
        session = await service.claim()
        messages = list(session["messages"])
        for fields, sentence in (
            ({"temperature": 0.5}, "temperature: a rollout is sampled with the run's 1"),
            ({"n": 2}, "n is decided by the run"),
            ({"seed": 3}, "seed is decided by the run"),
            ({"stop": "x"}, "stop is decided by the run"),
            ({"tools": [{"type": "function"}]}, "tools is not supported"),
        ):
            refused = await service.ask(session, messages, **fields)
            assert (refused.status_code, sentence in refused.text) == (400, True), refused.text
        await service.say(session, messages, temperature=1.0)
        for others in ([user("Print 2.")], messages, [*messages[:1], user("go on")], [user("Print 2."), *messages[1:]]):
            refused = await service.ask(session, others)
            assert (refused.status_code, "must begin with the 2 that were said" in refused.text) == (409, True)
        refused = await service.ask(session, [*messages, user(long)])
        assert (refused.status_code, "generation.max_tokens_total" in refused.text) == (400, True)
        text = await service.http.post(
            "/v1/completions", json={"model": "mine", "prompt": "x"}, headers=key_of(session)
        )
        assert text.status_code == 400
        other_path = await service.http.post("/v1/sessions/other/reward", headers=key_of(session))
        assert other_path.status_code == 401
        spaced = [messages[0], {"role": "assistant", "content": f" {ANSWERS[0]}\n"}, user("go on")]
        await service.say(session, spaced)
        await service.close(session)
        rollout = await making
    assert segments(rollout)[2:] == [("\ngo on\n", False), (ANSWERS[1], True)]


async def test_a_session_has_as_many_tokens_as_a_rollout_may_have(folder: Path, tmp_path: Path) -> None:
    async with serving(folder, tmp_path, "a" * 100, "b" * 100, "c") as service:
        making = service.rollouts.start(TASK)
        session = await service.claim()
        messages = list(session["messages"])
        await service.say(session, messages, max_tokens=20)
        messages.append(user("go on"))
        await service.say(session, messages)
        refused = await service.ask(session, [*messages, user("more")])
        assert (refused.status_code, "has sampled as many tokens" in refused.text) == (400, True)
        await service.close(session)
        rollout = await making
    assert (rollout.num_sampled_tokens, rollout.finish_reason) == (60, "length")


async def test_a_session_whose_agent_is_gone_is_abandoned_and_an_evaluation_asks_another(
    folder: Path, tmp_path: Path
) -> None:
    async with serving(folder, tmp_path, agent_session_s=0.05) as service:
        making = service.rollouts.start(TASK)
        gone = await service.claim()
        with pytest.raises(SessionAbandoned, match="the agent asked for nothing"):
            await making
        late = await service.close(gone)
        assert (late.status_code, "asked for nothing" in late.text) == (410, True)

        async def one() -> list[Rollout]:
            return [rollout async for rollout in service.rollouts.all_of([replace(TASK, rollout_id="eval-0")])]

        evaluating = asyncio.create_task(one())
        await service.claim()  # this agent is gone, too
        while True:  # a slow machine may abandon a session of this one
            session = await service.claim()
            asked = await service.ask(session, session["messages"])
            if asked.is_success and (await service.close(session)).is_success:
                break
        (rollout,) = await evaluating
        assert rollout.text == ANSWERS[0]


async def test_a_rollout_that_ends_ends_its_session_and_the_next_agent_waits_for_another(
    folder: Path, tmp_path: Path
) -> None:
    async with serving(folder, tmp_path) as service:
        none = await service.http.post("/v1/sessions", json={"wait_s": 0})
        assert (none.status_code, none.json()["error"]["code"]) == (503, "no_session")
        unclaimed, making = (service.rollouts.start(replace(TASK, rollout_id=name)) for name in ("r1", "r2"))
        unclaimed.cancel()
        await asyncio.gather(unclaimed, return_exceptions=True)
        session = await service.claim()
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
        stale = await service.ask(session, session["messages"])
        assert (stale.status_code, "its rollout has ended" in stale.text) == (410, True)
        waiting = asyncio.create_task(service.claim())
        last = service.rollouts.start(TASK)
        assert (await waiting)["id"] != session["id"]
        last.cancel()


def offered(sessions: AgentSessions, name: str) -> tuple[_Session, asyncio.Task[None]]:
    session = _Session({}, name)
    return session, asyncio.create_task(sessions.agent_of(session))


async def test_a_free_session_goes_to_the_client_that_has_the_fewest() -> None:
    """One client must not hold all sessions: before, its earlier claims got all that became free."""
    sessions = AgentSessions()
    greedy = [asyncio.create_task(sessions.claim("greedy")) for _ in range(20)]
    await asyncio.sleep(0)
    other = asyncio.create_task(sessions.claim("other"))
    await asyncio.sleep(0)
    waiting = [offered(sessions, f"s{number}")[1] for number in range(3)]
    await asyncio.gather(*waiting)
    assert (await other)[0] == "s1"
    await asyncio.sleep(0)
    assert sum(claim.done() for claim in greedy) == 2
    for claim in greedy:
        claim.cancel()


async def test_a_client_that_waits_takes_a_session_back_from_the_one_with_the_most(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first turn the session is claimed again; a rollout that has begun is abandoned."""
    async with serving(folder, tmp_path) as service:
        making = [service.rollouts.start(replace(TASK, rollout_id=f"r{number}")) for number in range(2)]
        first, second = [await service.claim() for _ in making]
        await service.say(second, second["messages"])
        monkeypatch.setattr(agent, "SHARE_S", 0.05)
        other = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
        async with httpx.AsyncClient(base_url=service.http.base_url, transport=other, timeout=LIMIT_S) as http:
            given = (await http.post("/v1/sessions", json={})).json()
            assert (given["id"], given["key"] != first["key"]) == (first["id"], True)
            late = await service.ask(first, first["messages"])
            assert late.status_code == 401 or "another client waited" in late.text
            refused = await http.post("/v1/sessions", json={"wait_s": 0.3})
            assert refused.status_code == 503, "both have one"
            await service.close(second)
            await making[1]
        making[0].cancel()


async def test_one_client_has_at_most_half_of_the_places_of_waiting_agents() -> None:
    shares = Shares(4, "agents wait")
    with shares.place("a"), shares.place("a"), shares.place("b"):
        with pytest.raises(ApiFault, match="3 of 4 agents wait, 2 of them yours"), shares.place("a"):
            pass
        with shares.place("c"):
            pass
    with shares.place("a"):
        pass


async def test_a_claim_that_is_given_up_loses_no_session() -> None:
    sessions = AgentSessions()
    given_up = asyncio.create_task(sessions.claim("a"))
    await asyncio.sleep(0)
    session, offering = offered(sessions, "s1")
    await offering  # the claim has it, and has not noticed
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    assert session.requests.get_nowait() is None, "its rollout offers it again"
    late = asyncio.create_task(sessions.claim("a"))
    await asyncio.sleep(0)
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    assert not sessions._waiting


async def test_keys_of_sessions_are_for_sessions_and_tokens_are_for_agents(folder: Path, tmp_path: Path) -> None:
    secret, line = new_api_key("agents")
    (tmp_path / "tokens").write_text(line)
    async with serving(folder, tmp_path, tokens_file=str(tmp_path / "tokens")) as service:
        assert (await service.http.post("/v1/sessions", json={})).status_code == 401
        making = service.rollouts.start(TASK)
        token = {"authorization": f"Bearer {secret}"}
        session = (await service.http.post("/v1/sessions", headers=token)).json()
        made_up = {**session, "key": session["key"] + "x"}
        assert (await service.ask(made_up, session["messages"])).status_code == 401
        with_token = await service.http.post(f"/v1/sessions/{session['id']}/reward", headers=token)
        assert with_token.status_code == 401
        await service.say(session, session["messages"])
        assert (await service.close(session)).status_code == 200
        await making


async def test_without_agents_there_are_no_sessions(folder: Path, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        metrics = GenerationMetrics()
        inner = FakeEngine(max_running=4, max_tokens_total=CAPACITY, guest_places=8, script=saying("x"))
        engine = await stack.enter_async_context(SteppedEngine(inner, metrics))
        config = load_config(None, [*SERVED])
        address = await start_openai(config, folder, engine, Policies(engine), metrics.api, stack)
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=LIMIT_S))
        url = f"http://{address}/v1/sessions"
        for path in ("", "/any/reward"):
            answer = await http.post(url + path)
            assert (answer.status_code, "kind is not agent" in answer.text) == (404, True)


@pytest.mark.trainers
async def test_the_openai_client_makes_a_rollout(folder: Path, tmp_path: Path) -> None:
    async with serving(folder, tmp_path) as service:
        making = service.rollouts.start(TASK)
        url = str(service.http.base_url).rstrip("/")
        found = await asyncio.to_thread(output_of, "openai_session.py", url)
        rollout = await making
    print(f"openai {found['openai']}: {found['closed']}")
    assert (found["streamed"], "must begin with the 4" in found["refused"]) == (ANSWERS[1], True)
    assert (found["closed"]["turns"], rollout.own_reward, len(rollout.segments)) == (2, 0.5, 4)


async def test_curl_makes_a_rollout_of_two_turns(folder: Path, tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "agent_with_tools" / "rollout.sh"
    async with serving(folder, tmp_path, 'print("\\(a\\n)")\n', "print(1)") as service:
        making = service.rollouts.start(replace(TASK, prompt="a \\n b\n"))
        command = (str(script), str(service.http.base_url).rstrip("/"))
        curl = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
        printed, errors = await curl.communicate()
        assert curl.returncode == 0, errors
        assert b"again: print(1)\n" in printed
        rollout = await making
    assert (rollout.own_reward, len(rollout.segments), rollout.text) == (1.0, 4, "print(1)")


def test_a_run_with_agents_needs_their_address_and_says_it() -> None:
    of_agents = 'generation.environment={kind = "agent"}'
    with pytest.raises(ConfigError, match=r"kind agent needs openai\.http, the address at which agents claim sessions"):
        load_config(None, [of_agents])
    (line,) = agent_lines(load_config(None, [of_agents, "generation.openai.http=127.0.0.1:8010"]))
    assert "http://127.0.0.1:8010/v1/sessions" in line
    assert not agent_lines(load_config(None))
