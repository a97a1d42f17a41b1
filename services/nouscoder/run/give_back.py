"""What a finished run gives back on Kubernetes: the objects of `run.release`, whose pods have the GPUs.

`give_back` is called in the learner's pod after the report is written, or when a guard has ended the run. It waits
`after_s`, starts the pod that shows the run from then on, and deletes the objects. The pod that shows the run calls it
too; without a token of an account it has no right to delete, and says what was given back.

INVARIANT: nothing is deleted before the learner has finished the run and the checkpoint of its last step is on the
volume. The object of this process' own pod is the last one, and every call may be repeated. So a process that is killed
in between does all of it at its next start.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import Callable
from contextlib import closing
from functools import partial
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any

from nouscoder.atomic_files import numbered
from nouscoder.config import Config
from nouscoder.errors import ExitCode, NousCoderError
from nouscoder.retry import Retry
from nouscoder.rpc.channel import PeerError
from nouscoder.rpc.learner_client import LearnerClient
from nouscoder.rpc.tls import channel_credentials

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # where the chart mounts token and authority
_LIMIT_S = 10.0
_MAX_ANSWER_BYTES = 64 * 1024


class NotGivenBack(NousCoderError):
    """The pods of a finished run keep their GPUs. The message says why."""

    exit_code = ExitCode.UNAVAILABLE


def is_given_back(config: Config) -> bool:
    """Whether this pod only shows the run: there is something to give back, and no right to do it here."""
    return bool(config.run.release.delete) and not (ACCOUNT / "token").exists()


async def give_back(config: Config, say: Callable[[str], None]) -> None:
    """Delete the objects of `run.release`, if any, once the last checkpoint is written. Raises NotGivenBack."""
    wanted = config.run.release
    if not wanted.delete:
        return
    gpus = f"the pods of the run and their {wanted.gpus} GPUs"
    if is_given_back(config):
        say(f"{gpus} were given back: an upgrade of the release makes the pods again")
        return
    say(f"{gpus} are given back in {wanted.after_s:.0f} s")
    await asyncio.sleep(wanted.after_s)

    patient = Retry("giving back the GPUs", (NotGivenBack,), for_s=config.run.peer_patience_s, wait_s=1, max_wait_s=15)
    step = await patient.call(lambda: _last_checkpoint(config))
    say(f"the checkpoint of step {step} is on the volume: {gpus} are given back now")
    await patient.call(lambda: _show_elsewhere(wanted.start))
    for path in wanted.delete:
        await patient.call(partial(_asked, "DELETE", f"{path}?propagationPolicy=Background"))


async def _last_checkpoint(config: Config) -> int:
    """The step of the learner, when its checkpoint is on the volume. Raises NotGivenBack."""
    client = LearnerClient(config.learner.grpc, channel_credentials(config.tls), config.asked_run)
    try:
        async with client as learner:
            status = await learner.status()
    except PeerError as error:
        raise NotGivenBack(f"the learner does not say that it has written its last checkpoint: {error}") from error
    if status.state != "finished" or status.step not in numbered(config.run.folder / "checkpoints"):
        raise NotGivenBack(f"the learner ({status.state}) has not written the checkpoint of step {status.step} yet")
    return status.step


async def _show_elsewhere(deployments: tuple[str, ...]) -> None:
    """Give the Deployment that exists one pod. Raises NotGivenBack."""
    one = {"spec": {"replicas": 1}}
    if not any([await _asked("PATCH", f"{path}/scale", one) for path in deployments]):
        raise NotGivenBack(f"no pod would show the run: none of {', '.join(deployments)} exists")


async def _asked(method: str, path: str, body: Any = None) -> bool:
    """Ask the Kubernetes API. False: there is no such object. Raises NotGivenBack."""
    return await asyncio.to_thread(_ask, method, path, body)


def _ask(method: str, path: str, body: Any) -> bool:
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc")
    port = int(os.environ.get("KUBERNETES_SERVICE_PORT", "443"))
    try:
        token = (ACCOUNT / "token").read_text("ascii").strip()
        trusted = ssl.create_default_context(cafile=ACCOUNT / "ca.crt")
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/merge-patch+json"}
        with closing(HTTPSConnection(host, port, timeout=_LIMIT_S, context=trusted)) as connection:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            said = answer.read(_MAX_ANSWER_BYTES).decode("utf8", "replace")
    except (OSError, HTTPException) as error:
        raise NotGivenBack(f"the Kubernetes API at {host} does not answer: {error}") from error
    if answer.status not in (200, 202, 404):
        raise NotGivenBack(f"the Kubernetes API refuses {method} {path}: {answer.status} {said[:500]}")
    return answer.status != 404
