"""The families of addresses: services listen on IPv4, IPv6 or both, and have addresses of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import kubernetes_validate
import pytest
from tests.chart.conftest import pod_specs

if TYPE_CHECKING:
    from tests.chart.conftest import ChartRig

LISTEN = {"IPv4": "0.0.0.0", "IPv6": "[::]", "Dual": "[::]"}
OF_SERVICE = {"IPv4": {}, "IPv6": {"ipFamilies": ["IPv6"]}, "Dual": {"ipFamilyPolicy": "PreferDualStack"}}


@pytest.mark.parametrize("family", LISTEN)
def test_everything_listens_on_the_family(chart: ChartRig, family: str) -> None:
    documents = chart.documents({"ipFamily": family, "generation": {"openai": {"enabled": True}}})
    (config,) = [one for one in documents if "config.json" in one.get("data", {})]
    tree = json.loads(config["data"]["config.json"])
    listen = LISTEN[family]
    assert tree["verifier"]["http"] == f"{listen}:8080"
    assert tree["run"]["pages"] == f"{listen}:8090"
    assert tree["generation"]["openai"]["http"] == f"{listen}:8000"
    for service in ("broker", "verifier", "generation", "learner"):
        assert tree[service]["grpc_health"] == f"{listen}:8086"
        assert tree[service]["grpc"].startswith("nouscoder-")
    arguments = [
        argument
        for pod in pod_specs(documents).values()
        for container in pod["spec"]["containers"]
        for argument in container.get("args", [])
        if argument.startswith(("--grpc=", "--metrics="))
    ]
    assert len(arguments) == 8
    assert all(f"={listen}:" in argument for argument in arguments)


@pytest.mark.parametrize("family", LISTEN)
def test_every_service_has_the_family(chart: ChartRig, family: str) -> None:
    values = {"ipFamily": family, "verifier": {"sandbox": {"pool": {"managed": False}}}}
    services = [one for one in chart.documents(values) if one["kind"] == "Service"]
    assert len(services) == 7
    for one in services:
        kubernetes_validate.validate(one, "1.29", strict=True)
        found = {key: one["spec"][key] for key in ("ipFamilies", "ipFamilyPolicy") if key in one["spec"]}
        assert found == OF_SERVICE[family]


@pytest.mark.parametrize(("family", "loopback"), [("IPv4", "127.0.0.1"), ("IPv6", "::1"), ("Dual", "127.0.0.1")])
def test_the_run_reaches_its_learner_by_an_address_that_the_pod_has(
    chart: ChartRig, family: str, loopback: str
) -> None:
    learner = chart.one("StatefulSet", "nouscoder-learner", {"ipFamily": family})
    assert [alias["ip"] for alias in learner["spec"]["template"]["spec"]["hostAliases"]] == [loopback]
