"""A policy folder as the model of an evaluation: served by this process, in the form of OpenAI's API.

`generation.engine`, `device` and `threads` of the configuration choose the engine. The name of the model ends with the
digest of its weights, so an evaluation never takes samples of other weights for its own.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nouscoder.config import Config, OpenAISection
from nouscoder.domain.policy import PolicyManifest
from nouscoder.errors import Unusable
from nouscoder.policy_folder.compose import CONFIG_FILE, with_yarn
from nouscoder.policy_folder.inspection import context_tokens, downloaded, faults_of, is_hub_id
from nouscoder.policy_folder.weights_files import shards_of

_DIGEST_CHARACTERS = 12


class CheckpointUnusable(Unusable):
    """A folder cannot be evaluated as asked. The message says why."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The policy in `folder`. With a YaRN factor it has factor * original_tokens positions (arXiv 2309.00071)."""

    folder: Path
    yarn_factor: float = 0.0
    yarn_original_tokens: int = 0

    @classmethod
    def named(cls, name: str, yarn_factor: float = 0.0, yarn_original_tokens: int = 0) -> Checkpoint:
        """The policy in a folder, or of a hub. Raises CheckpointUnusable and HubUnavailable."""
        if bool(yarn_factor) != bool(yarn_original_tokens) or 0 < yarn_factor <= 1:
            raise CheckpointUnusable("YaRN needs --yarn-factor above 1 and --yarn-original-tokens")
        folder = Path(name)
        if not folder.exists() and is_hub_id(name):
            folder = downloaded(name)
        if faults := faults_of(folder):
            exported = "; nouscoder export writes a policy of a run as a whole folder" if folder.is_dir() else ""
            raise CheckpointUnusable(f"--policy: {faults[0]}{exported}")
        return cls(folder.resolve(), yarn_factor, yarn_original_tokens)

    def model(self, name: str = "") -> str:
        """The name of the model: `name`, or that of the folder, and the digest of the weights. Reads every weight."""
        digest = PolicyManifest(0, 0, str(self.folder), shards_of(self.folder)).digest[:_DIGEST_CHARACTERS]
        yarn = f"-yarn-{self.yarn_factor:g}x{self.yarn_original_tokens}" if self.yarn_factor else ""
        return f"{name or self.folder.name}-{digest}{yarn}"

    async def tokens_needed(self, requests: Sequence[dict[str, Any]]) -> int:
        """The most tokens that one of these chat requests has, prompt and completion together.

        Raises CheckpointUnusable when they are more than the context, and ApiFault for a request that is not taken.
        """
        from nouscoder.generation.openai.api import longest_prompt

        prompt = await longest_prompt(self.folder, requests)
        wanted: int = max(request["max_tokens"] for request in requests)
        context = round(self.yarn_factor * self.yarn_original_tokens) or context_tokens(self.folder)
        if context is None or prompt + wanted <= context:
            return prompt + wanted
        fault = f"the longest prompt has {prompt} tokens, and the context of {self.folder} is {context}"
        if prompt < context:
            fault += (
                f": give --max-tokens {context - prompt} instead of {wanted}, or a longer context with --yarn-factor"
            )
        raise CheckpointUnusable(fault)

    @asynccontextmanager
    async def serving(self, config: Config, requests: Sequence[dict[str, Any]], at_once: int) -> AsyncIterator[str]:
        """The URL of a server that answers these chat requests, `at_once` at the same time.

        Raises as `tokens_needed`, and what starting an engine raises.
        """
        from nouscoder.generation.openai.api import serving_folder

        served = _served(config, requests[0]["model"], await self.tokens_needed(requests), at_once)
        with tempfile.TemporaryDirectory(prefix="nouscoder-policy-") as temporary:
            folder = self._with_yarn(Path(temporary)) if self.yarn_factor else self.folder
            async with serving_folder(served, folder) as address:
                yield f"http://{address}/v1"

    def _with_yarn(self, to: Path) -> Path:
        """The folder `to`, with links to the files of the policy, and config.json with YaRN."""
        for file in self.folder.iterdir():
            (to / file.name).symlink_to(file)
        (to / CONFIG_FILE).unlink()
        (to / CONFIG_FILE).write_text(json.dumps(with_yarn(self.folder, self.yarn_factor, self.yarn_original_tokens)))
        return to


def _served(config: Config, model: str, num_tokens: int, at_once: int) -> Config:
    """`config` for a server of one policy, with places for `at_once` completions of `num_tokens` tokens."""
    # Evaluations wait for an answer as long as OpenAIServer does.
    api = OpenAISection(http="127.0.0.1:0", model=model, slots=at_once, max_requests=2 * at_once)
    changed = {"max_tokens_total": num_tokens, "engine_tokens_total": 0, "max_running": at_once, "openai": api}
    return config.model_copy(update={"generation": config.generation.model_copy(update=changed)})
