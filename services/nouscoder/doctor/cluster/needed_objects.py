"""Secrets, ConfigMaps and claims that the pods of a release read, and which of them nobody has made yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nouscoder.doctor.cluster.facts import ClusterError
from nouscoder.doctor.cluster.release_objects import PlannedPod
from nouscoder.doctor.cluster.target import Document, Target
from nouscoder.doctor.finding import Finding

# The kind of each plural that a pod may name.
KINDS = {"secrets": "Secret", "configmaps": "ConfigMap", "persistentvolumeclaims": "PersistentVolumeClaim"}


@dataclass(frozen=True, slots=True)
class Needed:
    """An object that a pod cannot start without."""

    plural: str
    namespace: str
    name: str


def needed_by(pod: PlannedPod) -> Iterator[tuple[Needed, frozenset[str]]]:
    """Every object that the pod needs, with the keys of which it makes files or variables."""
    spec = pod.document["spec"]
    for secret in spec.get("imagePullSecrets") or ():
        yield Needed("secrets", pod.namespace, secret["name"]), frozenset()
    for volume in spec.get("volumes") or ():
        for source in (volume, *(volume.get("projected") or {}).get("sources", ())):
            yield from _of_volume(source, pod.namespace)
    for container in (*spec["containers"], *(spec.get("initContainers") or ())):
        for one in container.get("envFrom") or ():
            yield from _of_variables(one, "Ref", pod.namespace)
        for one in container.get("env") or ():
            yield from _of_variables(one.get("valueFrom") or {}, "KeyRef", pod.namespace)


def _of_volume(source: Mapping[str, Any], namespace: str) -> Iterator[tuple[Needed, frozenset[str]]]:
    if "persistentVolumeClaim" in source:
        yield Needed("persistentvolumeclaims", namespace, source["persistentVolumeClaim"]["claimName"]), frozenset()
    for field, plural in (("secret", "secrets"), ("configMap", "configmaps")):
        given = source.get(field)
        if given and not given.get("optional"):
            keys = frozenset(item["key"] for item in given.get("items") or () if "key" in item)
            yield Needed(plural, namespace, given.get("secretName") or given["name"]), keys


def _of_variables(source: Mapping[str, Any], suffix: str, namespace: str) -> Iterator[tuple[Needed, frozenset[str]]]:
    for field, plural in ((f"secret{suffix}", "secrets"), (f"configMap{suffix}", "configmaps")):
        given = source.get(field)
        if given and not given.get("optional"):
            keys = frozenset({given["key"]} if "key" in given else ())
            yield Needed(plural, namespace, given["name"]), keys


def missing_objects(pods: Sequence[PlannedPod], objects: Sequence[Document], target: Target) -> list[Finding]:
    """One finding for each object that is missing, lacks a key, or cannot be read; else one that all are there."""
    wanted: dict[Needed, tuple[set[str], set[str]]] = {}
    for pod in pods:
        for needed, keys in needed_by(pod):
            asked, components = wanted.setdefault(needed, (set(), set()))
            asked |= keys
            components.add(pod.component)
    made = _made_by(objects)
    findings = [
        finding
        for needed, (keys, components) in sorted(wanted.items(), key=lambda item: str(item[0]))
        if needed not in made
        for finding in _look(needed, keys, sorted(components), target)
    ]
    own = sum(needed in made for needed in wanted)
    if not findings:
        detail = f"{len(wanted)} Secrets, ConfigMaps and claims are there, {own} of them made by the install"
        return [Finding("Secrets and claims", True, True, detail)]
    return findings


def _made_by(objects: Sequence[Document]) -> set[Needed]:
    """What the install makes itself; cert-manager makes the Secret of a Certificate."""
    plurals = {kind: plural for plural, kind in KINDS.items()}
    made = set()
    for one in objects:
        namespace = one["metadata"]["namespace"]
        if one["kind"] in plurals:
            made.add(Needed(plurals[one["kind"]], namespace, one["metadata"]["name"]))
        elif one["kind"] == "Certificate":
            made.add(Needed("secrets", namespace, one["spec"]["secretName"]))
    return made


def _look(needed: Needed, keys: set[str], components: list[str], target: Target) -> Iterator[Finding]:
    kind = KINDS[needed.plural]
    name, user = f"{kind}/{needed.name}", f"of {', '.join(components)}"
    try:
        found = target.read(needed.plural, needed.namespace, needed.name)
    except ClusterError as error:
        fix = f"kubectl -n {needed.namespace} get {kind.lower()} {needed.name}, by somebody who may"
        yield Finding(name, False, True, f"unknown, needed by the pods {user}: {error}", fix, known=False)
        return
    if found is None:
        fix = f"make it in {needed.namespace}, or change the value that names it"
        if keys:
            fix = f"make it in {needed.namespace} with {_keys(keys)}, or change the value that names it"
        yield Finding(name, False, True, f"not in {needed.namespace}, and the pods {user} cannot start without it", fix)
        return
    data = {**(found.get("data") or {}), **(found.get("binaryData") or {})}
    if lacking := {key for key in keys if not data.get(key)}:
        fix = f"add {_keys(lacking)}; it has {', '.join(sorted(data)) or 'none'}"
        yield Finding(name, False, True, f"lacks what the pods {user} read from it, or it is empty there", fix)


def _keys(keys: set[str]) -> str:
    return f"the key{'s' if len(keys) > 1 else ''} {', '.join(sorted(keys))}"
