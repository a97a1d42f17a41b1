"""Whether the nodes and the quotas of a cluster have room for the pods of a release."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from nouscoder.doctor.cluster.client import amount
from nouscoder.doctor.cluster.facts import Amount, Node, Taint
from nouscoder.doctor.cluster.release_objects import PlannedPod
from nouscoder.doctor.cluster.target import Document, Kind
from nouscoder.doctor.finding import Finding

_LARGER = "a larger node or one more, or lower requests (the *.resources.requests of the chart's values)"


@dataclass(frozen=True, slots=True)
class PodToPlace:
    """A pod as the scheduler sees it."""

    maker: str
    count: int
    asks: Amount
    selector: Mapping[str, str]
    tolerations: Sequence[Mapping[str, str]]

    def may_use(self, node: Node) -> bool:
        """Whether the node's state, labels and taints admit the pod."""
        labelled = all(node.labels.get(key) == value for key, value in self.selector.items())
        return (
            node.open and labelled and all(any(_tolerates(t, taint) for t in self.tolerations) for taint in node.taints)
        )


def _tolerates(toleration: Mapping[str, str], taint: Taint) -> bool:
    if toleration.get("effect") not in (None, "", taint.effect):
        return False
    if not toleration.get("key"):
        return toleration.get("operator") == "Exists"
    same_value = toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.value
    return toleration["key"] == taint.key and same_value


def to_place(pod: PlannedPod, admitted: Document) -> PodToPlace:
    """`admitted` is the pod as the cluster would store it, with the defaults of a LimitRange; or as it is planned."""
    spec = admitted["spec"]
    asks = sum_of(spec, "requests") + amount(spec.get("overhead") or {})
    return PodToPlace(pod.maker, pod.count, asks, spec.get("nodeSelector") or {}, spec.get("tolerations") or ())


def sum_of(spec: Document, which: str) -> Amount:
    """Requests or limits of a pod: the sum of its containers, or the largest init container if higher."""
    together = sum((_of(container, which) for container in spec["containers"]), Amount(0, 0))
    for container in spec.get("initContainers") or ():
        together = together.at_least(_of(container, which))
    return together


def _of(container: Mapping[str, Any], which: str) -> Amount:
    given = (container.get("resources") or {}).get(which) or {}
    return amount({name: str(quantity) for name, quantity in given.items()})


def judge_nodes(pods: Sequence[PodToPlace], nodes: Sequence[Node]) -> list[Finding]:
    """A finding for each pod that no node could hold even if it were empty; else one for the largest pod."""
    nowhere: dict[str, list[str]] = {}
    findings = []
    for pod in pods:
        usable = [node for node in nodes if pod.may_use(node)]
        if not usable:
            wanted = ", ".join(f"{key}={value}" for key, value in pod.selector.items())
            nowhere.setdefault(f"is ready{wanted and f', has the labels {wanted}'}", []).append(pod.maker)
        elif not any(node.allocatable.holds(pod.asks) for node in usable):
            findings.append(_too_small(pod, usable))
    for needed, makers in nowhere.items():
        detail = f"none of {len(nodes)} nodes {needed} and admits by its taints: {', '.join(makers)}"
        fix = "kubectl get nodes; nodes that are ready, or the nodeSelector and tolerations of the chart's values"
        findings.append(Finding("nodes", False, True, detail, fix))
    if not findings and pods:
        largest = max(pods, key=lambda pod: _size(pod.asks))
        findings.append(Finding("nodes", True, True, f"one can hold the largest pod, {largest.maker}: {largest.asks}"))
    return findings


def _too_small(pod: PodToPlace, usable: Sequence[Node]) -> Finding:
    best = min(usable, key=lambda node: (len(node.allocatable.lacks(pod.asks)), -node.allocatable.memory_bytes))
    lacking = best.allocatable.lacks(pod.asks)
    devices = [name for name in lacking if "/" in name]
    fixes = [f"nodes whose device plugin offers {', '.join(devices)}"] if devices else []
    fix = ", and ".join(fixes + ([_LARGER] if len(devices) < len(lacking) else []))
    detail = f"it asks for {pod.asks}; {best.name} has too little of {', '.join(lacking)}: {best.allocatable}"
    return Finding(f"a node for {pod.maker}", False, True, detail, fix)


def judge_free(pods: Sequence[PodToPlace], nodes: Sequence[Node], requested: Mapping[str, Amount]) -> Finding:
    """Whether all pods fit together into what is not requested yet: first fit, largest pod first."""
    free = {node.name: node.allocatable - requested.get(node.name, Amount(0, 0)) for node in nodes}
    ask = sum((pod.asks for pod in pods for _ in range(pod.count)), Amount(0, 0))
    detail = f"the install requests {ask}"
    for pod in sorted(pods, key=lambda pod: _size(pod.asks), reverse=True):
        usable = [node.name for node in nodes if pod.may_use(node)]
        for number in range(pod.count):
            place = next((name for name in usable if free[name].holds(pod.asks)), None)
            if place is None:
                detail = (
                    f"{detail}, but only {number} of {pod.count} pods of {pod.maker} find a node with {pod.asks} free"
                )
                return Finding("room", False, True, detail, _LARGER)
            free[place] = free[place] - pod.asks
    return Finding("room", True, True, f"{detail}, which is free")


def _size(asks: Amount) -> tuple[int, int, float]:
    return sum(asks.devices.values()), asks.memory_bytes, asks.cpu_cores


def judge_quota(quota: Document, asked: Mapping[str, float]) -> Finding | None:
    """Compare what a quota has left with what the whole install asks for; a dry run sees only one object at a time.

    None for a quota with scopes, which counts only some of the pods: the dry runs tell about each.
    """
    spec, name = quota["spec"], quota["metadata"]["name"]
    if spec.get("scopes") or spec.get("scopeSelector"):
        return None
    used = (quota.get("status") or {}).get("used") or {}
    short = []
    for resource, hard in sorted((spec.get("hard") or {}).items()):
        left = _number(hard) - _number(used.get(resource, 0))
        if (wanted := asked.get(resource, 0)) > left + 1e-9:
            short.append(f"{resource}: {_shown(wanted)} of {_shown(max(left, 0))} left")
    if short:
        fix = f"raise the quota {name}, or lower the *.resources, replicas and volumes of the chart's values"
        return Finding(f"ResourceQuota/{name}", False, True, f"the whole install needs {'; '.join(short)}", fix)
    return Finding(f"ResourceQuota/{name}", True, True, "has room for the whole install")


def asked_of_quotas(
    pods: Sequence[tuple[int, Document]], objects: Sequence[Document], kinds: Mapping[str, Kind]
) -> dict[str, float]:
    """What a quota would count, by its names of resources. `pods` are (count, pod as it would be stored)."""
    asked: dict[str, float] = {}

    def add(name: str, number: float) -> None:
        asked[name] = asked.get(name, 0.0) + number

    for count, pod in pods:
        add("pods", count)
        add("count/pods", count)
        for name, number in _quota_names(pod["spec"]):
            add(name, count * number)
    for one in objects:
        kind = kinds.get(f"{one['apiVersion']}/{one['kind']}")
        if kind is None or one["kind"] == "Pod":
            continue
        group = one["apiVersion"].rpartition("/")[0]
        add(f"count/{kind.plural}{'.' if group else ''}{group}", 1)
        if not group:
            add(kind.plural, 1)
        if one["kind"] == "PersistentVolumeClaim":
            add("requests.storage", _number(one["spec"]["resources"]["requests"]["storage"]))
    return asked


def _quota_names(spec: Document) -> Iterator[tuple[str, float]]:
    for which in ("requests", "limits"):
        total = sum_of(spec, which)
        yield f"{which}.cpu", total.cpu_cores
        yield f"{which}.memory", total.memory_bytes
        for name, number in total.devices.items():
            yield f"{which}.{name}", number
        if which == "requests":
            yield "cpu", total.cpu_cores
            yield "memory", total.memory_bytes


def _number(quantity: object) -> float:
    return float(parse_quantity(quantity))  # type: ignore[no-untyped-call]


def _shown(number: float) -> str:
    return f"{number / 1024**3:.2f} GiB" if number >= 1024**2 else f"{number:g}"
