"""The engine alone, without service and broker, and the policies of `nouscoder bench generation`.

It runs in the Python of the engine, as a process of its own:

    python -m nouscoder.bench.generation_offline policies FOLDER
        saves two random policies of one architecture in FOLDER/0 and FOLDER/1
    python -m nouscoder.bench.generation_offline rate SECONDS SETTING...
        samples the bench's prompts for about SECONDS; prints {"tokens_per_second": ...}
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from nouscoder.config import Config, load_config
from nouscoder.demo.prepare import as_problem
from nouscoder.demo.problems import Split, problems
from nouscoder.domain.problem import Problem
from nouscoder.domain.rollout import Sampling
from nouscoder.generation.engines.base import SampleRequest

NUM_PROMPTS = 64
MAX_NEW_TOKENS = 512
MAX_TOKENS_TOTAL = 1024
# Random weights give every token about the same probability, so a rollout has some 400 of at most 512 tokens.
_VOCABULARY = 1024
# Requests that start together have short caches for as long as the first ones last. The service has requests of every
# age, so the engine alone is measured after so many generations of requests.
_WARM_UP_GENERATIONS = 2


def bench_problems() -> list[Problem]:
    """The problems of the demo whose prompts are sampled."""
    return [as_problem(problem) for problem in problems(Split.TRAIN, NUM_PROMPTS, seed=0)]


def save_policies(folder: Path) -> None:
    """Random policies of a few million parameters with the demo's tokenizer."""
    from nouscoder.demo.policy import PolicySize, build_policy, save_policy

    size = PolicySize(hidden_size=256, num_layers=4, intermediate_size=512, max_positions=MAX_TOKENS_TOTAL)
    for seed in range(2):
        save_policy(build_policy(seed=seed, size=size, vocab_size=_VOCABULARY), folder / str(seed))


def offline_rate(config: Config, seconds: float) -> float:
    """Tokens per second of the engine that the configuration names. What warms it up does not count."""
    if config.generation.engine == "vllm":
        return _vllm_rate(config, seconds)
    return _step_rate(config, seconds)


def _requests(folder: Path) -> Iterator[SampleRequest]:
    """Requests without end, for the prompts in turn, each with a seed of its own."""
    from nouscoder.policy_folder.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder)
    prompts = [tokenizer.encode(problem.prompt) for problem in bench_problems()]
    for number in count():
        sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS, seed=number + 1)
        yield SampleRequest(f"r{number}", prompts[number % NUM_PROMPTS], sampling, tokenizer.stop_ids)


def _step_rate(config: Config, seconds: float) -> float:
    """Steps in a loop, with requests waiting all the time."""
    from nouscoder.generation.engines import step_engine
    from nouscoder.policy_folder.weights_files import weights_files

    engine = step_engine(config, config.policy.path)
    engine.load_policy(weights_files(config.policy.path), 0)
    requests = _requests(config.policy.path)

    max_running = config.generation.max_running

    def step() -> int:
        while engine.num_waiting < max_running:
            engine.add(next(requests))
        return len(engine.step())

    num_ended = 0
    while num_ended < _WARM_UP_GENERATIONS * max_running:
        num_ended += step()
    begun_s, tokens_before = time.monotonic(), engine.num_tokens
    while (spent_s := time.monotonic() - begun_s) < seconds:
        step()
    return (engine.num_tokens - tokens_before) / spent_s


def _vllm_rate(config: Config, seconds: float) -> float:
    """`LLM.generate` of vLLM, which ends when its last request has ended."""
    from nouscoder.generation.engines.vllm_requests import sampling_params
    from nouscoder.generation.engines.vllm_start import start_offline

    llm = start_offline(config.generation, config.policy.path, MAX_TOKENS_TOTAL)
    requests = _requests(config.policy.path)

    def generate(number: int) -> tuple[int, float]:
        chosen = [next(requests) for _ in range(number)]
        prompts = [{"prompt_token_ids": list(request.prompt_token_ids)} for request in chosen]
        begun_s = time.monotonic()
        outputs = llm.generate(prompts, [sampling_params(one, MAX_NEW_TOKENS) for one in chosen], use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs), time.monotonic() - begun_s

    generate(2)  # what is compiled at the first request does not count
    num_tokens, spent_s = generate(config.generation.max_running)
    rounds = max(4, round(seconds / spent_s))
    num_tokens, spent_s = generate(rounds * config.generation.max_running)
    return num_tokens / spent_s


def main(what: str, *arguments: str) -> None:
    """See the module."""
    if what == "policies":
        save_policies(Path(arguments[0]))
        return
    rate = offline_rate(load_config(None, list(arguments[1:])), float(arguments[0]))
    sys.stdout.write(json.dumps({"tokens_per_second": rate}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
