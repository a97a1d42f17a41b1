"""A finished run gives its pods back: after its last checkpoint, in order, by exactly the calls of `run.release`.

The learner's API is real gRPC. The Kubernetes API is an HTTPS server with a certificate of its own authority.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.certificates import make_certificate

from nouscoder.config import Config, ConfigError, load_config
from nouscoder.config.run import ReleaseSection
from nouscoder.config.tree import NOTHING_GIVEN
from nouscoder.run import give_back as giving_back
from nouscoder.run import loop
from nouscoder.run.folder import record_of
from nouscoder.run.give_back import NotGivenBack, give_back
from nouscoder.run.learning_signal import NothingToLearn
from nouscoder.v1 import learner_pb2, learner_pb2_grpc

AT = "/apis/apps/v1/namespaces/here"
GIVEN_BACK = [f"{AT}/deployments/x-generation", f"{AT}/statefulsets/x-learner"]
PAGES = [f"{AT}/deployments/x-pages", f"{AT}/deployments/x-pages-again"]
DELETED = [f"DELETE {path}?propagationPolicy=Background" for path in GIVEN_BACK]
STARTED = [f"PATCH {path}/scale" for path in PAGES]


class Learner(learner_pb2_grpc.LearnerServiceServicer):
    state, step = "finished", 8

    async def Status(self, request: Any, context: Any) -> Any:  # noqa: N802
        return learner_pb2.LearnerServiceStatusResponse(step=self.step, state=self.state)


@dataclass
class Rig:
    """A finished run of 8 steps, and what the Kubernetes API was asked; `answers` are its codes, else 200."""

    config: Config
    learner: Learner
    asked: list[str] = field(default_factory=list)
    answers: dict[str, int] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    async def give_back(self) -> None:
        await give_back(self.config, self.said.append)


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    account = tmp_path / "account"
    account.mkdir()
    make_certificate(account)
    (account / "token").write_text("secret\n")
    monkeypatch.setattr(giving_back, "ACCOUNT", account)
    learner = Learner()  # type: ignore[abstract]
    server = grpc.aio.server()
    learner_pb2_grpc.add_LearnerServiceServicer_to_server(learner, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    release_of_run = {"delete": GIVEN_BACK, "start": PAGES, "after_s": 0, "gpus": 48}
    sets = [f"run.release.{key}={str(value).replace(chr(39), chr(34))}" for key, value in release_of_run.items()]
    own = (
        f'run.root="{tmp_path}"',
        "run.services=external",
        "run.peer_patience_s=0.5",
        f"learner.grpc=127.0.0.1:{port}",
    )
    rig = Rig(load_config(None, [*own, *sets]), learner)
    (rig.config.run.folder / "checkpoints" / "00000008").mkdir(parents=True)

    class Api(BaseHTTPRequestHandler):
        def do_any(self) -> None:
            assert self.headers["Authorization"] == "Bearer secret"
            if length := int(self.headers.get("Content-Length") or 0):
                assert self.rfile.read(length) == b'{"spec": {"replicas": 1}}'
                assert self.headers["Content-Type"] == "application/merge-patch+json"
            line = f"{self.command} {self.path}"
            rig.asked.append(line)
            self.send_response(rig.answers.get(line, 200))
            self.end_headers()
            self.wfile.write(b'{"message": "said"}')

        do_PATCH = do_DELETE = do_any  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:
            pass

    api = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(account / "tls.crt", account / "tls.key")
    api.socket = context.wrap_socket(api.socket, server_side=True)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.server_port))
    thread = threading.Thread(target=api.serve_forever, daemon=True)
    thread.start()
    yield rig
    api.shutdown()
    api.server_close()
    await server.stop(0)


async def test_the_pages_start_and_the_objects_are_deleted_the_learners_own_last(rig: Rig) -> None:
    rig.answers = {STARTED[0]: 404, DELETED[0]: 404}  # the other name; deleted at an earlier start
    await rig.give_back()
    assert rig.asked == [*STARTED, *DELETED]
    assert "48 GPUs" in rig.said[0]
    assert "checkpoint of step 8" in rig.said[1]


@pytest.mark.parametrize(("state", "step"), [("checkpointing", 8), ("finished", 9)])
async def test_nothing_goes_before_the_last_checkpoint_is_on_the_volume(rig: Rig, state: str, step: int) -> None:
    rig.learner.state, rig.learner.step = state, step
    with pytest.raises(NotGivenBack, match=f"the learner \\({state}\\) has not written the checkpoint of step {step}"):
        await rig.give_back()
    assert rig.asked == []


async def test_a_checkpoint_that_is_being_written_does_not_count(rig: Rig) -> None:
    (rig.config.run.folder / "checkpoints" / "00000008").rename(rig.config.run.folder / "checkpoints" / "00000008.part")
    with pytest.raises(NotGivenBack):
        await rig.give_back()
    assert rig.asked == []


async def test_without_a_pod_that_shows_the_run_nothing_is_deleted(rig: Rig) -> None:
    rig.answers = dict.fromkeys(STARTED, 404)
    with pytest.raises(NotGivenBack, match="no pod would show the run"):
        await rig.give_back()
    assert not set(rig.asked) & set(DELETED)


async def test_a_refusal_is_told_with_the_call_and_what_follows_stays(rig: Rig) -> None:
    rig.answers = {DELETED[0]: 403}
    with pytest.raises(NotGivenBack, match=r"refuses DELETE .*x-generation.*: 403 .*said"):
        await rig.give_back()
    assert DELETED[1] not in rig.asked


async def test_a_pod_without_a_token_only_says_what_was_given_back(rig: Rig) -> None:
    (giving_back.ACCOUNT / "token").unlink()
    await rig.give_back()
    assert rig.asked == []
    assert "48 GPUs were given back" in rig.said[0]


async def test_an_api_of_another_authority_gets_no_token(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (giving_back.ACCOUNT / "ca.crt").write_bytes((make_certificate(tmp_path / "other") / "ca.crt").read_bytes())
    with pytest.raises(NotGivenBack, match=r"does not answer: .*CERTIFICATE_VERIFY_FAILED"):
        await rig.give_back()
    assert rig.asked == []


def test_a_local_run_has_nothing_to_give_back() -> None:
    with pytest.raises(ConfigError, match=r"release.delete needs services"):
        load_config(None, ['run.release.delete=["/apis"]'])


async def test_a_run_that_a_guard_has_ended_gives_its_pods_back_too_and_the_pod_of_the_pages_never_goes_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = []

    async def ended(*_: Any) -> None:
        ends.append("nothing to learn")
        raise NothingToLearn("nothing to learn")

    monkeypatch.setattr(loop, "run_loop", ended)
    (rig.config.run.folder / "config.toml").write_text(record_of(rig.config))
    await loop._train(rig.config, resume=False, given=NOTHING_GIVEN)
    assert rig.asked == [*STARTED, *DELETED]
    (giving_back.ACCOUNT / "token").unlink()
    await loop._train(rig.config, resume=False, given=NOTHING_GIVEN)
    assert len(ends) == 1
    with pytest.raises(NothingToLearn):
        await loop._train(rig.config.changed(run={"release": ReleaseSection()}), resume=False, given=NOTHING_GIVEN)
