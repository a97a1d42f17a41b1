"""Runs the commands of docs/operating.md and of its tutorial in order on a real cluster. Each must give its output.

Three things differ from the documents: the test uses its own namespaces, the run is short and has a small policy
(`SMALL`), and the environment names the images and Prometheus.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("docs/operating.md", "docs/tutorials/operate.md")
BLOCK = re.compile(
    r"^```sh cluster(?P<eventually> eventually)?\n(?P<script>.*?)^```\n(?P<after>[^\n]*)", re.DOTALL | re.MULTILINE
)
GIVES = re.compile(r"<!-- gives: (.*) -->")
IMAGE = os.environ.get("NOUSCODER_DOCTOR_IMAGE", "localhost/nouscoder-verifier:0.1.0")
PROMETHEUS = os.environ.get("NOUSCODER_PROMETHEUS", "http://10.244.0.1:9090")
TAG = os.environ.get("NOUSCODER_IMAGE_TAG", "")
LIMIT_S = 900.0
PATIENCE_S = 240.0
# Small enough to start within a minute, long enough to last during all commands.
SMALL = f"""
global: {{imageRegistry: localhost}}
image: {{tag: "{TAG}"}}
config:
  run: {{total_batches: 200}}
  evaluation: {{samples: 1}}
  broker: {{drop_zero_variance: false}}
  demo: {{train_problems: 300, held_out_problems: 20, warm_start_share: 0.1}}
"""


@dataclass(frozen=True)
class Block:
    """A block of a document. One with `eventually` is retried until its output is right."""

    line: int
    script: str
    gives: str
    eventually: bool


def blocks(document: str) -> list[Block]:
    """All blocks, in order."""
    text = (ROOT / document).read_text(encoding="utf8")
    found = []
    for match in BLOCK.finditer(text):
        gives = GIVES.fullmatch(match["after"])
        line = text.count("\n", 0, match.start()) + 1
        assert gives is not None, f"{document}:{line} does not say what it gives"
        found.append(Block(line, match["script"], gives[1], bool(match["eventually"])))
    assert len(found) > 9
    return found


@pytest.fixture
def namespace() -> Iterator[str]:
    name = f"docs-{secrets.token_hex(3)}"
    yield name
    subprocess.run(["helm", "uninstall", "nouscoder", "-n", name, "--ignore-not-found"], check=True)
    names = (name, f"{name}-sandbox", f"{name}-team")
    subprocess.run(["kubectl", "delete", "namespace", *names, "--ignore-not-found", "--timeout=180s"], check=True)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_commands_of_the_document_give_their_documented_output(
    document: str, namespace: str, tmp_path: Path
) -> None:
    values = tmp_path / "small.yaml"
    values.write_text(SMALL)
    (tmp_path / "nouscoder").write_text(f'#!/bin/sh\nexec {sys.executable} -m nouscoder "$@"\n')
    (tmp_path / "nouscoder").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for block in blocks(document):
        script = re.sub(r"(-n|--namespace|namespace) nouscoder\b", rf"\1 {namespace}", block.script)
        script = script.replace("./helm/nouscoder -n", f"./helm/nouscoder -f {values} -n")
        script = re.sub(r"doctor --cluster$", f"doctor --cluster --image {IMAGE}", script, flags=re.MULTILINE)
        script = script.replace("--values helm/nouscoder/values.yaml", f"--values {values}")
        script = re.sub(r"nouscoder-team\b", f"{namespace}-team", script).replace(".nouscoder.svc", f".{namespace}.svc")
        script = script.replace("release-namespace=nouscoder", f"release-namespace={namespace}")
        script = script.replace("localhost/nouscoder-verifier:0.1.0", IMAGE)
        script = script.replace("http://10.244.0.1:9090", PROMETHEUS)
        end = time.monotonic() + (PATIENCE_S if block.eventually else 0)
        while True:
            done = run(script, environment)
            good = done.returncode == 0 and block.gives in done.stdout
            if good or time.monotonic() > end:
                break
            time.sleep(2)
        assert good, f"{document}:{block.line}: {script}\nexit code {done.returncode}\n{done.stdout}\n{done.stderr}"


def run(script: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-euo", "pipefail", "-c", script]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment, cwd=ROOT
    )
