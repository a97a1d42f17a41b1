"""The section `evaluation`: what it changes of generation, what it refuses, and the names that its keys had before."""

from __future__ import annotations

from pathlib import Path

import pytest

from nouscoder.config import Config, ConfigError, dump_config, load_config
from nouscoder.config.tree import moved_keys, read_given

ROOT = Path(__file__).parents[2]
PUBLISHED = ("evaluation.samples=16", "evaluation.temperature=0.6", "evaluation.top_p=0.95")
LONGER = ("generation.max_tokens_total=32768", "evaluation.max_tokens_total=40960")


def config(*values: str) -> Config:
    return load_config(None, values)


def test_evaluations_have_a_context_and_a_sampling_of_their_own_and_training_keeps_its_own() -> None:
    made = config(*PUBLISHED, *LONGER, "generation.sampling.max_new_tokens=32767")
    training, evaluating = made.generation, made.evaluating.generation
    assert (evaluating.sampling.temperature, evaluating.sampling.top_p) == (0.6, 0.95)
    assert (evaluating.max_tokens_total, evaluating.sampling.max_new_tokens) == (40960, 40959)
    assert (training.sampling.temperature, training.sampling.top_p) == (1.0, 1.0)
    assert (training.max_tokens_total, training.sampling.max_new_tokens) == (32768, 32767)
    assert made.engine_tokens == 40960, "the engine is started for the larger of both"


def test_without_values_evaluations_are_sampled_as_the_training() -> None:
    made = config("generation.sampling.temperature=0.8", "generation.sampling.top_k=5", "run.seed=3")
    assert made.evaluating.generation == made.generation
    assert made.evaluation_seed == 3
    assert config("run.seed=3", "evaluation.seed=7").evaluation_seed == 7
    greedy = config("evaluation.temperature=0", "evaluation.max_new_tokens=9", "evaluation.min_p=0")
    sampling = greedy.evaluating.generation.sampling
    assert (sampling.temperature, sampling.max_new_tokens, sampling.min_p) == (0.0, 9, 0.0)
    shorter = config("generation.max_tokens_total=100", "evaluation.max_tokens_total=50")
    assert (shorter.engine_tokens, shorter.evaluating.generation.max_tokens_total) == (100, 50)


def test_vllm_may_cut_the_candidates_of_an_evaluation_and_not_those_of_the_training() -> None:
    vllm = ("generation.engine=vllm", "generation.device=cuda")
    assert config(*vllm, *PUBLISHED).evaluating.generation.sampling.top_p == 0.95
    with pytest.raises(ConfigError, match=r"top_p must be 1 for training with the vllm engine.*evaluation\.top_p"):
        config(*vllm, "generation.sampling.top_p=0.95")


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        (["evaluation.end_at_pass_at_1=0.5"], "need every_batches"),
        (["evaluation.temperature=-0.5"], "temperature must be at least 0, or -1"),
        (["evaluation.min_p=-0.5"], "min_p must be at least 0, or -1"),
        (["evaluation.samples=0"], "evaluation.samples"),
        (["evaluation.temprature=0.6"], "did you mean evaluation.temperature"),
    ],
)
def test_what_is_refused(values: list[str], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        config(*values)


OLD = """
[run]
evaluate_every_batches = 2
evaluation_limit_s = 60.0
end_at_pass_at_1 = 0.5
end_after_no_gain = 3
[problems]
held_out_samples = 4
"""


def test_the_names_that_keys_had_before_are_read_and_said(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(OLD)
    section = load_config(file).evaluation
    assert (section.every_batches, section.limit_s, section.samples) == (2, 60.0, 4)
    assert (section.end_at_pass_at_1, section.end_after_no_gain) == (0.5, 3)
    lines = moved_keys(read_given(file, ["run.end_after_no_gain=1"]))
    assert lines[0] == "run.evaluate_every_batches is evaluation.every_batches now: the old name is still read"
    assert len(lines) == 5
    assert moved_keys(read_given(None, PUBLISHED)) == []
    # A stage, and a resume of a folder that an earlier release made, change what the whole run has.
    file.write_text(OLD + '[[plan.stages]]\nname = "one"\nset.run.end_after_no_gain = 7\n')
    assert load_config(file).of_stage(0).evaluation.end_after_no_gain == 7
    assert moved_keys(read_given(file))[-1].startswith("run.end_after_no_gain in a stage is")
    written = tmp_path / "config.toml"
    written.write_text(dump_config(load_config(file)))
    assert "held_out_samples" not in written.read_text()
    assert load_config(written).evaluation == load_config(file).evaluation


def test_a_key_by_both_names_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("problems.held_out_samples = 1\n[evaluation]\nsamples = 16\n")
    with pytest.raises(ConfigError, match=r"problems\.held_out_samples is evaluation\.samples now, and both are given"):
        load_config(file)


def test_the_documents_example_and_the_recipes_choose_the_best_checkpoint_as_the_report_does(tmp_path: Path) -> None:
    text = (ROOT / "docs/evaluation.md").read_text(encoding="utf8")
    (tmp_path / "doc.toml").write_text(text.split("```toml\n")[1].split("```")[0])
    documented = load_config(tmp_path / "doc.toml").evaluation
    assert (documented.every_batches, documented.samples, documented.max_tokens_total) == (10, 16, 40960)
    for name in ("dapo", "gspo", "gspo-plus"):
        config = load_config(ROOT / f"configs/nouscoder-14b-{name}.toml")
        stages = [config.of_stage(index) for index in range(3)]
        assert [stage.generation.max_tokens_total for stage in stages[:2]] == [32768, 40960]
        assert [stage.evaluating.generation.max_tokens_total for stage in stages] == [40960, 40960, 81920]
        assert [stage.engine_tokens for stage in stages] == [40960, 40960, 81920]
        for stage in stages:
            section, sampling = stage.evaluation, stage.evaluating.generation.sampling
            assert (section.every_batches, section.samples) == (documented.every_batches, documented.samples)
            assert (sampling.temperature, sampling.top_p) == (documented.temperature, documented.top_p)
            assert (stage.generation.sampling.temperature, stage.generation.sampling.top_p) == (1.0, 1.0)
