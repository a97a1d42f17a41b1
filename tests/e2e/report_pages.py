"""Pages of reports with hostile texts and long names: of a run, an evaluation, rollouts, and objectives."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nouscoder.domain.problem import GradingRules
from nouscoder.domain.prompt import PromptForm, PromptSettings
from nouscoder.evaluation.outcomes import Outcome, ProblemOutcomes, results
from nouscoder.evaluation.problems import EvaluatedProblem
from nouscoder.report.compare import write_comparison
from nouscoder.report.evaluation_page import ShownSample, write_evaluation_report
from nouscoder.report.objectives_page import write_objectives_page
from nouscoder.report.rollouts_page import write_rollouts_page

NUM_BATCHES, STEPS_PER_BATCH = 30, 4
HOSTILE = (
    "</code></pre></script><script>document.title='alive'</script>"
    "<img src=http://127.0.0.1:9/x onerror=\"document.title='alive'\">\u2028\u202eprint(1) & ${title}"
)


def metrics_line(step: int, draw: random.Random) -> dict[str, Any]:
    batch, index = divmod(step - 1, STEPS_PER_BATCH)
    rate = min(0.9, 0.35 + 0.012 * batch + 0.02 * (batch % 5))
    last = index == STEPS_PER_BATCH - 1
    return {
        "step": step,
        "batch_id": batch,
        "policy_version": batch + 1,
        "loss": draw.gauss(0, 0.02),
        "skipped": False,
        "reward_mean": 2 * rate - 1,
        "pass_rate": rate,
        "staleness_mean": 1 + 0.2 * (batch % 7),
        "staleness_max": 2 + batch % 3,
        "overlong_share": 0.01,
        "replayed_rollouts": 0,
        "response_length_correct": None if batch < 2 else 31 + batch % 4,
        "response_length_incorrect": 44 + batch % 7,
        "response_length": 38 + batch % 5,
        "repetition_share": 0.0,
        "hard_coding_share": 0.0,
        "same_programs": 0.2,
        "pass_at_g": 1.0,
        "all_groups": {"groups": 20, "reward_mean": 2 * rate - 1.2, "pass_rate": rate - 0.1, "pass_at_g": 0.9},
        "model_reward_correlation": None,
        "entropy": 0.6 - 0.01 * batch,
        "clip_fraction_low": 0.004 * index,
        "clip_fraction_high": 0.006 * index,
        "ratio_mean": 1.0,
        "ratio_min": 1 - 0.1 * index,
        "ratio_max": 1 + 0.3 * index,
        "mismatch_mean": 1.01,
        "mismatch_max": 1.9,
        "mismatch_truncated": 0.001,
        "effective_sample_size": 0.95,
        "approximate_kl": 0.001,
        "mismatch_kl": 0.002,
        "mismatch_abs_mean": 0.01,
        "mismatch_abs_p99": 0.1,
        "mismatch_beyond_2x": 0.001,
        "mismatch_kl_at_0": 0.002,
        "mismatch_kl_versions_2": 0.003,
        "gradient_norm": draw.uniform(0.3, 1.4),
        "learning_rate": 3e-4,
        "tokens": draw.randint(500, 900),
        "tokens_per_second": draw.uniform(2000, 5000),
        "seconds": {
            "wait_for_batch": 0.0 if index else draw.uniform(0.2, 2.0),
            "train": draw.uniform(0.4, 0.9),
            "checkpoint": 0.1 if last else 0.0,
            "publish": 0.05 if last else 0.0,
        },
        "time": 1.7e9 + step,
    }


def sample_line(step: int, program: str) -> dict[str, Any]:
    return {
        "step": step,
        "rollout_id": f"r{step}",
        "problem_id": "sum_plus-3",
        "prompt": "Read numbers. Print their sum plus 3.\n",
        "program": program,
        "verdict": "runtime_error",
        "reward": -1.0,
        "advantage": 0.5,
        "version_range": [step, step + 2],
        "staleness": 2,
        "finish_reason": "stop",
    }


def evaluation(rate: float, version: int, draw: random.Random) -> dict[str, Any]:
    families = [f"family_{index:02}" for index in range(44)]
    samples = []
    for family in families:
        for number in range(4):
            accepted = draw.random() < rate
            program = "a=list(map(int,input().split()))\nprint(sum(a)+3)" if accepted else "a=input(\nprint(sum(a)"
            samples.append(
                {
                    "problem_id": f"{family}-{number}",
                    "family": family,
                    "prompt": "Read numbers. Print their sum plus 3.\n",
                    "program": program,
                    "verdict": "accepted" if accepted else "runtime_error",
                }
            )
    samples[0].update(program=HOSTILE, problem_id=HOSTILE, prompt=HOSTILE, verdict="wrong_answer", family=HOSTILE)
    return {
        "pass_at_1": sum(sample["verdict"] == "accepted" for sample in samples) / len(samples),
        "policy_version": version,
        "num_problems": len(samples),
        "num_rollouts": len(samples),
        "by_family": {},
        "samples": samples,
    }


def write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf8")


def write_run(folder: Path) -> None:
    """Write a complete run folder with the lines of learner/state/run_log.py."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    steps = range(1, NUM_BATCHES * STEPS_PER_BATCH + 1)
    write_lines(folder / "metrics.jsonl", [metrics_line(step, draw) for step in steps])
    samples = [sample_line(step, "print(sum(map(int,input().split()))+3)") for step in steps[::STEPS_PER_BATCH]]
    write_lines(folder / "samples.jsonl", [*samples, sample_line(steps[-1], HOSTILE)])
    before, after = evaluation(0.3, 0, draw), evaluation(0.75, NUM_BATCHES, draw)
    in_flight = {"queued": 12, "sampling": 64, "ready": 128}
    summary = {
        "name": HOSTILE,
        "seed": 0,
        "steps": NUM_BATCHES * STEPS_PER_BATCH,
        "pass_at_1_before": before["pass_at_1"],
        "pass_at_1_after": after["pass_at_1"],
        "learning_seconds": 254.3,
        "ledger": {
            **{"admitted": 2604, "trained": 1920, "filtered": 464, "stale": 16, "abandoned": 0},
            "in_flight": in_flight,
        },
        "balanced": True,
    }
    for name, value in (("summary", summary), ("evaluation_before", before), ("evaluation_after", after)):
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf8")


def write_compared_runs(page: Path) -> Path:
    """Two runs with evaluations of 16 samples a problem, one of them with a long name."""
    runs = [page.parent / "one", page.parent / f"{'long_name_' * 9}<b>"]
    for offset, run in enumerate(runs):
        write_run(run)
        (run / "evaluations").mkdir()
        for version in (0, 10, 20, 30):
            rate = 0.3 + 0.01 * version + 0.05 * offset
            record: dict[str, Any] = {"policy_version": version, "pass_at_1": rate, "standard_error": 0.02}
            record["pass_at_k"] = {"1": rate, "8": rate + 0.2}
            names = {0: "evaluation_before.json", 30: "evaluation_after.json"}
            (run / names.get(version, f"evaluations/{version:08d}.json")).write_text(json.dumps(record))
    return write_comparison(page, runs)


def write_evaluation(page: Path) -> Path:
    """The report of an evaluation of 60 problems with hostile texts and long names."""
    draw = random.Random(0)
    found, shown = [], []
    for number in range(60):
        name = HOSTILE if number == 0 else f"{'long_name_' * 9}{number}"
        problem = EvaluatedProblem(
            *(name, "?", "", ("easy", "hard")[number % 2], HOSTILE, f"2024-{number % 12 + 1:02}-01", "stdin", "d"),
            GradingRules(),
            800.0 + 10 * number,
        )
        samples = [
            Outcome(
                at, 9, draw.randint(1, 60_000), at == 3, {"lcb": draw.choice(("accepted", "no_code")), "process": "x"}
            )
            for at in range(4)
        ]
        found.append(ProblemOutcomes(problem, samples))
        shown += [
            ShownSample(name, at, HOSTILE, HOSTILE, f"{HOSTILE}\n{'x' * 900}", one.verdicts["lcb"], "passed", at == 3)
            for at, one in enumerate(samples)
        ]
    sampling: dict[str, Any] = {"temperature": 0.6, "top_p": 0.95, "max_tokens": 32768, "seed": 0}
    sampling["prompt"] = asdict(PromptSettings(prompt_form=PromptForm.LIVECODEBENCH))
    about = {
        "model": HOSTILE,
        "problem_file": "f",
        "window": {"since": "2024-08-01", "until": ""},
        "sampling": sampling,
    }
    write_evaluation_report(page, {**about, **results(found, ["lcb", "process"])}, shown)
    return page


def write_rollouts(run: Path) -> Path:
    """The page of rollouts of a run with hostile tokens, long names and several versions."""
    draw = random.Random(0)
    (run / "tokens").mkdir(parents=True)
    for batch in range(4):
        rollouts = []
        for number in range(8):
            size = 30 + 40 * number
            rollouts.append(
                {
                    "rollout_id": f"g{batch}-{number}",
                    "problem_id": HOSTILE if number == 7 else "long_name_" * 9,
                    "step": 2 * batch + number % 2 + 1,
                    "verdict": ("accepted", "wrong_answer")[number % 2],
                    "reward": (1.0, -1.0)[number % 2],
                    "advantage": (0.7, -0.7)[number % 2],
                    "staleness": 1,
                    "length": size + 100,
                    "overlong": number == 7,
                    "prompt": HOSTILE,
                    "left_out": 100,
                    "tokens": [draw.choice((" print", "(", "x" * 90, "\n", HOSTILE)) for _ in range(size)],
                    "versions": [batch + (at > size // 2) for at in range(size)],
                    "ratios": [round(draw.uniform(0.5, 1.6), 4) for _ in range(size)],
                    "mismatches": [round(draw.uniform(0.9, 1.1), 4) for _ in range(size)],
                    "clipped": [int(draw.random() < 0.1) for _ in range(size)],
                }
            )
        record = {"batch_id": batch, "policy_version": batch + 1, "rollouts": rollouts}
        (run / "tokens" / f"{batch:08d}.json").write_text(json.dumps(record), encoding="utf8")
    return write_rollouts_page(run)


def write_objectives(page: Path) -> Path:
    """The comparison of nine objectives, one of which has a zero gradient."""
    names = ("dapo", "grpo", "grpo+", "gspo", "gspo+", "gppo", "cispo", "reinforce++", "ppo")
    draw = random.Random(0)
    figures = [
        {
            "name": name,
            "loss": draw.gauss(0, 1e-3),
            "gradient_norm": draw.random(),
            "clipped": {"overall": 0.1, "accepted": 0.2, "rejected": None, "by_length": [0.1, 0.2, None, 1.0]},
            "cosines": {other: None if name == "ppo" else draw.uniform(-1, 1) for other in names},
        }
        for name in names
    ]
    write_objectives_page(page, HOSTILE, figures)
    return page
