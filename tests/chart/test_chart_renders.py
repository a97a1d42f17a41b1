"""The chart's output: Kubernetes has every field, the program reads the configuration."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import helm_python as helm
import kubernetes_validate
import pytest
import yaml
from kubernetes_validate.utils import all_versions
from tests.chart.conftest import CUSTOM, FIRST_VERSION, KEPT, WITHOUT_PODS, custom_pods

from nouscoder.config import Config, load_config

if TYPE_CHECKING:
    from tests.chart.conftest import ChartRig

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "nouscoder"
VARIANTS = (*KEPT, "ranks", "dual", "unmanaged", "local", "modal", "spill-over", "closed", "existing", "openai", "open")
OLDEST = "1.29"
CLUSTER_SCOPED = ("Namespace", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")


@pytest.mark.parametrize("name", VARIANTS)
def test_lint_finds_nothing(chart: ChartRig, name: str) -> None:
    found = helm.lint(CHART, chart.variants[name], strict=True, kube_version=f"v{OLDEST}.0")
    assert found["errors"] == []
    assert [one["error"] for one in found["messages"] if one["severity"] > 1] == []


def versions() -> list[str]:
    """Every version of Kubernetes from OLDEST on that the package has."""
    known = list(dict.fromkeys(version.removesuffix(".0") for version in all_versions()))
    return known[known.index(OLDEST) :]


def test_all_versions_are_checked() -> None:
    assert versions()[:2] == ["1.29", "1.30"]
    assert len(versions()) >= 9


@pytest.mark.parametrize(
    "version",
    [pytest.param(one, marks=() if one in (OLDEST, versions()[-1]) else pytest.mark.long) for one in versions()],
)
def test_kubernetes_knows_every_field(chart: ChartRig, version: str) -> None:
    """Checks every resource of every variant, and the pod that the verifier makes from its template."""
    documents = [one for values in chart.variants.values() for one in chart.documents(values)]
    documents += [pod for one in documents if one["kind"] in CUSTOM for pod in custom_pods(one).values()]
    documents = [one for one in documents if one["kind"] not in (*CUSTOM, *WITHOUT_PODS)]
    documents += [runner_pod(one) for one in documents if "runner-pod.json" in one.get("data", {})]
    different = {json.dumps(one, sort_keys=True): one for one in documents}.values()
    assert len(different) > 60
    for one in different:
        known = FIRST_VERSION.get(one["kind"], OLDEST) if version == OLDEST else version  # all in 1.30 at the latest
        kubernetes_validate.validate(one, known, strict=True)


def test_a_field_that_kubernetes_does_not_know_is_found(chart: ChartRig) -> None:
    service = chart.one("Service", "nouscoder-verifier")
    service["spec"]["portz"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="portz"):
        kubernetes_validate.validate(service, OLDEST, strict=True)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_program_reads_the_rendered_configuration(chart: ChartRig, name: str, tmp_path: Path) -> None:
    config = configuration(chart, chart.variants[name], tmp_path)
    assert config.verifier.http == ("[::]:8080" if name == "dual" else "0.0.0.0:8080")
    assert config.verifier.grpc == "nouscoder-verifier.here.svc:50051"
    assert config.verifier.tests.cache == "/tests"
    assert config.verifier.sandbox.backend == (name if name in ("local", "modal") else "gvisor")


@pytest.mark.parametrize("name", ["h200", "b200"])
def test_the_values_for_48_gpus_use_48(chart: ChartRig, name: str) -> None:
    generation, learner = (chart.kept[name][part] for part in ("generation", "learner"))
    assert generation["replicas"] * generation["resources"]["limits"]["nvidia.com/gpu"] == 32
    assert learner["pods"] * learner["ranksPerPod"] == 16
    assert learner["ranksPerPod"] == learner["resources"]["limits"]["nvidia.com/gpu"]
    config = chart.kept[name]["config"]
    admitted = config["broker"]["pipeline_k"] * config["broker"]["batch_size"]
    assert generation["replicas"] * config["generation"]["max_running"] <= admitted  # all places can be filled


def test_generation_serves_an_api_in_openais_form_where_it_is_wanted(chart: ChartRig, tmp_path: Path) -> None:
    values = chart.variants["openai"]
    config = configuration(chart, values, tmp_path).generation.openai
    assert (config.http, config.tokens_file) == ("0.0.0.0:8000", "/etc/nouscoder/openai/tokens")
    assert config.tls.certificate == "/etc/nouscoder/tls/tls.crt"
    ports = chart.one("Service", "nouscoder-generation", values)["spec"]["ports"]
    assert {"name": "openai", "port": 8000, "targetPort": "openai"} in ports
    pod = chart.one("Deployment", "nouscoder-generation", values)["spec"]["template"]["spec"]
    assert {"name": "openai", "containerPort": 8000} in pod["containers"][0]["ports"]
    assert ("Secret", "clients") in references([{"spec": pod}])
    own = {"generation": {"openai": {"enabled": True}}}
    pod = chart.one("Deployment", "nouscoder-generation", own)["spec"]["template"]["spec"]
    assert ("Secret", "nouscoder-verifier-tokens") in references([{"spec": pod}])
    without = {**own, "verifier": {"tokens": {"create": False}}}
    assert not configuration(chart, without, tmp_path).generation.openai.tokens_file
    assert not configuration(chart, {}, tmp_path).generation.openai.http


def test_operating_md_lists_every_image_for_a_cluster_without_internet(
    pods: dict[str, dict[str, dict[str, Any]]],
) -> None:
    text = (ROOT / "docs" / "operating.md").read_text("utf8")
    listed = text.partition("| Image | Values that name it |")[2].partition("\n\n")[0]
    images = {
        container["image"].rpartition("/")[2].partition(":")[0]
        for named in pods.values()
        for pod in named.values()
        for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
    }
    assert {"nouscoder-vllm", "redis", "redis_exporter"} < images
    for image in images:
        assert image in listed, image


def test_the_index_of_problems_has_a_volume(chart: ChartRig, tmp_path: Path) -> None:
    """The broker mounts /problems read-only, and /tmp is too small for the tests of many problems."""
    pod = chart.one("Deployment", "nouscoder-broker", {"broker": {"indexSize": "9Gi"}})["spec"]["template"]["spec"]
    assert {"name": "index", "emptyDir": {"sizeLimit": "9Gi"}} in pod["volumes"]
    folder = configuration(chart, {}, tmp_path).problems.index
    assert {"name": "index", "mountPath": folder} in pod["containers"][0]["volumeMounts"]


def test_the_default_values_are_the_demo_recipe(chart: ChartRig, tmp_path: Path) -> None:
    """All settings equal those of configs/demo.toml."""
    demo = tomllib.loads((ROOT / "configs" / "demo.toml").read_text("utf8"))
    rendered = json.loads(chart.one("ConfigMap", "nouscoder-config")["data"]["config.json"])
    assert flat(demo).items() <= flat(rendered).items()


def test_numbers_keep_their_kind(chart: ChartRig, tmp_path: Path) -> None:
    """Helm reads YAML's numbers as floats. Integers must not become 64.0, nor small numbers 0."""
    values = {
        "config": {
            "learner": {"device": "cuda", "learning_rate": 1e-7, "peak_flops": 989e12, "weight_decay": 0},
            "verifier": {"max_bodies_bytes": 2**31, "libraries": ["sortedcontainers", 'odd "name" \\ <é>\n']},
            "broker": {"drop_zero_variance": False},
        },
        "learner": {"resources": {"limits": {"nvidia.com/gpu": 1}}},
    }
    tree = json.loads(chart.one("ConfigMap", "nouscoder-config", values)["data"]["config.json"])
    assert tree["broker"]["batch_size"] == 64
    assert isinstance(tree["broker"]["batch_size"], int)
    config = configuration(chart, values, tmp_path)
    assert config.learner.learning_rate == 1e-7
    assert config.learner.peak_flops == 989e12
    assert config.learner.weight_decay == 0
    assert config.verifier.max_bodies_bytes == 2**31
    assert config.verifier.libraries == ("sortedcontainers", 'odd "name" \\ <é>\n')
    assert config.broker.drop_zero_variance is False


def test_null_selects_the_default_of_the_program(chart: ChartRig, tmp_path: Path) -> None:
    config = configuration(chart, {"config": {"learner": {"learning_rate": None}, "demo": None}}, tmp_path)
    assert config.learner.learning_rate == Config().learner.learning_rate
    assert config.demo == Config().demo


def test_all_pods_together_request_few_resources(chart: ChartRig) -> None:
    """The defaults are for two cores, and the cluster itself needs a part of them."""
    documents = chart.documents()
    workloads = [one for one in documents if one["kind"] in ("Deployment", "StatefulSet")]
    asked = sum(
        requested(container) for one in workloads for container in one["spec"]["template"]["spec"]["containers"]
    )
    runner = runner_pod(chart.one("ConfigMap", "nouscoder-sandbox"))["spec"]["containers"][0]
    pool = chart.defaults["verifier"]["sandbox"]["pool"]
    assert asked + (pool["size"] + pool["spares"]) * requested(runner) < 1.2


def test_a_changed_configuration_restarts_the_pods_that_read_it(chart: ChartRig) -> None:
    changed = {"config": {"learner": {"objective": {"clip_high": 0.3}}}}
    for kind, name in (("Deployment", "broker"), ("Deployment", "generation"), ("StatefulSet", "learner")):
        was, now = (
            chart.one(kind, f"nouscoder-{name}", values)["spec"]["template"]["metadata"]["annotations"]
            for values in ({}, changed)
        )
        assert was["checksum/config"] != now["checksum/config"]
    assert chart.one("StatefulSet", "nouscoder-redis") == chart.one("StatefulSet", "nouscoder-redis", changed)


def test_what_is_kept_on_uninstall(chart: ChartRig) -> None:
    kept = {
        (one["kind"], one["metadata"]["name"])
        for one in chart.documents()
        if one["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == "keep"
    }
    assert kept == {("PersistentVolumeClaim", "nouscoder-runs"), ("PersistentVolumeClaim", "nouscoder-redis")}


def test_every_mounted_object_exists(chart: ChartRig) -> None:
    """Every Secret, ConfigMap and claim of a pod is made by the chart or named in the values."""
    given = {
        "certificates",
        "redis-of-ours",
        "nouscoder-problems",
        "nouscoder-policy",
        "problems",
        "models",
        "runs",
        "modal-token",
        "hub",
        "kube-root-ca.crt",  # Kubernetes makes it in every namespace
    }
    for name, values in chart.variants.items():
        documents = chart.documents(values)
        made = {(one["kind"], one["metadata"]["name"]) for one in documents}
        for kind, wanted in references(documents):
            assert (kind, wanted) in made or wanted in given | {"clients"}, f"{name}: {kind}/{wanted}"


@pytest.mark.parametrize(
    ("release", "prefix"), [("nouscoder", "nouscoder"), ("a", "a-nouscoder"), ("r" * 53, "r" * 40)]
)
def test_names_come_from_the_release(chart: ChartRig, release: str, prefix: str) -> None:
    documents = chart.documents(name=release)
    names = [one["metadata"]["name"] for one in documents if one["kind"] not in CLUSTER_SCOPED]
    assert all(name.startswith(f"{prefix}-") and len(name) <= 63 for name in names)
    runners = "here-sandbox" if prefix == "nouscoder" else f"here-{prefix}-sandbox"
    assert {one["metadata"]["name"] for one in documents if one["kind"] in CLUSTER_SCOPED} == {runners}


def test_long_names_of_namespaces_stay_different(chart: ChartRig) -> None:
    made = {}
    for namespace in ("n" * 63, "n" * 62 + "m"):
        texts = chart.templates({}, name="other", namespace=namespace)
        made[namespace] = yaml.safe_load(texts["nouscoder/templates/sandbox/sandbox-namespace.yaml"])
    names = {one["metadata"]["name"] for one in made.values()}
    assert len(names) == 2
    assert all(len(name) <= 63 for name in names)


def test_two_releases_in_a_namespace_share_nothing(chart: ChartRig) -> None:
    both = [
        {(one["kind"], one["metadata"]["name"]) for one in chart.documents(name=name)} for name in ("first", "second")
    ]
    assert not both[0] & both[1]


def test_the_drain_fits_into_the_grace_period(chart: ChartRig) -> None:
    values = {"config": {"verifier": {"drain_s": 55.5}}}
    spec = chart.one("Deployment", "nouscoder-verifier", values)["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] >= 55.5 + 3 + 10


def configuration(chart: ChartRig, values: dict[str, Any], folder: Path) -> Config:
    file = folder / "config.json"
    file.write_text(chart.one("ConfigMap", "nouscoder-config", values)["data"]["config.json"], "utf8")
    return load_config(file)


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: repr(number(value))}
    return found


def number(value: object) -> object:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def runner_pod(config_map: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = json.loads(config_map["data"]["runner-pod.json"])
    return pod


def requested(container: dict[str, Any]) -> float:
    text = str(container["resources"]["requests"]["cpu"])
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


def references(documents: list[dict[str, Any]]) -> set[tuple[str, str]]:
    """(kind, name) of every object that pods mount or read."""
    found: set[tuple[str, str]] = set()

    def look(node: Any) -> None:
        if isinstance(node, list):
            for one in node:
                look(one)
        elif isinstance(node, dict):
            for key, kind in (("configMap", "ConfigMap"), ("secret", "Secret"), ("secretKeyRef", "Secret")):
                if isinstance(node.get(key), dict):
                    found.add((kind, node[key].get("name") or node[key]["secretName"]))
            if isinstance(node.get("persistentVolumeClaim"), dict):
                found.add(("PersistentVolumeClaim", node["persistentVolumeClaim"]["claimName"]))
            for one in node.values():
                look(one)

    look([one["spec"] for one in documents if "spec" in one])
    return found
