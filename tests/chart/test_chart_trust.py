"""Certificates, the Redis of others over TLS, and what a load balancer publishes."""

from __future__ import annotations

from typing import Any

import helm_python as helm
import pytest

from .conftest import ChartRig

ISSUER = {"name": "company", "kind": "ClusterIssuer"}
CERT_MANAGER: dict[str, Any] = {
    "tls": {
        "enabled": True,
        "certManager": {"enabled": True, "issuerRef": ISSUER, "gradingNames": ["grade.example.org"]},
    }
}
LOOP = ("broker", "verifier", "generation", "learner")


def secrets_of(pod: dict[str, Any]) -> set[str]:
    sources = [one for volume in pod["volumes"] for one in volume.get("projected", {}).get("sources", ())]
    return {one["secret"]["name"] for one in sources if "secret" in one}


def pods(chart: ChartRig, values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The pod of each service, by component."""
    found = {}
    for one in chart.documents(values):
        if one["kind"] in ("Deployment", "StatefulSet"):
            found[one["metadata"]["labels"]["app.kubernetes.io/component"]] = one["spec"]["template"]["spec"]
    return found


@pytest.mark.parametrize("alone", [False, True])
def test_cert_manager_makes_the_certificate_that_each_service_mounts(chart: ChartRig, alone: bool) -> None:
    values = CERT_MANAGER | ({"loop": {"enabled": False}} if alone else {})
    made = {one["spec"]["secretName"]: one["spec"] for one in chart.documents(values) if one["kind"] == "Certificate"}
    services = ("verifier",) if alone else LOOP
    assert set(made) == {f"nouscoder-{name}-tls" for name in services}
    mounted = pods(chart, values)
    for name in services:
        asked = made[f"nouscoder-{name}-tls"]
        assert f"nouscoder-{name}-tls" in secrets_of(mounted[name])
        more = ["grade.example.org"] if name == "verifier" else []
        assert asked["dnsNames"] == [f"nouscoder-{name}.here.svc", *more]
        assert asked["issuerRef"] == {"name": "company", "kind": "ClusterIssuer", "group": "cert-manager.io"}
        assert {"server auth", "client auth"} <= set(asked["usages"])


def test_the_names_in_the_certificates_are_those_that_the_services_call(chart: ChartRig) -> None:
    config = chart.one("ConfigMap", "nouscoder-config", CERT_MANAGER)["data"]["config.json"]
    for one in chart.documents(CERT_MANAGER):
        if one["kind"] == "Certificate":
            assert f'"{one["spec"]["dnsNames"][0]}:500' in config


def test_cert_manager_without_issuer_or_tls_is_refused(chart: ChartRig) -> None:
    for tls, said in (
        ({"enabled": True, "certManager": {"enabled": True}}, "tls.certManager.issuerRef.name"),
        ({"certManager": {"enabled": True, "issuerRef": ISSUER}}, "needs tls.enabled"),
        ({"enabled": True}, "tls.certManager.enabled"),
    ):
        with pytest.raises(helm.HelmError, match=said):
            chart.templates({"tls": tls})


def test_only_the_broker_gets_url_and_authority_of_an_external_redis(chart: ChartRig) -> None:
    values = {"redis": {"external": {"enabled": True, "existingSecret": "theirs", "secretKey": "u", "caKey": "ca.pem"}}}
    for name, pod in pods(chart, values).items():
        given = [
            one["secret"]["items"]
            for volume in pod["volumes"]
            for one in volume.get("projected", {}).get("sources", ())
            if one.get("secret", {}).get("name") == "theirs"
        ]
        wanted = [[{"key": "u", "path": "redis/url"}, {"key": "ca.pem", "path": "redis/ca.crt"}]]
        assert given == (wanted if name == "broker" else [])


@pytest.mark.parametrize("kind", ["LoadBalancer", "NodePort"])
def test_no_published_service_has_a_port_of_metrics(chart: ChartRig, kind: str) -> None:
    values = {"verifier": {"service": {"type": kind}}}
    services = [one for one in chart.documents(values) if one["kind"] == "Service"]
    published = [one for one in services if one["spec"].get("type", "ClusterIP") != "ClusterIP"]
    assert [one["metadata"]["name"] for one in published] == ["nouscoder-verifier"]
    assert {port["name"] for port in published[0]["spec"]["ports"]} == {"http", "grpc"}
    (metrics,) = [one for one in services if one["metadata"]["name"] == "nouscoder-verifier-metrics"]
    assert [(port["name"], port["port"]) for port in metrics["spec"]["ports"]] == [("metrics", 9090)]
    assert metrics["spec"]["selector"] == published[0]["spec"]["selector"]
