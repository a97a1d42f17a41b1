"""Runs the proposals of a round with real services: generation samples the policy, the verifier runs every program.

The services are those of a run without batches, in a run folder of its own. Its broker admits nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from nouscoder.config import Config
from nouscoder.domain.policy import PolicyManifest
from nouscoder.domain.rollout import Rollout, Task
from nouscoder.errors import Unusable
from nouscoder.evaluation.pass_at_1 import Pinning, sample_tasks, verdict_on
from nouscoder.generation.environments.base import EnvironmentUnusable, TaskRefused
from nouscoder.generation.environments.prompts import Prompts
from nouscoder.policy_folder.tokenizer import TokenizerError, load_tokenizer
from nouscoder.rpc.generation_client import GenerationClient
from nouscoder.rpc.tls import channel_credentials
from nouscoder.rpc.verifier_client import VerifierClient, verifier_token
from nouscoder.run.deployment import deployment
from nouscoder.run.evaluation import first_policy, while_alive
from nouscoder.run.folder import RunFolder
from nouscoder.run.services import RunServices
from nouscoder.run.smoke_problems import admit_nothing
from nouscoder.run.view import View
from nouscoder.self_play.known import Known
from nouscoder.self_play.round import Round, RoundWork


async def propose(folder: RunFolder, config: Config, number: int, known: Known, view: View) -> None:
    """Make judged.jsonl and accepted.jsonl in the folder. Raises NousCoderError with one sentence."""
    fits = room_for_answers(config)
    async with deployment(config).open_services(folder, config, view.say, None) as services:
        services.start("broker", "verifier", "generation")
        await admit_nothing(services.config)
        manifest, credentials = first_policy(services.config), channel_credentials(services.config.tls)
        address, token = services.config.verifier.grpc, verifier_token(services.config)
        round_ = Round(services.config, number, folder.path, known, manifest.digest)
        async with VerifierClient(address, credentials=credentials, token=token) as grader:
            work = RoundWork(_Sampler(services, manifest, view), partial(verdict_on, grader), fits, view.progress)
            await while_alive(services, round_.run(work))


def room_for_answers(config: Config) -> Callable[[Task], bool]:
    """Whether prompt and answer of a task fit in generation.max_tokens_total, and the vocabulary has the prompt."""
    folder = config.in_run_folder(config.policy.path)
    try:
        environment = config.generation.environment
        prompts = Prompts(load_tokenizer(folder, environment.date), environment)
    except (TokenizerError, EnvironmentUnusable) as error:
        raise Unusable(f"policy.path: {error}") from error

    def fits(task: Task) -> bool:
        try:
            num_tokens = len(prompts.prompt_of(task))
        except TaskRefused:
            return False
        return num_tokens + task.sampling.max_new_tokens <= config.generation.max_tokens_total

    return fits


class _Sampler:
    """Samples tasks from one policy. What was sampled before an interruption of the service is not sampled again."""

    def __init__(self, services: RunServices, manifest: PolicyManifest, view: View) -> None:
        self._services = services
        self._manifest = manifest
        self._view = view

    async def __call__(self, tasks: Sequence[Task], took: Callable[[Rollout], object]) -> None:
        config, left = self._services.config, {task.rollout_id: task for task in tasks}

        def keep(rollout: Rollout) -> None:
            took(rollout)
            del left[rollout.rollout_id]

        async def once() -> None:
            client = GenerationClient(config.generation.grpc, credentials=channel_credentials(config.tls))
            async with client as source:
                pinning = Pinning(self._manifest, config.evaluation.limit_s)
                await sample_tasks(source, pinning, [*left.values()], keep)

        await self._services.evaluation_retry.call(once, lambda error: self._view.say(f"sampling goes on: {error}"))
