"""The tools of environments, with a time limit on each call. Today's tool is the verifier.

INVARIANT: a call ends within its limit, with the tool's answer or with an error. `num_waiting` counts the calls that
have not ended: their rollouts need no place in the engine.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from nouscoder.domain.submission import Submission
from nouscoder.domain.verdict import Verdict
from nouscoder.generation.environments.base import TaskRefused, ToolUnavailable
from nouscoder.rpc.channel import PeerError, PeerRefused


class Grader(Protocol):
    """Grades submissions; implemented by VerifierClient."""

    async def grade(self, submission: Submission) -> Verdict:
        """The verdict. Raises PeerError."""
        ...


class Tools:
    """The tools that an environment may call while a rollout is made."""

    def __init__(self, grader: Grader, limit_s: float) -> None:
        """Each call waits at most `limit_s` seconds."""
        self._grader = grader
        self._limit_s = limit_s
        self.num_waiting = 0

    async def grade(self, submission: Submission) -> Verdict:
        """The verifier's verdict, never internal_error.

        Raises ToolUnavailable when there is none in time, and TaskRefused when the verifier refuses the submission.
        """
        self.num_waiting += 1
        try:
            async with asyncio.timeout(self._limit_s):
                verdict = await self._grader.grade(submission)
        except TimeoutError:
            raise ToolUnavailable(f"the verifier gave no verdict within {self._limit_s:g} s") from None
        except PeerRefused as error:
            raise TaskRefused(f"the public tests cannot be run: {error}") from error
        except PeerError as error:
            raise ToolUnavailable(str(error)) from error
        finally:
            self.num_waiting -= 1
        if verdict.is_ours:
            raise ToolUnavailable(f"the verifier failed: {verdict.detail}")
        return verdict
