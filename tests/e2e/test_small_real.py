"""configs/small-real.toml for three batches: a tiny random Qwen3 with the real tokenizer, on 200 real problems."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from tests.services.qwen3_tokenizer import qwen3_folder

from nouscoder.data.importers.formats import format_named
from nouscoder.data.problems import save_problems

ROOT = Path(__file__).parents[2]
LEETCODE = ROOT / "tests" / "data" / "leetcode_200.jsonl.gz"
NUM_PROBLEMS, NUM_BATCHES, GROUP_SIZE = 200, 3, 2
BATCH_GROUPS = -(-NUM_PROBLEMS // NUM_BATCHES)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_injected_reference_solutions_are_accepted_on_every_problem(tmp_path: Path) -> None:
    """The references go through tokens, grading and training as completions of a policy do."""
    answers = write_problems(tmp_path)
    write_policy(tmp_path / "policy")
    batch_size = BATCH_GROUPS * GROUP_SIZE
    values = [
        *(f'run.root="{tmp_path}"', f"run.total_batches={NUM_BATCHES}", f'policy.path="{tmp_path}/policy"'),
        *(f'problems.train="{tmp_path}/leetcode.jsonl"', f'problems.held_out="{tmp_path}/held_out.jsonl"'),
        *("problems.held_out_share=0", "evaluation.samples=1"),
        # Every rollout gets the same reward, so groups of equal rewards are kept.
        *(f"broker.group_size={GROUP_SIZE}", f"broker.batch_size={batch_size}", "broker.drop_zero_variance=false"),
        *("generation.device=cpu", "learner.device=cpu", "generation.max_running=8"),
        *("learner.steps_per_batch=1", f"learner.samples_per_batch={batch_size}"),
        "generation.environment.kind=entry_point",
        "generation.environment.entry_point=injected_references:InjectedReferences",
        f'generation.environment.options.answers="{tmp_path}/answers.json"',
    ]
    command = [sys.executable, "-m", "nouscoder", "train", str(ROOT / "configs" / "small-real.toml")]
    for value in values:
        command += ["--set", value]
    search_path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": search_path}, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    samples = [json.loads(line) for line in (tmp_path / "small-real" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == NUM_BATCHES * batch_size
    verdicts = Counter((sample["problem_id"], sample["verdict"]) for sample in samples)
    print(Counter(verdict for _, verdict in verdicts))
    assert {problem_id for problem_id, verdict in verdicts if verdict == "accepted"} == answers.keys() - {"held-out"}
    assert len(verdicts) == NUM_PROBLEMS, "one verdict for each problem"
    assert all(sample["program"] == answers[sample["problem_id"]] for sample in samples), "text survives the tokens"
    summary = json.loads((tmp_path / "small-real" / "summary.json").read_text())
    assert summary["balanced"] is True
    assert summary["ledger"]["trained"] == NUM_BATCHES * batch_size


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_new_user_edits_two_paths_and_trains(tmp_path: Path) -> None:
    """`nouscoder init`, the two paths, `nouscoder train`. The groups are kept, because a random policy solves nothing,
    and completions are short, because it never stops.
    """
    write_policy(tmp_path / "tiny-qwen3")
    nouscoder("data", "import", "leetcode", str(LEETCODE), "--out", "leetcode.parquet", folder=tmp_path)
    nouscoder("init", folder=tmp_path)
    file = tmp_path / "my.toml"
    given = file.read_text()
    edited = given.replace('path = "model"', 'path = "tiny-qwen3"')
    edited = edited.replace('train = "problems.jsonl"', 'train = "leetcode.parquet"')
    differing = [line for line, before in zip(edited.split("\n"), given.split("\n"), strict=True) if line != before]
    assert differing == ['path = "tiny-qwen3"', 'train = "leetcode.parquet"']
    file.write_text(edited)
    short = ("run.total_batches=3", "broker.drop_zero_variance=false", "generation.sampling.max_new_tokens=32")
    nouscoder("train", "my.toml", *(word for value in short for word in ("--set", value)), folder=tmp_path)
    summary = json.loads((tmp_path / "runs" / "my" / "summary.json").read_text())
    assert summary["balanced"] is True
    assert (summary["steps"], summary["ledger"]["trained"]) == (3 * 4, 3 * 64)


def nouscoder(*arguments: str, folder: Path) -> None:
    """Run the command in a folder. It must succeed."""
    command = [sys.executable, "-m", "nouscoder", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def write_problems(folder: Path) -> dict[str, str]:
    """Write the problem files, and answers.json for the environment. Returns the answers by problem."""
    known = format_named("leetcode")
    read = [known.read(row.value, row.number) for row in known.rows(LEETCODE, 0)]
    assert len(read) == NUM_PROBLEMS
    save_problems(folder / "leetcode.jsonl", [item.problem for item in read])
    answers = {item.problem.problem_id: f"```python\n{item.references[0].code}\n```" for item in read}
    first = read[0].problem
    save_problems(
        folder / "held_out.jsonl", [replace(first, problem_id="held-out", prompt=f"Held out. {first.prompt}")]
    )
    answers["held-out"] = answers[first.problem_id]
    (folder / "answers.json").write_text(json.dumps(answers))
    return answers


def write_policy(folder: Path) -> None:
    """Save a random Qwen3 in bfloat16 with the real vocabulary and tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        eos_token_id=151_645,
        dtype="bfloat16",
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)  # type: ignore[arg-type]
    shutil.copytree(qwen3_folder(), folder, dirs_exist_ok=True)
