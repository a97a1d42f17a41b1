"""A policy folder as the model of an evaluation: served by this process in OpenAI's form."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nouscoder.config import Config, OpenAISection
from nouscoder.config.devices import device_fault
from nouscoder.domain.policy import PolicyManifest
from nouscoder.errors import Unusable, WrongUse, for_terminal
from nouscoder.extras import MODEL_LIBRARIES, require
from nouscoder.http_server.api_keys import new_api_key
from nouscoder.policy_folder.compose import CONFIG_FILE, merged_policy, with_yarn
from nouscoder.policy_folder.engine_choice import missing_engine, with_engine
from nouscoder.policy_folder.inspection import context_tokens, downloaded, engine_faults, faults_of, is_hub_id
from nouscoder.policy_folder.prompt_file import prompt_lines, with_date, with_recorded_prompt
from nouscoder.policy_folder.weights_files import is_adapter, shards_of
from nouscoder.rpc.server import stop_event

_DIGEST_CHARACTERS = 12


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """The policy in `folder`. With a YaRN factor it has factor * original_tokens positions (arXiv 2309.00071).

    Its chat template writes the day `date`.
    """

    folder: Path
    yarn_factor: float = 0.0
    yarn_original_tokens: int = 0
    date: str = ""

    @classmethod
    def named(cls, name: str, yarn_factor: float = 0.0, yarn_original_tokens: int = 0) -> ServedPolicy:
        """The policy in a folder, or of a hub. Raises Unusable, WrongUse and HubUnavailable."""
        if bool(yarn_factor) != bool(yarn_original_tokens) or 0 < yarn_factor <= 1:
            raise WrongUse("YaRN needs --yarn-factor above 1 and --yarn-original-tokens")
        folder = Path(name)
        if not folder.exists() and is_hub_id(name):
            folder = downloaded(name)
        if faults := faults_of(folder):
            exported = "; nouscoder export writes a policy of a run as a whole folder" if folder.is_dir() else ""
            raise Unusable(f"--policy: {faults[0]}{exported}")
        return cls(folder.resolve(), yarn_factor, yarn_original_tokens)

    def runnable(self, config: Config) -> Config:
        """`config` with the engine for the policy. Raises Unusable and ExtraMissing."""
        config, _ = with_engine(config, self.folder, beside_learner=False)
        how = "give --set generation.engine=vllm"
        faults = engine_faults(self.folder, config.generation.engine, how=how) or missing_engine(config)
        if faults:
            raise Unusable(f"--policy: {faults[0]}")
        if fault := device_fault("generation.device", config.generation.device):
            raise Unusable(fault)
        require("generation", *MODEL_LIBRARIES)
        return config

    def model(self, name: str = "") -> str:
        """The name of the model: `name`, or that of the folder, and the digest of the weights. Reads every weight."""
        digest = PolicyManifest(0, 0, str(self.folder), shards_of(self.folder)).digest[:_DIGEST_CHARACTERS]
        yarn = f"-yarn-{self.yarn_factor:g}x{self.yarn_original_tokens}" if self.yarn_factor else ""
        return f"{name or self.folder.name}-{digest}{yarn}"

    async def tokens_needed(self, requests: Sequence[dict[str, Any]]) -> int:
        """The most tokens that one of these requests has, prompt and completion together.

        Raises Unusable when they are more than the context, and ApiFault for a request that is not taken.
        """
        from nouscoder.generation.openai.api import longest_prompt

        prompt = await longest_prompt(self.folder, requests, self.date)
        wanted: int = max(request["max_tokens"] for request in requests)
        context = round(self.yarn_factor * self.yarn_original_tokens) or context_tokens(self.folder)
        if context is None or prompt + wanted <= context:
            return prompt + wanted
        fault = f"the longest prompt has {prompt} tokens, and the context of {self.folder} is {context}"
        if prompt < context:
            fault += (
                f": give --max-tokens {context - prompt} instead of {wanted}, or a longer context with --yarn-factor"
            )
        raise Unusable(fault)

    @asynccontextmanager
    async def serving(
        self, config: Config, requests: Sequence[dict[str, Any]], at_once: int
    ) -> AsyncIterator[tuple[str, str]]:
        """URL and key of a server that answers these requests, `at_once` at the same time.

        Without the key, other users of this machine could use the server. Raises as `tokens_needed`, and what starting
        an engine raises.
        """
        from nouscoder.generation.openai.api import serving_folder

        key, stored = new_api_key("evaluation")
        with tempfile.TemporaryDirectory(prefix="nouscoder-policy-") as temporary:
            keys = Path(temporary) / "keys"
            keys.write_text(stored)
            environment = config.generation.environment.model_copy(update={"date": self.date})
            config = config.changed(generation={"environment": environment})
            # Evaluations wait for an answer as long as OpenAIServer does.
            api = OpenAISection(
                http="127.0.0.1:0",
                model=requests[0]["model"],
                slots=at_once,
                max_requests=2 * at_once,
                tokens_file=str(keys),
            )
            changed = {
                "max_tokens_total": await self.tokens_needed(requests),
                "engine_tokens_total": 0,
                "max_running": 1,
                "openai": api,
            }
            served = config.changed(generation=changed)
            folder = self._with_yarn(Path(temporary) / "policy") if self.yarn_factor else self.folder
            async with serving_folder(served, folder) as address:
                yield f"http://{address}/v1", key

    def _with_yarn(self, to: Path) -> Path:
        """The new folder `to`, with links to the files of the policy, and config.json with YaRN."""
        to.mkdir()
        for file in self.folder.iterdir():
            (to / file.name).symlink_to(file)
        (to / CONFIG_FILE).unlink()
        (to / CONFIG_FILE).write_text(json.dumps(with_yarn(self.folder, self.yarn_factor, self.yarn_original_tokens)))
        return to


async def serve_policy(config: Config, name: str) -> None:
    """Serve the policy in a folder, an adapter's with its base, or of a hub, in OpenAI's form until SIGTERM or SIGINT.

    Raises as `runnable` and `named`, and what starting an engine raises.
    """
    from nouscoder.generation.openai.api import serving_folder

    stop, given = stop_event(), Path(name)
    with tempfile.TemporaryDirectory(prefix="nouscoder-policy-") as temporary:
        whole = merged_policy(Path(temporary) / "policy", given) if is_adapter(given) else name
        policy = ServedPolicy.named(str(whole))
        config = with_date(with_recorded_prompt(policy.runnable(config), policy.folder), policy.folder)
        ours, api = config.generation, config.generation.openai
        own = {"http": api.http or "127.0.0.1:8000", "model": api.model or given.name or policy.folder.name}
        changed: dict[str, Any] = {"max_running": 1, "engine_tokens_total": 0, "openai": api.model_copy(update=own)}
        if "max_tokens_total" not in ours.model_fields_set:
            changed["max_tokens_total"] = context_tokens(policy.folder) or ours.max_tokens_total
        async with serving_folder(config.changed(generation=changed), policy.folder) as address:
            lines = [f"{name} is served as {own['model']} at http://{address}/v1"]
            sys.stderr.write(for_terminal("\n".join([*lines, *prompt_lines(ours.environment, policy.folder), ""])))
            await stop.wait()
