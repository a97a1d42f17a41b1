"""Requests and limits that Kubernetes would take, and with which no pod would work, are refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import helm_python as helm
import pytest
import yaml

if TYPE_CHECKING:
    from tests.chart.conftest import ChartRig

POOL = "verifier: {sandbox: {pool: {%s}}}"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            "broker: {resources: {requests: {memory: 64}}}",
            "broker.resources.requests.memory is 64, which is less than 1Mi",
        ),
        ("redis: {resources: {requests: {memory: 1Ki}}}", "redis.resources.requests.memory is 1Ki"),
        (
            "generation: {resources: {requests: {memory: 4Gi}, limits: {memory: 4G}}}",
            "is 4Gi, more than generation.resources.limits.memory",
        ),
        (
            "verifier: {resources: {requests: {cpu: 2}, limits: {cpu: 500m}}}",
            "verifier.resources.requests.cpu is 2, more than",
        ),
        ("learner: {runResources: {requests: {cpu: 3}, limits: {cpu: 2.5}}}", "learner.runResources.requests.cpu is 3"),
        ("generation: {resources: {limits: {nvidia.com/gpu: 0.5}}}", "a device cannot be divided"),
        (POOL % "resources: {limits: {memory: 4Gi}}", "not more than a candidate may use"),
        (POOL % "candidateMemory: 8Gi", "limits.memory is 5Gi, not more than a candidate may use"),
        ("config: {generation: {engine: vllm}}", "which has no vLLM: set it to nouscoder-vllm"),
        ("config: {generation: {device: cuda}}", "generation.resources.limits has no GPU"),
        ("config: {learner: {device: cuda}}", "learner.resources.limits has no GPU"),
        ("config: {learner: {device: 'cuda:0'}}", "config.learner.device is cuda:0, but"),
        (
            "{config: {generation: {device: cuda, vllm: {tensor_parallel_size: 8}}},"
            " generation: {resources: {limits: {nvidia.com/gpu: 1}}}}",
            "tensor_parallel_size is 8, but generation.resources.limits has 1 GPUs",
        ),
        (
            "generation: {resources: {requests: {nvidia.com/gpu: 1}, limits: {nvidia.com/gpu: 8}}}",
            "the same number of a device in both",
        ),
        ("generation: {resources: {requests: {nvidia.com/gpu: 1}}}", "limits has 0: Kubernetes wants the same"),
        (POOL % "resources: {limits: null}", "limits.memory must be set: without it a runner may use all memory"),
        (POOL % "resources: null", "limits.memory must be set"),
        (POOL % "tmpSize: 6Gi", "files in /tmp are memory"),
        ("tests: {resources: {requests: {memory: 1Gi}}}", "tests.resources.requests.memory is 1Gi, more than"),
        # Kubernetes ignores an unknown key of a selector, and an empty selector selects all.
        ("networkPolicy: {gradingFrom: [{namespaceSelector: {matchLabel: {team: a}}}]}", "'matchLabel' not allowed"),
        ("networkPolicy: {pagesFrom: [{podSelector: {team: a}}]}", "'team' not allowed"),
        ("networkPolicy: {extraEgress: {verifier: [{to: []}]}}", "minItems: got 0, want 1"),
        (
            "learner: {affinity: {nodeAffinity: {requiredDuringScheduling: {}}}}",
            "'requiredDuringScheduling' not allowed",
        ),
        ("commonLabels: {app.kubernetes.io/component: mine}", "/commonLabels"),
        ("verifier: {sandbox: {pool: {podLabels: {app.kubernetes.io/instance: mine}}}}", "/pool/podLabels"),
        ("redis: {persistence: {size: '10'}}", "/redis/persistence/size"),
        ("learner: {persistence: {size: 5Ki}}", "/learner/persistence/size"),
    ],
)
def test_it_is_refused(chart: ChartRig, values: str, said: str) -> None:
    with pytest.raises(helm.HelmError) as refused:
        chart.templates(yaml.safe_load(values))
    assert said in " ".join(str(refused.value).split())


@pytest.mark.parametrize(
    "values",
    [
        POOL % "candidateMemory: 512Mi, resources: {limits: {memory: 1Gi}}",
        "broker: {resources: {requests: {cpu: 100m, memory: 128Mi}, limits: {cpu: 0.1, memory: 134217728}}}",
        "{config: {generation: {device: cuda}}, generation: {resources: {limits: {nvidia.com/mig-1g.10gb: 1}}}}",
        "{config: {generation: {engine: vllm}}, generation: {image: {repository: ours}}}",
    ],
)
def test_it_renders(chart: ChartRig, values: str) -> None:
    given: dict[str, Any] = yaml.safe_load(values)
    assert chart.templates(given)
