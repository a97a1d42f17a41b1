"""The chart refuses an upgrade that the run would refuse, before a pod is replaced, and no other upgrade."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest

from nouscoder.config import load_config
from nouscoder.run.folder import FIXED, MADE_FROM, RunChanged, record_of, refuse_changes

from .conftest import CHART, merged
from .test_chart_in_a_cluster import Cluster
from .test_chart_in_a_cluster import cluster as cluster  # the fixture

Values = dict[str, Any]
TABLE = json.loads((CHART / "files" / "fixed.json").read_text("utf8"))
# Where twice the default, or the contrary, or a longer text, is no valid value.
OTHER: Values = {
    "broker.reward.rule": "soft",
    "broker.reward.entry_point": "my.reward:rule",
    "broker.reward.no_thinking": "punished",
    "broker.reward.overlong": "soft",
    "generation.sampling.top_p": 0.5,
    "evaluation.top_p": 0.5,
    "evaluation.samples": 3,
    "broker.records.backend": "object_store",
    "broker.batch_size": 128,
    "generation.environment.kind": "feedback",
    "learner.dtype": "bfloat16",
    "learner.lora.publication": "adapter",
    "learner.optimizer": "muon",
    "learner.optimizer_states": "8bit",
    "problems.train": "/problems/other.jsonl",
    "problems.held_out": "/problems/others.jsonl",
}


def tree(key: str, value: Any) -> Values:
    for part in reversed(["config", *key.split(".")]):
        value = {part: value}
    return dict(value)


def config_map(cluster: Cluster, values: Values) -> dict[str, str]:
    (data,) = [one["data"] for one in cluster.render(values) if "config.json" in one.get("data", {})]
    return dict(data)


INSTALLED: dict[str, dict[str, str]] = {}  # the ConfigMap of an install, by its values


def begin(cluster: Cluster, values: Values, prepare: Values | None = None) -> None:
    """Install, and let the learner's container `prepare` come to that state: it has accepted the configuration."""
    cluster.runtime_classes, key = ["gvisor"], json.dumps(values)
    if key not in INSTALLED:
        cluster.config = cluster.prepared = None
        INSTALLED[key] = config_map(cluster, values)
    cluster.config, cluster.prepared = INSTALLED[key], prepare or {"terminated": {"exitCode": 0}}


def refusal(cluster: Cluster, values: Values) -> str:
    """What the chart says to an upgrade, "" when it takes it."""
    try:
        cluster.render(values)
    except helm.HelmError as error:
        return str(error)
    return ""


def test_every_fixed_key_is_refused_with_both_values_and_the_way_out(cluster: Cluster) -> None:
    began: Values = {}
    for key in ("demo.proposal_share", "policy.path"):
        began = merged(began, tree(key, 0.25 if "share" in key else "/runs/mine"))
    begin(cluster, began)
    changed: Values = {}
    keys = [key for key in TABLE["run"] if not key.startswith("generation.environment.") or key.endswith(".kind")]
    for key in keys:
        usual = TABLE["run"][key]
        longer = [7] if key.endswith("_ids") else ["x"] if isinstance(usual, list) else f"{usual}x"
        value: Any = (
            not usual if isinstance(usual, bool) else 1 if isinstance(usual, int | float) and usual < 1 else None
        )
        value = 2 * usual if value is None and isinstance(usual, int | float) else value
        changed = merged(changed, tree(key, OTHER.get(key, longer if value is None else value)))
    changed["config"]["demo"] |= {"warm_start_share": 0.5, "proposal_share": 0.5}
    changed["config"]["problems"]["held_out_share"] = 0.5
    said = refusal(cluster, changed)
    assert [key for key in keys if f"config.{key} is " not in said] == [], said
    assert {each for each in (*FIXED, *MADE_FROM) if not any(f"{key}.".startswith(f"{each}.") for key in keys)} <= {
        "demo.problems", "generation.environment"
    }  # fmt: skip
    assert "config.broker.group_size is 16, but it was 8" in said
    assert "when the run demo began" in said
    assert "put it back, or begin another run with config.run.name" in said
    assert refusal(cluster, merged(began, tree("generation.environment.turns", 5)))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"config": {"learner": {"learning_rate": 1e-5}, "run": {"total_batches": 4}}, "image": {"tag": "9"}}),
        ({}, {"config": {"generation": {"sampling": {"temperature": 1.0}}, "broker": {"drop_zero_variance": False}}}),
        ({"config": {"generation": {"sampling": {"temperature": 1}}}}, {}),
        ({"config": {"learner": {"lora": {"alpha": 8}}}}, {}),
        ({}, {"config": {"run": {"name": "second"}, "broker": {"group_size": 16}}}),
        ({}, {"config": {"generation": {"sampling": {"temperature": 0.9}}}}),
        ({}, {"config": {"policy": {"path": "/models/other"}}}),
        ({"config": {"learner": {"lora": {"rank": 8}}}}, {"config": {"learner": {"lora": {"rank": 8, "alpha": 8}}}}),
        ({"config": {"evaluation": {"samples": 4}}}, {}),
    ],
)
def test_the_chart_and_the_run_refuse_the_same(cluster: Cluster, before: Values, after: Values, tmp_path: Path) -> None:
    begin(cluster, {})
    usual = json.loads(INSTALLED["{}"]["config.json"])
    configs = []
    for name, values in (("before", before), ("after", after)):
        (tmp_path / f"{name}.json").write_text(json.dumps(merged(usual, values.get("config", {}))), "utf8")
        configs.append(load_config(tmp_path / f"{name}.json"))
    (tmp_path / "config.toml").write_text(record_of(configs[0]), "utf8")
    refused = ""
    if configs[0].run.name == configs[1].run.name:
        try:
            refuse_changes(tmp_path / "config.toml", configs[1])
        except RunChanged as error:
            refused = str(error).partition(" ")[0]
    begin(cluster, before)
    said = refusal(cluster, after)
    assert bool(said) is bool(refused), said
    assert refused in said


SIXTEEN = tree("broker.group_size", 16)


@pytest.mark.parametrize(
    "prepare", [{"waiting": {"reason": "PodInitializing"}}, {"running": {}}, {"terminated": {"exitCode": 78}}]
)
def test_a_run_that_has_not_begun_takes_everything(cluster: Cluster, prepare: Values) -> None:
    """A wrong value of the install can be mended, also over a claim that was kept."""
    begin(cluster, {}, prepare)
    assert "begun" not in config_map(cluster, SIXTEEN)


def test_the_release_remembers_a_run_that_has_begun_while_its_learner_is_away(cluster: Cluster) -> None:
    begin(cluster, {})
    cluster.config = config_map(cluster, tree("broker.pipeline_k", 2))
    cluster.prepared = None
    assert cluster.config["begun"] == "demo"
    assert "config.broker.group_size is 16, but it was 8 when the run demo began" in refusal(cluster, SIXTEEN)
    cluster.config = config_map(cluster, merged(SIXTEEN, tree("run.name", "second")))
    assert "begun" not in cluster.config


def test_another_run_has_other_values_but_the_same_problem_files(cluster: Cluster) -> None:
    begin(cluster, {})
    second = merged(SIXTEEN, tree("run.name", "second"))
    assert not refusal(cluster, second)
    said = refusal(cluster, merged(second, tree("run.seed", 3)))
    assert "config.run.seed is 3, but it was 0 when the problem files of the run demo were made" in said
    assert "name other files in config.problems.train and config.problems.held_out" in said
    files = {"train": "/problems/second.jsonl", "held_out": "/problems/second-held-out.jsonl"}
    assert not refusal(cluster, merged(second, {"config": {"run": {"seed": 3}, "problems": files}}))
    own = {"problems": {"persistence": {"existingClaim": "mine"}}}
    assert not refusal(cluster, merged(second, merged(own, tree("run.seed", 3))))


def test_the_first_stage_of_a_plan_keeps_its_name_and_its_fixed_values(cluster: Cluster) -> None:
    def stages(*given: Values) -> Values:
        return {"config": {"plan": {"stages": list(given)}}}

    first: Values = {"name": "a", "set": {"generation": {"max_tokens_total": 150}}}
    more = {"name": "b", "from": "best"}
    begin(cluster, stages(first))
    assert not refusal(cluster, stages(first, more))
    assert not refusal(cluster, stages({**first, "set": {**first["set"], "learner": {"learning_rate": 1e-5}}}))
    assert "first of config.plan.stages" in refusal(cluster, stages({**first, "name": "c"}))
    assert "first of config.plan.stages" in refusal(cluster, {})
    longer = {**first, "set": {"generation": {"max_tokens_total": 155}}}
    assert "config.generation.max_tokens_total is 155, but it was 150" in refusal(cluster, stages(longer, more))
    assert "config.broker.group_size is 16, but it was 8" in refusal(cluster, merged(stages(first), SIXTEEN))
