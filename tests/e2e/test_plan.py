"""A plan of two stages and an evaluation, with real services: killed in each stage, it comes to the same end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from nouscoder.config import load_config
from nouscoder.data.importers.run import import_files
from nouscoder.data.problem_parquet import load_problems
from nouscoder.data.problems import save_problems
from nouscoder.demo.prepare import prepare

pytestmark = pytest.mark.alone

DATA = Path(__file__).parents[1] / "data" / "code_contests_165.json.gz"

STAGES = """
[run]
name = "mine"
[evaluation]
every_batches = 1
samples = 16
temperature = 0.6
top_p = 0.95
max_tokens_total = 190
max_new_tokens = 60
[generation]
max_tokens_total = 160
[[plan.stages]]
name = "short"
set.run.total_batches = 4
[[plan.stages]]
name = "long"
from = "best"
set.run.total_batches = 200
set.evaluation.end_after_no_gain = 2
set.generation.sampling.max_new_tokens = 32
[[plan.stages]]
name = "evaluate"
from = "best"
yarn.factor = 2.0
yarn.original_tokens = 192
set.run.total_batches = 0
set.evaluation.max_tokens_total = 384
"""
NUM_PROBLEMS = 6  # held out


def start(run: Any, file: Path, *, resume: bool = False) -> None:
    """Start or resume the plan of `file` in the folder of `run`."""
    command = [sys.executable, "-m", "nouscoder", "train", str(file), *(["--resume"] if resume else [])]
    for value in settings(run):
        command += ["--set", value]
    with run.output.open("ab") as output:
        run.process = subprocess.Popen(command, stdout=output, stderr=output)


def settings(run: Any) -> list[str]:
    """Those of a tiny loop; the stages say how many batches they have, and how they are evaluated."""
    return [value for value in run._overrides if not value.startswith(("run.total_batches", "evaluation.samples"))]


def lines(run: Any, stage: str) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl of a stage."""
    file = run.folder / stage / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


def record(run: Any, name: str) -> dict[str, Any]:
    """A JSON file of the plan's folder."""
    value: dict[str, Any] = json.loads((run.folder / name).read_text())
    return value


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_plan_killed_in_each_stage_comes_to_its_end(tmp_path: Path, loop_run: Callable[..., Any]) -> None:
    run = loop_run(name="mine")
    file = tmp_path / "mine.toml"
    file.write_text(STAGES)
    prepare(load_config(file, settings(run)), lambda done, total, loss: None)
    start(run, file)
    for stage, reached in (
        ("01-short", lambda: len(lines(run, "01-short")) >= 4),
        ("02-long", lambda: len(lines(run, "02-long")) >= 2),
        ("03-evaluate", lambda: (run.folder / "03-evaluate/config.toml").exists()),
    ):
        run.until(reached, stage, 600)
        run.kill_tree()
        run.wait_until_gone(60)
        before = lines(run, stage)
        start(run, file, resume=True)
        run.until(lambda stage=stage: (run.folder / stage / "summary.json").exists(), f"the end of {stage}", 900)
        # Batches of two steps that were whole at the kill are not trained again.
        whole = len(before) - len(before) % 2
        assert lines(run, stage)[:whole] == before[:whole]
    assert run.wait(600) == 0, run.text()[-3000:]
    assert_end(run)


def assert_end(run: Any) -> None:
    """Every stage is whole, the second ended early, and each began with the best policy of the one before."""
    summaries = [record(run, f"{stage}/summary.json") for stage in ("01-short", "02-long", "03-evaluate")]
    short, long, evaluated = summaries
    assert (short["steps"], evaluated["steps"]) == (8, 0)
    assert 0 < long["steps"] < 2 * 200
    for stage, summary in (("01-short", short), ("02-long", long)):
        assert [line["step"] for line in lines(run, stage)] == list(range(1, summary["steps"] + 1))
    assert all(summary["balanced"] for summary in summaries)
    stages = record(run, "plan.json")["stages"]
    assert [stage["finished"] for stage in stages] == [True, True, True]
    assert "begins with the best policy of short" in run.text()
    # An untrained policy does not gain, so the stage ended before its 200 batches.
    assert "the run ends early: 2 evaluations were not above pass@1" in run.text()
    assert len([*(run.folder / "02-long/evaluations").glob("*.json")]) >= 2
    assert_evaluations(run, stages)
    print(json.dumps(stages))


def assert_evaluations(run: Any, stages: list[dict[str, Any]]) -> None:
    """Each evaluation has 16 samples at its own temperature and context, and chose the best checkpoint.

    The best policy of a stage gives the same samples as the first of the next: they depend on policy and seed alone.
    """
    evaluations = {}
    for stage, context in (("01-short", 190), ("02-long", 190), ("03-evaluate", 384)):
        files = [*(run.folder / stage).glob("evaluation_*.json"), *(run.folder / stage / "evaluations").glob("*.json")]
        found = {one["policy_version"]: one for one in (json.loads(file.read_text()) for file in files)}
        for one in found.values():
            sampling = one["sampling"]
            assert (one["num_problems"], one["num_rollouts"]) == (NUM_PROBLEMS, 16 * NUM_PROBLEMS)
            assert (sampling["temperature"], sampling["top_p"], sampling["max_tokens_total"]) == (0.6, 0.95, context)
            assert one["pass_at_1"] == sum(each["passed"] for each in one["problems"]) / (16 * NUM_PROBLEMS)
            assert one["mean_tokens"] > 24, "an untrained policy seldom ends before the limit"
        evaluations[stage] = found
    assert all(line["response_length"] <= 24 for line in lines(run, "01-short")), "training has its own limit"
    for before, after in (("01-short", "02-long"), ("02-long", "03-evaluate")):
        found = evaluations[before]
        best = min(found, key=lambda version: (-found[version]["pass_at_1"], version))
        assert stages[int(before[1]) - 1]["best_version"] == best
        if after == "02-long":  # the last stage has another rope scaling
            assert evaluations[after][0]["problems"] == found[best]["problems"]


SHARED = """
[run]
name = "mine"
[generation]
max_tokens_total = 160
[[plan.stages]]
name = "short"
set.run.total_batches = 2
[[plan.stages]]
name = "long"
set.run.total_batches = 2
set.generation.max_tokens_total = 190
set.generation.sampling.max_new_tokens = 60
[[plan.stages]]
name = "evaluate"
yarn.factor = 2.0
yarn.original_tokens = 192
set.run.total_batches = 0
set.generation.max_tokens_total = 384
"""


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_stages_share_one_generation_process_until_one_needs_another_engine(
    tmp_path: Path, loop_run: Callable[..., Any]
) -> None:
    run = loop_run(name="mine")
    file = tmp_path / "mine.toml"
    file.write_text(SHARED)
    prepare(load_config(file, settings(run)), lambda done, total, loss: None)
    start(run, file)
    pids = []
    for stage in ("01-short", "02-long"):
        run.until(lambda stage=stage: lines(run, stage), f"a step of {stage}", 600)
        pids.append(run.pid("generation"))
    assert run.wait(900) == 0, run.text()[-3000:]
    assert pids[0] == pids[1]
    # The limit of the first stage is 24 sampled tokens; an untrained policy seldom ends earlier.
    assert all(line["response_length"] <= 24 for line in lines(run, "01-short"))
    assert all(line["response_length"] > 24 for line in lines(run, "02-long"))
    assert all(record(run, f"{stage}/summary.json")["balanced"] for stage in ("01-short", "02-long"))
    said = " ".join(run.text().split())
    assert "generation is started again for mine/02-long" not in said
    assert "generation is started again for mine/03-evaluate" in said
    assert "generation.max_tokens_total 384 is more than the 190 tokens" in said
    log = (run.folder / "logs" / "generation.log").read_text()
    assert log.count('"listening"') == 2, "two processes served three stages"


# A published recipe of three stages, scaled down by --set alone.

RECIPE = "nouscoder-14b-gspo"
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
SCALED = (
    *("policy.path=model", "problems.train=train.jsonl", "problems.held_out=held_out.jsonl", "run.root=runs"),
    *("run.total_batches=4", "broker.batch_size=32", "broker.lease_s=2.0", "broker.batch_lease_s=3.0"),
    "broker.drop_zero_variance=false",  # a policy with random weights solves nothing
    *("generation.max_tokens_total=1600", "generation.sampling.max_new_tokens=24", "generation.max_running=64"),
    *("learner.microbatch_tokens=4000", "evaluation.every_batches=1"),
    *("evaluation.max_tokens_total=1700", "evaluation.max_new_tokens=32"),
    *("plan.stages.40k.generation.max_tokens_total=1700", "plan.stages.1.generation.sampling.max_new_tokens=32"),
    *("plan.stages.40k.learner.microbatch_tokens=4000", "plan.stages.yarn.evaluation.max_tokens_total=5120"),
    "plan.stages.yarn.yarn.original_tokens=2048",
)


def write_inputs(root: Path) -> None:
    """15 real problems, and a Qwen3 with random weights and bytes as its first tokens, whose template can think."""
    import_files("rllm_contests", [DATA], root / "all.parquet")
    problems = sorted(load_problems(root / "all.parquet"), key=lambda one: len(one.prompt))
    save_problems(root / "train.jsonl", problems[:12])
    save_problems(root / "held_out.jsonl", problems[12:15])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet, end = pre_tokenizers.ByteLevel.alphabet(), "<|end|>"
    trainer = trainers.BpeTrainer(vocab_size=512, initial_alphabet=alphabet, special_tokens=[end], show_progress=False)
    tokenizer.train_from_iterator((one.prompt for one in problems), trainer)
    make: Any = PreTrainedTokenizerFast
    fast = make(tokenizer_object=tokenizer, eos_token=end, pad_token=end, chat_template=TEMPLATE)
    fast.save_pretrained(root / "model")
    sizes: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "head_dim": 16,
    }
    heads: dict[str, Any] = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "eos_token_id": 0,
    }
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).save_pretrained(root / "model")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_recipe_scaled_down_by_set_alone_and_killed_twice_ends_whole(
    tmp_path: Path, loop_run: Callable[..., Any]
) -> None:
    write_inputs(tmp_path)
    run = loop_run(name=f"runs/{RECIPE}")
    run.output = tmp_path / "out"
    command = [sys.executable, "-m", "nouscoder", "train", "--recipe", RECIPE]
    command += [part for value in SCALED for part in ("--set", value)]

    def begin(*more: str) -> None:
        with run.output.open("ab") as output:
            run.process = subprocess.Popen([*command, *more], stdout=output, stderr=output, cwd=tmp_path)

    begin()
    for stage, reached in (("01-32k", 4), ("02-40k", 8)):
        run.until(lambda stage=stage, reached=reached: len(lines(run, stage)) >= reached, f"a step of {stage}", 300)
        run.kill_tree()
        run.wait_until_gone(60)
        begin("--resume")
    assert run.wait(300) == 0, run.text()[-3000:]
    print(run.text())
    for stage, context in (("01-32k", 1700), ("02-40k", 1700), ("03-yarn", 5120)):
        summary = record(run, f"{stage}/summary.json")
        steps = 0 if stage == "03-yarn" else 16
        assert [line["step"] for line in lines(run, stage)] == list(range(1, steps + 1))
        assert (summary["balanced"], summary["steps"]) == (True, steps)
        files = [*(run.folder / stage).glob("evaluation_*.json"), *(run.folder / stage / "evaluations").glob("*.json")]
        found = {one["policy_version"]: one for one in (json.loads(file.read_text()) for file in files)}
        left_out = f"{3 - len(found.keys() & {1, 2, 3})} evaluations were left out"
        assert not steps or {1, 2, 3} <= found.keys() or left_out in run.text()
        for one in found.values():  # as the authors evaluate
            sampling = one["sampling"]
            assert (one["num_problems"], one["num_rollouts"]) == (3, 48)
            assert (sampling["temperature"], sampling["top_p"], sampling["max_tokens_total"]) == (0.6, 0.95, context)
    rope = record(run, "03-yarn/policy/config.json")
    scaling = rope.get("rope_parameters") or rope["rope_scaling"]
    assert (scaling["factor"], rope["max_position_embeddings"]) == (2.5, 5120)
    assert [stage["finished"] for stage in record(run, "plan.json")["stages"]] == [True] * 3
