"""`nouscoder reward-model`: preference pairs from graded samples, Bradley-Terry training, and what a model is worth."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from nouscoder.cli.options import JsonOption, new, only_with, say
from nouscoder.config.devices import device_fault
from nouscoder.errors import Unusable

reward_model_app = typer.Typer(no_args_is_help=True, help="Reward models: pairs, training, evaluation.")

ProblemsArgument = Annotated[Path, typer.Argument(help="problem file: JSON lines or parquet")]
DeviceOption = Annotated[str, typer.Option(help="where the model is: cpu, or cuda")]
TokensOption = Annotated[int, typer.Option(min=2, help="of prompt and answer; what is beyond is cut off")]


@reward_model_app.command("pairs")
def reward_model_pairs(
    problems: ProblemsArgument,
    evaluation: Annotated[Path, typer.Argument(help="folder of `nouscoder eval --all-tests` on these problems")],
    out: Annotated[Path, new("file", "the file of pairs to make")] = Path("pairs.jsonl"),
    margin: Annotated[float, typer.Option(help="the chosen sample's score is more than this above the other's")] = 0.4,
    chosen_above: Annotated[float, typer.Option(help="least score of a chosen sample, exclusive")] = 0.8,
    rejected_above: Annotated[
        float, typer.Option(help="least score of a rejected sample, exclusive; below 0: any")
    ] = 0.0,
    at_most: Annotated[int, typer.Option(min=0, help="pairs of one problem; 0: all")] = 0,
    seed: Annotated[int, typer.Option(help="chooses the pairs of a problem that has more")] = 0,
) -> None:
    """Make preference pairs: s_i > s_j + 0.4, s_i > 0.8, s_j > 0 of the shares of passed tests, as AceCoder does."""
    from nouscoder.evaluation.scored_samples import scored_problems
    from nouscoder.reward_model.pairs import PairRule, write_pairs

    rule = PairRule(margin, chosen_above, rejected_above)
    say(write_pairs(scored_problems(problems, evaluation), rule, at_most, seed, out).text(out))


@reward_model_app.command("train")
def reward_model_train(
    policy: Annotated[Path, typer.Argument(help="Hugging Face folder of a causal language model to begin with")],
    pairs: Annotated[Path, typer.Argument(help="file of pairs")],
    out: Annotated[Path, new("folder", "folder of the reward model to make")] = Path("reward-model"),
    epochs: Annotated[int, typer.Option(min=1)] = 1,
    pairs_per_step: Annotated[int, typer.Option(min=1)] = 64,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 1e-5,
    weight_decay: Annotated[float, typer.Option(min=0.0)] = 0.0,
    max_tokens: TokensOption = 4096,
    row_tokens: Annotated[int, typer.Option(min=1, help="of a packed row")] = 16_384,
    save_every_steps: Annotated[int, typer.Option(min=1, help="a killed training goes on from there")] = 50,
    seed: Annotated[int, typer.Option(help="of the order of the pairs")] = 0,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Train a reward model on pairs by the Bradley-Terry loss. Run again after a kill, it goes on."""
    _check_device(device)
    from nouscoder.reward_model.pairs import read_pairs
    from nouscoder.reward_model.train import TrainingSettings, train_reward_model

    settings = TrainingSettings(
        epochs=epochs,
        pairs_per_step=pairs_per_step,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        max_tokens=max_tokens,
        row_tokens=row_tokens,
        save_every_steps=save_every_steps,
        seed=seed,
        device=device,
    )
    trained = train_reward_model(policy, read_pairs(pairs), out, settings)
    say(json.dumps(asdict(trained)) if as_json else trained.text(out))


def _check_device(device: str) -> None:
    if fault := device_fault("--device", device):
        raise Unusable(fault)


@reward_model_app.command("eval")
def reward_model_eval(
    model: Annotated[Path, typer.Argument(help="folder of a reward model")],
    problems: Annotated[Path | None, typer.Option(help="problem file, for best of n")] = None,
    evaluation: Annotated[Path | None, typer.Option(help="folder of `nouscoder eval` on these problems")] = None,
    n: Annotated[int, typer.Option(min=1, help="samples of which the best is chosen")] = 8,
    pairs: Annotated[Path | None, typer.Option(help="file of pairs, for the share that is ordered rightly")] = None,
    rm_bench: Annotated[Path | None, typer.Option(help="file in RM-Bench's form: accuracies by style")] = None,
    max_tokens: TokensOption = 4096,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Measure a reward model: best of n on graded samples, accuracy on pairs and on RM-Bench, with standard errors."""
    only_with("best of n: --problems with --evaluation", problems and evaluation, "--problems", "--evaluation", "--n")
    _check_device(device)
    from nouscoder.reward_model.evaluate import evaluate_reward_model, scorer_of

    record, text = evaluate_reward_model(
        scorer_of(model, max_tokens, device),
        problems=problems,
        evaluation=evaluation,
        n=n,
        pairs=pairs,
        styles=rm_bench,
    )
    say(json.dumps(record) if as_json else text)
