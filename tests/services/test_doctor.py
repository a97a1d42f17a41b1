"""The doctor tests each layer, says how to get what is missing, and fails only when the default cannot run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nouscoder.doctor import Finding, host
from nouscoder.doctor.host import run_doctor
from nouscoder.verifier.harness import kernel
from nouscoder.verifier.sandbox import SandboxUnavailable


def test_this_host_runs_the_default_configuration() -> None:
    command = [sys.executable, "-m", "nouscoder", "doctor", "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = json.loads(answer.stdout)
    findings = {finding["name"]: finding for finding in said["findings"]}
    assert set(findings) == {
        "namespaces", "seccomp", "separate users", "cgroups", "sandbox local", "libraries", "sandbox runsc", "modal",
        "languages", "redis", "torch", "gpu", "disk", "packages",
    }  # fmt: skip
    broken = [finding["name"] for finding in said["findings"] if finding["needed"] and not finding["ok"]]
    assert said["ok"] is not bool(broken)
    assert answer.returncode == (1 if broken else 0)
    assert all(finding["ok"] or finding["fix"] for finding in said["findings"])
    assert "python" in findings["languages"]["detail"].split()


@pytest.mark.parametrize(("needed", "code"), [(True, 1), (False, 0)])
def test_only_needed_findings_make_it_fail(monkeypatch: pytest.MonkeyPatch, needed: bool, code: int) -> None:
    missing = Finding("warp drive", False, needed, "not here", "build one")
    monkeypatch.setattr(host, "examine", lambda: [missing])
    text, returned = run_doctor(as_json=False)
    assert returned == code
    assert "to get it: build one" in text
    assert ("cannot run: warp drive" in text) is needed


def test_without_runsc_it_names_the_command_that_builds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "find_runsc", lambda: None)
    finding = host._gvisor()
    assert (finding.ok, finding.needed) == (False, False)
    assert "deploy/build-runsc" in finding.fix


def test_a_refused_namespace_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(namespaces: int) -> None:
        if namespaces & kernel.CLONE_NEWNET:
            raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(kernel, "unshare", refuse)
    probe = host.probe_host()
    assert probe.refused == {"net": "Operation not permitted"}
    finding = host._namespaces(probe)
    assert not finding.ok
    assert "net (Operation not permitted)" in finding.detail
    assert finding.fix


def test_two_packages_with_the_same_files_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host._packages().ok
    other = tmp_path / "nouscoder_client-0.1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: nouscoder-client\nVersion: 0.1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finding = host._packages()
    assert (finding.ok, finding.needed) == (False, False)
    assert "nouscoder-client 0.1.0" in finding.detail
    assert "pip uninstall" in finding.fix


class _Unwritable:
    """The groups of a host that lets nobody make one, or only these."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __call__(self) -> _Unwritable:
        return self


@pytest.mark.parametrize(("names", "writable"), [((), "none"), (("cpuacct", "pids"), "cpuacct pids")])
def test_without_groups_that_bound_memory_it_says_what_is_lost(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], writable: str
) -> None:
    """The answers do not say it: their `backend` is the plain name."""
    monkeypatch.setattr(host, "Groups", _Unwritable(*names))
    finding = host._cgroups()
    assert (finding.ok, finding.needed) == (False, False)
    assert f"writable: {writable}; memory is sampled" in finding.detail
    for lost in ("shared memory", "buffers of sockets", "CPU time of abandoned children"):
        assert lost in finding.detail
    assert "Delegate=yes" in finding.fix


def test_with_groups_it_says_that_the_kernel_bounds_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "Groups", _Unwritable("memory", "pids"))
    finding = host._cgroups()
    assert (finding.ok, finding.fix) == (True, "")
    assert "memory pids bounded by the kernel" in finding.detail


def test_a_sandbox_that_does_not_start_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(config: object) -> None:
        raise SandboxUnavailable("the local sandbox cannot start: no clone")

    monkeypatch.setattr(host, "open_sandbox", broken)
    finding = host._sandbox("local", needed=True, fix="be root")
    assert (finding.ok, finding.detail, finding.fix) == (False, "the local sandbox cannot start: no clone", "be root")
