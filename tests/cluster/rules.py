"""Whether Prometheus has data for every recording rule and alert that the chart can have (deploy/check-rules)."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from tests.cluster.conftest import CHART, NAME, ROOT

LIMIT_S = 180.0
EVERY_RULE = (  # also those of TLS and of Modal, whatever the release uses
    "prometheusRule.enabled=true",
    "tls.enabled=true",
    "tls.existingSecret=certificates",
    "verifier.sandbox.modal.existingSecret=modal-token",
    "config.verifier.sandbox.spill_over.backend=modal",
    "config.verifier.sandbox.modal.image=example.org/sandbox:1",
)


def wait_for_data(release: Any, *options: str) -> None:
    """Wait until deploy/check-rules OPTIONS finds the data that it expects, and print what it says."""
    values = (word for value in EVERY_RULE for word in ("--set", value))
    rules = release.helm("template", NAME, str(CHART), "-s", "templates/common/prometheusrule.yaml", *values)
    command = [sys.executable, str(ROOT / "deploy" / "check-rules"), *options]

    def passed() -> bool:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, input=rules)
        print(done.stdout[-3000:], done.stderr[-500:])
        return done.returncode == 0

    release.until(passed, "every rule has the expected data", LIMIT_S, every_s=10)
