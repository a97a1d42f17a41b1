"""Two releases of one name put their dashboards, rules and monitors into one monitoring namespace."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import yaml
from tests.cluster.conftest import CHART, NAME, Release, installed_release, output_of

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(600)]

GROUP = "monitoring.coreos.com"
KINDS = {"prometheusrules": "PrometheusRule", "servicemonitors": "ServiceMonitor"}
SHARED = ("dashboards", "prometheusRule", "serviceMonitor")


@pytest.fixture
def monitoring() -> Iterator[str]:
    """A namespace, and the kinds of the Prometheus operator without their fields where the cluster has them not."""
    there = output_of("kubectl", "get", "crds", "-o", "name")
    missing = {plural: kind for plural, kind in KINDS.items() if f"{plural}.{GROUP}" not in there}
    given = yaml.safe_dump_all([_crd(*each) for each in missing.items()])
    name = f"nouscoder-test-monitoring-{secrets.token_hex(3)}"
    if missing:
        output_of("kubectl", "create", "-f", "-", given=given)
        output_of("kubectl", "wait", "--for=condition=Established", *(f"crd/{one}.{GROUP}" for one in missing))
    output_of("kubectl", "create", "namespace", name)
    yield name
    output_of("kubectl", "delete", "namespace", name, "--wait=false")
    if missing:
        output_of("kubectl", "delete", "-f", "-", given=given)


def _crd(plural: str, kind: str) -> dict[str, object]:
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {"plural": plural, "kind": kind},
            "scope": "Namespaced",
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": schema}],
        },
    }


def test_two_releases_share_a_monitoring_namespace_and_one_leaves_without_the_others_rules(monitoring: str) -> None:
    values = tuple(
        word for part in SHARED for word in ("--set", f"{part}.enabled=true", "--set", f"{part}.namespace={monitoring}")
    )

    def found(kinds: str) -> dict[str, str]:
        items = json.loads(output_of("kubectl", "-n", monitoring, "get", kinds, "-o", "json"))["items"]
        return {one["metadata"]["name"]: json.dumps(one.get("spec")) for one in items}

    def dashboards() -> set[str]:
        return {name for name in found("configmaps") if "dashboard" in name}

    def upgrade(release: Release) -> None:
        release.helm("upgrade", NAME, str(CHART), "--reset-then-reuse-values")

    with ExitStack() as stack:
        first, second = (stack.enter_context(installed_release()) for _ in range(2))
        for release in (first, second):
            release.install("--set", "suspend=true", *values)
        both = [release.namespace for release in (first, second)]
        assert len(dashboards()) == 5
        rules = found("prometheusrules")
        assert set(rules) == {f"{namespace}-{NAME}" for namespace in both}
        for name, spec in rules.items():
            assert [namespace in spec for namespace in both] == [name.startswith(namespace) for namespace in both]
        monitors = set(found("servicemonitors"))
        assert {len([one for one in monitors if one.startswith(namespace)]) for namespace in both} == {4}
        upgrade(second)
        upgrade(first)
        assert len(dashboards()) == 5
        first.helm("uninstall", NAME)
        assert set(found("prometheusrules")) == {f"{both[1]}-{NAME}"}
        upgrade(second)  # the dashboards have gone with the release that made them
        print(f"\n{len(rules)} rules, {len(monitors)} monitors and {len(dashboards())} dashboards of two releases")
        assert len(dashboards()) == 5
