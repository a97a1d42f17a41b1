"""The values: all are described, invalid ones are refused by name, and their documents are up to date."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import helm_python as helm
import pytest

from nouscoder.config import Config

if TYPE_CHECKING:
    from tests.chart.conftest import ChartRig

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "nouscoder"

# What Helm writes before each message.
HEADING = re.compile(
    r"^(values don't meet the specifications .*?chart\(s\): nouscoder:|execution error at \([^)]*\):) "
)
# What a user reads for each value of BAD.
REFUSED = ROOT / "tests" / "golden" / "chart" / "refused-values.json"
UPDATE = bool(os.environ.get("NOUSCODER_UPDATE_GOLDEN"))
MESSAGES: dict[str, str] = {} if UPDATE else json.loads(REFUSED.read_text("utf8"))

# (value, invalid setting)
BAD: list[tuple[str, Any]] = [
    ("surprise", 1),
    ("verifer.replicas", 2),
    ("nameOverride", "Upper"),
    ("fullnameOverride", "x" * 41),
    ("commonLabels", {"team": "not allowed!"}),
    ("global.imageRegistry", "https://registry"),
    ("extraObjects", {"kind": "ConfigMap"}),
    ("backup.schedule", "every night"),
    ("backup.volumeSnapshotClass", "Bad_Name"),
    ("backup.keep", 0),
    ("backup.deadlineSeconds", "4h"),
    ("backup.persistence.size", "20 GB"),
    ("restore.from", "../20261129-030000"),
    ("restore.setAside", "demo"),
    ("prometheusRule.backupHours", 0),
    ("fetch.enabled", True),
    ("fetch.model", "a model"),
    ("fetch.commands", "hf download"),
    ("fetch", {"enabled": True, "model": "Qwen/Qwen3-0.6B"}),
    ("learner.schedulerName", "Volcano!"),
    ("learner.workloadLabels", {"kueue.x-k8s.io/queue-name": "not a name"}),
    ("image.registry", ""),
    ("image.registry", "https://registry"),
    ("image.tag", "latest"),
    ("image.tag", 1.5),
    ("image.pullPolicy", "Sometimes"),
    ("imagePullSecrets", "registry"),
    ("loop.enabled", "yes"),
    ("config.run.name", "has spaces"),
    ("config.run.seed", -1),
    ("config.run.total_batches", -1),
    ("config.run.total_batches", 1.5),
    ("config.run.root", "/elsewhere"),
    ("config.run.pages", ""),
    ("config.broker.batch_size", 60),
    ("config.broker.group_size", "8"),
    ("config.broker.grpc", "0.0.0.0:1"),
    ("config.broker.redis_url", "redis://:secret@host"),
    ("config.broker.lease_s", 0),
    ("config.generation.engine", "vllm9"),
    ("config.generation.sampling.top_p", 1.2),
    ("config.generation.policy_from", "folder"),
    ("config.learner.learning_rate", 0),
    ("config.learner.adam_betas", [0.9]),
    ("config.broker.reward.rule", "kind"),
    ("config.learner.objective.clip_low", 1),
    ("config.learner.objective.name", "ppo3"),
    ("config.verifier.tokens_file", "/tmp/tokens"),
    ("config.verifier.tests.cache", "/elsewhere"),
    ("config.verifier.tests.cache_bytes", 0),
    ("config.problems.index", "/elsewhere"),
    ("broker.indexSize", "4 GB"),
    ("config.verifier.sandbox.backend", "fake"),
    ("verifier.sandbox.libraries", "all"),
    ("config.verifier.sandbox.pool_managed", False),
    ("config.tls.certificate", "/tmp/tls.crt"),
    ("config.problems.train", "somewhere/train.jsonl"),
    ("redis.persistence.size", "1 GB"),
    ("redis.external.port", 70000),
    ("redis.external.enabled", True),
    ("redis.image.tag", "latest"),
    ("ipFamily", "IPv5"),
    ("redis.exporter.enabled", "yes"),
    ("redis.tls.enabled", "yes"),
    ("redis.tls.existingSecret", "a"),
    ("tls.existingSecrets.redis", "A B"),
    ("redis.exporter.image.tag", "latest"),
    ("redis.exporter.image.repository", "Exporter"),
    ("redis.exporter.port", 9121),
    ("problems.persistence.storageClass", "Not_A_Name"),
    ("broker.replicas", 2),
    ("broker.terminationGracePeriodSeconds", 1),
    ("broker.extraEnv", {"not-a-name": "x"}),
    ("broker.tolerations", [{"keys": "gpu"}]),
    ("broker.tolerations", [{"key": "gpu", "effect": "Never"}]),
    ("broker.affinity", {"nodeAfinity": {}}),
    ("verifier.replicas", 0),
    ("verifier.autoscaling.kind", "vpa"),
    ("verifier.autoscaling.min", -1),
    ("verifier.autoscaling.min", 0.5),
    ("verifier.autoscaling.max", 0),
    ("verifier.autoscaling.workPerPod", 0),
    ("verifier.autoscaling.oldestSeconds", "1m"),
    ("verifier.autoscaling.cooldownSeconds", 3601),
    ("verifier.autoscaling.keda.prometheus", "prometheus:9090"),
    ("verifier.autoscaling.keda.pollSeconds", 0),
    ("verifier.autoscaling.keda.authentication", "Bad_Name"),
    ("verifier.autoscaling", {"kind": "hpa", "min": 0}),
    ("verifier.autoscaling", {"kind": "hpa", "min": 5}),
    ("verifier.autoscaling", {"kind": "keda"}),
    ("verifier.sandbox.pool.min", -1),
    ("verifier.sandbox.pool.min", 3),
    ("verifier.sandbox.pool", {"min": 1, "managed": False}),
    ("verifier.sandbox", {"backend": "local", "pool": {"min": 1}}),
    ("verifier.sandbox.pool.idleSeconds", 0),
    ("verifier", {"autoscaling": {"kind": "hpa"}, "sandbox": {"backend": "local"}}),
    ("verifier", {"autoscaling": {"kind": "hpa"}, "sandbox": {"pool": {"managed": False}}}),
    ("verifier.service.type", "Ingress"),
    ("verifier.resources", {"limit": {"memory": "1Gi"}}),
    ("verifier.resources", {"limits": {"memory": "lots"}}),
    ("verifier.resources", {"limits": {"memry": "1Gi"}}),
    ("verifier.sandbox.backend", "runsc"),
    ("verifier.sandbox.runtimeClassName", ""),
    ("verifier.sandbox.namespace.name", "Bad_Name"),
    ("verifier.sandbox.namespace.name", "n" * 64),
    ("verifier.sandbox.namespace.create", "false"),
    ("verifier.sandbox.namespace.labels", {}),
    ("verifier.sandbox.admissionPolicy", "off"),
    ("verifier.sandbox.localSlots", -1),
    ("verifier.sandbox.pool.size", 0),
    ("verifier.sandbox.pool.managed", "false"),
    ("verifier.sandbox.pool.source", "sandboxes"),
    ("verifier.sandbox.pool", {"source": "agentSandbox", "managed": False}),
    ("verifier.sandbox", {"backend": "local", "pool": {"source": "agentSandbox"}}),
    ("verifier.sandbox.pool.maxSessions", 0),
    ("verifier.sandbox.pool.tmpSize", "big"),
    ("generation.strategy", "BlueGreen"),
    ("generation.sharedMemory", "64MB"),
    ("learner.replicas", 2),
    ("learner.workload", "deployment"),
    ("learner.pods", 0),
    ("learner.pods", 2),
    ("learner.ranksPerPod", 17),
    ("learner.ranksPerPod", "8"),
    ("learner.maxRestarts", -1),
    ("learner.topologyKey", "not a label"),
    ("learner.rdma.resource", "infiniband"),
    ("learner.rdma.count", 0),
    ("learner.rdma.ipcLock", "yes"),
    ("config.learner.context_parallel", 3),
    ("learner.persistence.accessModes", ["ReadWriteSometimes"]),
    ("redis.persistence.accessModes", []),
    ("problems.persistence.accessModes", "ReadWriteMany"),
    ("podSecurityContext.runAsUser", -1),
    ("podSecurityContext.runAsuser", 1),
    ("podSecurityContext.seccompProfile", {"type": "Off"}),
    ("securityContext.capabilities", {"drop": ["all"]}),
    ("securityContext.privilged", True),
    ("learner.securityContext", {"runAsUser": "root"}),
    ("broker.podSecurityContext", {"fsGroupChangePolicy": "Sometimes"}),
    ("broker.image.digest", "sha256:abc"),
    ("redis.image.digest", "7"),
    ("verifier.sandbox.image.digest", "latest"),
    ("verifier.sandbox.pool.existingSecret", "Bad_Name"),
    ("verifier.sandbox.pool.sidecars", []),
    ("verifier.sandbox.pool.extraEnv", {"A": "b"}),
    ("verifier.extraEnvFrom", [{"secretRef": {}}]),
    ("verifier.extraEnvFrom", [{"secret": {"name": "a"}}]),
    ("generation.extraVolumes", [{"name": "a"}]),
    ("generation.extraVolumeMounts", [{"name": "a", "mountPath": "relative"}]),
    ("generation.extraVolumeMounts", [{"name": "a", "path": "/a"}]),
    ("learner.sidecars", [{"name": "a"}]),
    ("redis.sidecars", [{"name": "Not_A_Name", "image": "i"}]),
    ("broker.serviceAccount.create", "yes"),
    ("broker.serviceAccount.name", "Bad_Name"),
    ("verifier.serviceAccount.create", False),
    ("generation.topologySpreadConstraints", [{"maxSkew": 1, "topologyKey": "zone"}]),
    (
        "generation.topologySpreadConstraints",
        [{"maxSkew": 0, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
    ),
    (
        "learner.topologySpreadConstraints",
        [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "Never"}],
    ),
    ("learner.probes.startupSeconds", 0),
    ("broker.probes.livenessSeconds", 9),
    ("verifier.probes.readinessSeconds", "15s"),
    ("verifier.ingress.enabled", True),
    ("verifier.ingress.hosts", ["https://grading"]),
    ("verifier.ingress.path", "grading"),
    ("verifier.ingress.tls", [{"hosts": ["a.example"]}]),
    ("verifier.httpRoute.enabled", True),
    ("verifier.httpRoute.parentRefs", [{"namespace": "gateways"}]),
    ("verifier.httpRoute.requestTimeout", "ten minutes"),
    ("networkPolicy.dnsPorts", []),
    ("config.generation.sampling.top_p", "1.2"),
    ("config.generation.vllm.weight_transfer", "gloo"),
    ("config.generation.sampling.top_p", "much"),
    ("config.learner.learning_rate", "0"),
    ("config.learner.adam_betas", ["0.9", "much"]),
    ("tls.enabled", True),
    ("tls.existingSecret", "Bad_Name"),
    ("networkPolicy.metricsFrom", [{"pods": {}}]),
    ("networkPolicy.metricsFrom", [{"ipBlock": {"cidr": "10.0.0.1"}}]),
    ("networkPolicy.gradingFrom", {"podSelector": {}}),
    ("networkPolicy.apiServer.ports", [0]),
    ("networkPolicy.extraEgress.redis", []),
    ("podDisruptionBudget.maxUnavailable", 0),
    ("serviceMonitor.interval", "often"),
    ("prometheusRule.noStepMinutes", 5),
    ("prometheusRule.queueWaitSeconds", "1m"),
    ("prometheusRule.disabled", ["NoSteps"]),
    ("prometheusRule.oldestWaitSeconds", 0),
    ("prometheusRule.workAgeSeconds", 59),
    ("prometheusRule.certificateDays", 400),
    ("prometheusRule.runbookUrl", "docs/operating.md"),
    ("dashboards.labels", {"grafana_dashboard": 1}),
    ("tests.timeoutSeconds", 5),
    ("tls.gradingClientCertificates", True),
    ("tls.existingSecret", "a"),
    ("tls.existingSecrets.broker", "a"),
    ("redis", {"tls": {"enabled": True}, "external": {"enabled": True, "existingSecret": "a"}}),
    ("podSecurityContext.runAsUser", 0),
    ("learner.podSecurityContext.runAsUser", 0),
    ("policy.existingClaim", "models"),
    ("config.policy.path", "/policy"),
    ("config.verifier.tests.store", "/shared/tests"),
    ("fetch.commands", ["hf download a"]),
    ("generation.resources.limits", {"nvidia.com/gpu": 1}),
]


@pytest.mark.parametrize(("value", "given"), BAD, ids=[f"{value}={given}"[:60] for value, given in BAD])
def test_a_bad_value_is_refused_by_name(chart: ChartRig, value: str, given: Any) -> None:
    with pytest.raises(helm.HelmError) as refused:
        chart.documents(tree(value, given))
    message = HEADING.sub("", " ".join(str(refused.value).split()))
    assert names(message, value), message
    assert message == kept_message(f"{value} = {json.dumps(given)}"[:200], message)


def test_only_a_run_is_released(chart: ChartRig) -> None:
    with pytest.raises(helm.HelmError, match=r"needs loop\.enabled"):
        chart.documents({"loop": {"enabled": False}, "whenFinished": "release"})


def test_at_least_a_hundred_different_values_are_refused() -> None:
    assert len({value for value, _ in BAD}) >= 100
    assert set(MESSAGES) == {f"{value} = {json.dumps(given)}"[:200] for value, given in BAD}


def kept_message(case: str, message: str) -> str:
    """The message that tests/golden/chart/refused-values.json has; `make golden` writes the current one."""
    if UPDATE:
        MESSAGES[case] = message
        REFUSED.write_text(json.dumps(MESSAGES, indent=1, sort_keys=True, ensure_ascii=False) + "\n", "utf8")
    return str(MESSAGES[case])


@pytest.mark.parametrize(
    ("tests", "mebibytes"),
    [({}, 2048), ({"cache_bytes": 3 * 1024**3}, 4096), ({"store": "s3://bucket/tests", "cache_bytes": 2**21}, 2)],
)
def test_the_volume_of_tests_holds_cache_and_store(chart: ChartRig, tests: dict[str, Any], mebibytes: int) -> None:
    """The volume has 64 MiB more than both bounds. A store elsewhere needs no space in it."""
    pod = chart.one("Deployment", "nouscoder-verifier", tree("config.verifier.tests", tests))["spec"]["template"][
        "spec"
    ]
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert volumes["tests"] == {"name": "tests", "emptyDir": {"sizeLimit": f"{mebibytes + 64}Mi"}}
    assert {"name": "tests", "mountPath": "/tests"} in pod["containers"][0]["volumeMounts"]


@pytest.mark.parametrize("name", ["cache_bytes", "store_bytes"])
def test_the_volume_of_tests_needs_its_numbers(chart: ChartRig, name: str) -> None:
    with pytest.raises(helm.HelmError, match=f"config.verifier.tests.{name} must be set"):
        chart.documents(tree(f"config.verifier.tests.{name}", None))


def test_an_unmanaged_pool_is_a_deployment(chart: ChartRig) -> None:
    values = {"verifier": {"replicas": 3, "sandbox": {"pool": {"managed": False, "size": 4}}}}
    assert chart.one("Deployment", "nouscoder-sandbox", values)["spec"]["replicas"] == 12
    rolling = chart.one("Deployment", "nouscoder-verifier", values)["spec"]["strategy"]["rollingUpdate"]
    assert rolling["maxSurge"] == 0


def test_schema_is_shipped() -> None:
    ignored = (CHART / ".helmignore").read_text("utf8").splitlines()
    assert not any(Path("values.schema.json").match(line) for line in ignored if line and not line.startswith("#"))
    with helm.Chart.load(CHART) as loaded:
        assert loaded.schema == schema()


def test_every_value_is_described_and_every_object_closed() -> None:
    for path, node in objects(schema(), ""):
        for name, child in node.get("properties", {}).items():
            assert len(child.get("description", "")) > 5 or "config" in path, f"{path}.{name} has no description"
        # Helm shares `global` with other charts, and labels are free but for those of the chart.
        if node.get("properties") and path not in ("global", "ownLabels"):
            assert node.get("additionalProperties") is False, f"{path} admits unknown values"


def test_every_setting_of_the_program_is_described() -> None:
    for path, node in objects(schema()["properties"]["config"], "config"):
        assert node.get("description"), path


def test_every_default_is_a_known_value_with_a_comment(chart: ChartRig) -> None:
    lines = (CHART / "values.yaml").read_text("utf8").splitlines()
    for number, line in enumerate(lines):
        key = re.match(r"( *)([A-Za-z_]+):", line)
        if key is None or key[2] in ("requests", "limits"):  # the comment is at the resources
            continue
        section = line.rstrip().endswith(":")
        assert section or lines[number - 1].lstrip().startswith("#"), f"values.yaml:{number + 1} has no comment"
    chart.documents(chart.defaults)


def test_every_value_has_a_default(chart: ChartRig) -> None:
    """values.yaml shows all values. Its `config` shows only the settings that the demo changes."""
    missing = [path for path in leaves(schema(), "") if path.split(".")[0] != "config"]
    missing = [path for path in missing if not found(chart.defaults, path)]
    assert missing == []


def test_documents_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "deploy" / "generated"), "check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_values_do_not_offer_what_the_templates_set() -> None:
    offered = set(leaves(schema()["properties"]["config"], ""))
    known = set(settings(Config().model_dump(), ""))
    assert offered <= known
    withheld = known - offered
    assert {
        "run.root",
        "broker.redis_url",
        "broker.grpc",
        "verifier.tokens_file",
        "verifier.sandbox.backend",
    } <= withheld
    assert {path for path in withheld if path.split(".")[0] in ("problems", "policy", "demo")} == {"problems.index"}
    set_by_templates = (
        "grpc",
        "metrics",
        "http",
        "health",
        "grpc_health",
        "root",
        "services",
        "pages",
        "cache",
        "index",
    )
    set_for_learner = ("start_after", "folder_patience_s", "serve_after_run")
    assert all(
        path.split(".")[-1] in (*set_by_templates, *set_for_learner)
        or re.search(r"redis_url|tls|policy_from|tokens?_file|sandbox\.", path)
        or path == "plan.stages"  # a plan starts the services of each stage itself
        or path.startswith(
            ("sft.", "recipe.", "run.release.")
        )  # no service fine-tunes, or reads where a recipe is from
        for path in withheld
    )


def tree(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    return value


def names(message: str, value: str) -> bool:
    """Whether the message names the value, or its section and the unknown key."""
    pointer = "/" + value.replace(".", "/")
    if value in message or pointer in message:
        return True
    parts = value.split(".")
    return any(
        f"'/{'/'.join(parts[:depth])}'" in message.replace("''", "'/'") and f"'{parts[depth]}' not allowed" in message
        for depth in range(len(parts))
    )


def schema() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text("utf8"))
    return loaded


def objects(node: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema in a schema."""
    if path:
        yield path, node
    for group in ("properties", "definitions"):
        for name, child in node.get(group, {}).items():
            yield from objects(child, f"{path}.{name}".lstrip("."))


def leaves(node: dict[str, Any], path: str) -> Iterator[str]:
    for name, child in node.get("properties", {}).items():
        inner = f"{path}.{name}".lstrip(".")
        first = child.get("anyOf", [child])[0]  # of sections that are told apart by name, that of the defaults
        if first.get("properties"):
            yield from leaves(first, inner)
        else:
            yield inner


def settings(node: dict[str, Any], path: str) -> Iterator[str]:
    for name, value in node.items():
        inner = f"{path}.{name}".lstrip(".")
        if isinstance(value, dict) and value:
            yield from settings(value, inner)
        else:
            yield inner


def found(defaults: dict[str, Any], path: str) -> bool:
    node: Any = defaults
    for key in path.split("."):
        if not isinstance(node, dict) or key not in node:
            return False
        node = node[key]
    return True
