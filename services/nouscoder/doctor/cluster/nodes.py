"""Whether the nodes of a cluster can hold the pods of a release."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nouscoder.doctor import Finding
from nouscoder.doctor.cluster.client import Amount, Node, lacks, shown
from nouscoder.doctor.cluster.rendered import PlannedPod

_LARGER = "a larger node or one more, or lower requests (the *.resources.requests of the chart's values)"


def _may_use(pod: PlannedPod, node: Node) -> bool:
    """Whether the node's state, labels and taints admit the pod."""
    spec = pod.document["spec"]
    labelled = all(node.labels.get(key) == value for key, value in (spec.get("nodeSelector") or {}).items())
    tolerations = spec.get("tolerations") or ()
    return node.open and labelled and all(any(_tolerates(t, taint) for t in tolerations) for taint in node.taints)


def _tolerates(toleration: Mapping[str, str], taint: Mapping[str, str]) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if not toleration.get("key"):
        return toleration.get("operator") == "Exists"
    same_value = toleration.get("operator") == "Exists" or toleration.get("value", "") == taint["value"]
    return toleration["key"] == taint["key"] and same_value


def judge_nodes(pods: Sequence[PlannedPod], nodes: Sequence[Node]) -> list[Finding]:
    """A finding for each pod that no node could hold even if it were empty; else one for the largest pod."""
    nowhere: dict[str, list[str]] = {}
    findings = []
    for pod in pods:
        usable = [node for node in nodes if _may_use(pod, node)]
        if not usable:
            selector = pod.document["spec"].get("nodeSelector") or {}
            wanted = ", ".join(f"{key}={value}" for key, value in selector.items())
            nowhere.setdefault(f"is ready{wanted and f', has the labels {wanted}'}", []).append(pod.maker)
        elif all(lacks(node.allocatable, pod.asks) for node in usable):
            findings.append(_too_small(pod, usable))
    for needed, makers in nowhere.items():
        detail = f"none of {len(nodes)} nodes {needed} and admits by its taints: {', '.join(makers)}"
        fix = "kubectl get nodes; nodes that are ready, or the nodeSelector and tolerations of the chart's values"
        findings.append(Finding("nodes", False, True, detail, fix))
    if not findings and pods:
        largest = max(pods, key=lambda pod: _size(pod.asks))
        findings.append(
            Finding("nodes", True, True, f"one can hold the largest pod, {largest.maker}: {shown(largest.asks)}")
        )
    return findings


def _too_small(pod: PlannedPod, usable: Sequence[Node]) -> Finding:
    best = min(usable, key=lambda node: (len(lacks(node.allocatable, pod.asks)), -node.allocatable["memory"]))
    lacking = lacks(best.allocatable, pod.asks)
    devices = [name for name in lacking if "/" in name]
    fixes = [f"nodes whose device plugin offers {', '.join(devices)}"] if devices else []
    fix = ", and ".join(fixes + ([_LARGER] if len(devices) < len(lacking) else []))
    detail = (
        f"it asks for {shown(pod.asks)}; {best.name} has too little of {', '.join(lacking)}: {shown(best.allocatable)}"
    )
    return Finding(f"a node for {pod.maker}", False, True, detail, fix)


def judge_free(pods: Sequence[PlannedPod], nodes: Sequence[Node], requested: Mapping[str, Amount]) -> Finding:
    """Whether all pods fit together into what is not requested yet: first fit, largest pod first."""
    free = {node.name: node.allocatable - requested.get(node.name, Amount()) for node in nodes}
    ask = sum((pod.asks for pod in pods for _ in range(pod.count)), Amount())
    detail = f"the install requests {shown(ask)}"
    for pod in sorted(pods, key=lambda pod: _size(pod.asks), reverse=True):
        usable = [node.name for node in nodes if _may_use(pod, node)]
        for number in range(pod.count):
            place = next((name for name in usable if not lacks(free[name], pod.asks)), None)
            if place is None:
                only = f"only {number} of {pod.count} pods of {pod.maker} find a node with {shown(pod.asks)} free"
                return Finding("room", False, True, f"{detail}, but {only}", _LARGER)
            free[place] = free[place] - pod.asks
    return Finding("room", True, True, f"{detail}, which is free")


def _size(asks: Amount) -> tuple[int, int, int]:
    return sum(number for name, number in asks.items() if "/" in name), asks["memory"], asks["cpu"]
