"""The result of a self-play: self_play.json, and the same in words. It is made of the files of the finished rounds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import mean
from typing import Any

from nouscoder.config import Config
from nouscoder.self_play.parts import PROPOSE, TRAIN, judgements_in, part_folder, pool_record, read_json
from nouscoder.self_play.proposer import METRICS

RESULT = "self_play.json"


def result_of(config: Config, rounds: int, policy: Path) -> dict[str, Any]:
    """The record after `rounds` rounds. `policy` is the folder of the policy after them."""
    records = [_round_summary(config, number) for number in range(1, rounds + 1)]
    proposals, accepted = (sum(one.get(name, 0) for one in records) for name in ("proposals", "accepted"))
    return {
        "name": config.run.name,
        "seed": config.run.seed,
        "policy": str(policy),
        "proposals": proposals,
        "accepted": accepted,
        "accepted_share": accepted / proposals if proposals else None,
        "rejected": dict(sum((Counter(one.get("rejected", {})) for one in records), Counter()).most_common()),
        "steps": sum(one["steps"] for one in records),
        "proposer_steps": sum(one.get("proposer_steps", 0) for one in records),
        # The first training begins after the first steps of the proposer, so this is not the first policy's.
        "first_training_before": records[0]["before"],
        "after": records[-1]["after"],
        "rounds": records,
    }


def _round_summary(config: Config, number: int) -> dict[str, Any]:
    training = part_folder(config, number, TRAIN)
    summary = read_json(training / "summary.json")
    record: dict[str, Any] = {"round": number}
    if config.self_play.proposals:
        record |= _proposed(config, number)
    return record | {
        "steps": summary["steps"],
        "before": _evaluation(training / "evaluation_before.json"),
        "after": _evaluation(training / "evaluation_after.json"),
    }


def _proposed(config: Config, number: int) -> dict[str, Any]:
    judgements, pool = judgements_in(config, number), pool_record(config, number)
    rates = [one["pass_rate"] for one in judgements if one["reason"] is None]
    steps = part_folder(config, number, PROPOSE) / METRICS
    return {
        "proposals": len(judgements),
        "accepted": len(rates),
        "rejected": dict(Counter(one["reason"] for one in judgements if one["reason"] is not None).most_common()),
        "reward": mean(one["reward"] for one in judgements),
        "accepted_pass_rate": mean(rates) if rates else None,
        "proposer_steps": len(steps.read_text(encoding="utf8").splitlines()) if steps.exists() else 0,
        "pool": len(pool["pool"]),
        "retired": dict(Counter(pool["retired"].values())),
    }


def sentence(result: dict[str, Any]) -> str:
    """The result in words: a line for each round, the reasons of rejections, and the policy."""
    lines = [_line(one) for one in result["rounds"]]
    if result["proposals"]:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in result["rejected"].items())
        share = result["accepted_share"]
        lines.append(f"accepted {result['accepted']} of {result['proposals']} proposals ({share:.3f}); {reasons}")
    lines.append(f"{result['steps']} steps and {result['proposer_steps']} of the proposer; {result['policy']}")
    return "\n".join(lines)


def _line(one: dict[str, Any]) -> str:
    proposed = ""
    if "proposals" in one:
        retired = ", ".join(f"{count} {reason}" for reason, count in one["retired"].items())
        proposed = (
            f"accepted {one['accepted']} of {one['proposals']}, reward {one['reward']:.3f}, pool {one['pool']}"
            + (f" (retired: {retired})" if retired else "")
            + "; "
        )
    return f"round {one['round']}: {proposed}pass@1 {_pass_at_1(one['before'])} -> {_pass_at_1(one['after'])}"


def _pass_at_1(record: dict[str, Any]) -> str:
    error = record["standard_error"]
    return f"{record['pass_at_1']:.3f}" + ("" if error is None else f" +- {error:.3f}")


def _evaluation(file: Path) -> dict[str, Any]:
    record = read_json(file)
    return {name: record[name] for name in ("pass_at_1", "standard_error", "num_problems", "num_rollouts")}
