"""What is left when the namespace of a release is deleted, not the release, and the documented command for it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator

import pytest
from tests.cluster.conftest import CHART, ROOT, Release, installed_release, output_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

BLOCK = re.compile(r"^```sh cluster\n(KINDS=.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.fixture
def monitoring() -> Iterator[str]:
    """A namespace that releases share."""
    name = f"nouscoder-test-monitoring-{secrets.token_hex(3)}"
    output_of("kubectl", "create", "namespace", name)
    yield name
    output_of("kubectl", "delete", "namespace", name, "--wait=false")


def test_one_documented_command_removes_what_outlives_the_namespace(monitoring: str) -> None:
    (script,) = BLOCK.findall((ROOT / "docs" / "operating.md").read_text("utf8"))
    with installed_release() as release:
        release.install("-f", str(CHART / "values-verifier.yaml"), "--set", f"dashboards.namespace={monitoring}")
        output_of("kubectl", "delete", "namespace", release.namespace, "--timeout=180s", limit_s=200)
        found = _left(release)
        assert {name.partition("/")[0].partition(".")[0] for name in found} == {
            "namespace", "validatingadmissionpolicy", "validatingadmissionpolicybinding", "configmap"
        }  # fmt: skip
        mine = script.replace("release-namespace=nouscoder", f"release-namespace={release.namespace}")
        said = output_of("bash", "-euc", mine, limit_s=200)
        assert all(name in said for name in found), said
        assert _left(release) == []
        everything = output_of(
            "kubectl", "get", "all,validatingadmissionpolicies,namespaces,configmaps", "-A", "-o", "name"
        )
        assert release.namespace not in everything


def _left(release: Release) -> list[str]:
    kinds = "namespaces,validatingadmissionpolicies,validatingadmissionpolicybindings,configmaps"
    label = f"nouscoder/release-namespace={release.namespace}"
    return output_of("kubectl", "get", kinds, "-A", "-l", label, "-o", "name").split()
