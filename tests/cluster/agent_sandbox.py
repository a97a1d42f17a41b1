"""agent-sandbox on the cluster of KUBECONFIG: its kinds, and its controller as a process of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

MODULE, VERSION = "sigs.k8s.io/agent-sandbox", "v0.5.6"
_BUILD_S = 1200
_GO = {"CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false -trimpath"}


def build(folder: Path) -> tuple[Path, list[Path]]:
    """The controller and the files of the kinds, from the Go module proxy, in minutes. Skips without Go."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("agent-sandbox is built from the Go module proxy, and this machine has no go")
    given = os.environ | _GO

    def ran(*command: str) -> str:
        done = subprocess.run([go, *command], capture_output=True, text=True, timeout=_BUILD_S, env=given, check=False)
        if done.returncode:
            pytest.skip(f"agent-sandbox was not built: {done.stderr[-500:]}")
        return done.stdout

    # `go install MODULE@VERSION` would ask the proxy for the list of versions, which not every proxy has.
    source = Path(json.loads(ran("mod", "download", "-json", f"{MODULE}@{VERSION}"))["Dir"])
    program = folder / "agent-sandbox-controller"
    ran("build", "-C", str(source), "-o", str(program), "./cmd/agent-sandbox-controller")
    return program, sorted((source / "k8s" / "crds").glob("*.yaml"))


@contextlib.contextmanager
def running(folder: Path) -> Iterator[None]:
    """Make the kinds, which stay, because others may use them. The controller runs as long as the context is open."""
    program, files = build(folder)
    for file in files:
        kind = yaml.safe_load(file.read_text())
        del kind["spec"]["conversion"]  # by the webhook of a controller in the cluster; here one version is in use
        _kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", given=json.dumps(kind))
    _kubectl(
        "wait",
        "--for=condition=Established",
        *(f"crd/{file.stem.split('_')[1]}.{file.stem.split('_')[0]}" for file in files),
    )
    log = folder / "agent-sandbox.log"
    options = ("--extensions", "--enable-webhook=false", "--leader-election-namespace=default")
    addresses = ("--metrics-bind-address=0", "--health-probe-bind-address=0")
    command = [str(program), f"--kubeconfig={os.environ['KUBECONFIG']}", *options, *addresses]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        try:
            yield
            assert process.poll() is None, log.read_text()[-3000:]
        finally:
            process.terminate()


def _kubectl(*words: str, given: str | None = None) -> None:
    done = subprocess.run(["kubectl", *words], capture_output=True, text=True, timeout=120, input=given, check=False)
    assert done.returncode == 0, done.stderr
