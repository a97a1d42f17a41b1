"""The checkpoint of the policy that is measured: the learner keeps it.

The learner keeps the checkpoint of the policy that an evaluation measures in the run folder. It has the state of a
version only until it trains the next batch. So it is asked before that version exists, and the version that it keeps is
the one that is measured.

INVARIANT: when the block of `kept_checkpoint` ends without an error, the checkpoint of its version is complete on the
disk.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from nouscoder.config import Config
from nouscoder.errors import NousCoderError
from nouscoder.rpc.channel import PeerError
from nouscoder.rpc.learner_client import LearnerClient
from nouscoder.rpc.tls import channel_credentials
from nouscoder.run.evaluation_files import kept_checkpoint_folder


class NotKept(NousCoderError):
    """The learner has not kept a checkpoint. The message says why."""


@asynccontextmanager
async def kept_checkpoint(config: Config, from_version: int) -> AsyncIterator[int]:
    """Have the learner keep the checkpoint of this policy version, or of the first later one that is possible.

    The block gets the version as soon as its state is copied, and ends when the checkpoint is complete. The learner may
    be silent for evaluation.limit_s. Raises NotKept.
    """
    client = LearnerClient(config.learner.grpc, channel_credentials(config.tls), config.asked_run)
    async with client as learner, aclosing(_asked(learner, from_version, config.evaluation.limit_s)) as answers:
        version = await anext(answers, None)
        if version is None:
            raise NotKept("the learner kept no checkpoint")
        try:
            yield version
        except Exception:
            await _ended(answers)  # the learner writes nothing more, so what it kept can be removed
            raise
        fault = await _ended(answers)
    if not kept_checkpoint_folder(config.run.folder, version).is_dir():
        raise NotKept(f"the checkpoint of version {version} was not kept: {fault or 'the learner ended'}")


async def _asked(learner: LearnerClient, from_version: int, limit_s: float) -> AsyncGenerator[int, None]:
    """The version, once when its state is copied and once when it is complete. Raises NotKept."""
    try:
        async with aclosing(learner.keep_checkpoint(from_version, limit_s)) as answers:
            async for version, _ in answers:
                yield version
    except PeerError as error:
        raise NotKept(str(error)) from error


async def _ended(answers: AsyncGenerator[int, None]) -> str:
    """Wait until the learner has said all. Returns why it did not, if it did not."""
    try:
        async for _ in answers:
            pass
    except NotKept as error:
        return str(error)
    return ""
