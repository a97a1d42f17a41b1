"""A runner shows by what its kernel answers that it runs on gVisor, or that its users are none of its node's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nouscoder.config import SandboxSection
from nouscoder.verifier.runner import kernel
from nouscoder.verifier.runner.kernel import kernel_facts, why_not_gvisor, why_not_userns
from nouscoder.verifier.sandbox.runners.launch import RunnerAccess, RunnerLaunch
from nouscoder.verifier.sandbox.runners.link import KernelUnproven, PoolKeys
from nouscoder.verifier.sandbox.runners.pods import GvisorSandbox, UsernsSandbox
from nouscoder.verifier.sandbox.runners.pool import Runner, RunnerState

# As a runner on gVisor (release of 2026) and a container of runc on Linux 6.18 answered.
GVISOR: dict[str, object] = {
    "version": "Linux version 4.19.0-gvisor #1 SMP Sun Jan 10 15:06:54 PST 2016",
    "log": "<6>[   0.000000] Starting gVisor...",
    "files": ["version", "stat"],
    "calls": ["ENOSYS", "ENOSYS"],
}
RUNC: dict[str, object] = {
    "version": "Linux version 6.18.44 (builder@sandboxing) (gcc 15.3.0)",
    "log": "EPERM",
    "files": ["version", "stat", "interrupts", "softirqs"],
    "calls": ["EBADF", "EINVAL"],
}


def test_gvisor_is_accepted_and_runc_is_refused_by_the_name_of_its_kernel() -> None:
    assert why_not_gvisor(GVISOR) == ""
    assert "Linux version 6.18.44" in why_not_gvisor(RUNC)


@pytest.mark.parametrize("fact", ["log", "files", "calls"])
def test_each_fact_alone_refuses_a_kernel(fact: str) -> None:
    """The version alone proves nothing: a person can give a kernel any name."""
    named = RUNC | {"version": GVISOR["version"]}
    assert why_not_gvisor(named)
    assert why_not_gvisor(GVISOR | {fact: RUNC[fact]})
    assert why_not_gvisor({name: value for name, value in GVISOR.items() if name != fact})


def test_a_container_whose_proc_is_hidden_proves_nothing() -> None:
    """With the mount option subset=pid, /proc of Linux lacks the files as well."""
    assert why_not_gvisor(GVISOR | {"files": []})


@given(st.recursive(st.none() | st.booleans() | st.text(max_size=5) | st.integers(), lambda x: st.lists(x, max_size=3)))
def test_anything_else_that_a_runner_says_is_refused(said: object) -> None:
    assert why_not_gvisor(said)
    for fact in ("log", "files", "calls"):
        assert why_not_gvisor(GVISOR | {fact: said})


def test_this_machine_is_not_gvisor_also_by_the_text_that_the_doctor_sends() -> None:
    facts = kernel_facts()
    if "gvisor" in str(facts["version"]):
        pytest.skip("this machine runs in gVisor")
    assert str(facts["version"])[:30] in why_not_gvisor(facts)
    program = f"{Path(kernel.__file__).read_text()}\nimport json\nprint(json.dumps(kernel_facts()))"
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, check=True, timeout=60)
    assert why_not_gvisor(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("users", "refused"),
    [
        ([[0, 2005139456, 65536]], ""),  # a pod with hostUsers: false
        ([[0, 65536, 65536]], ""),
        ([[0, 0, 4294967295]], "are those of the node"),
        ([[0, 1000, 1], [1, 100000, 65536]], "are those of the node"),  # user 0 is somebody of the node
        ([[0, 65535, 65536]], "are those of the node"),
        ([], "does not say"),
        (None, "does not say"),
        ([[0, "100000", 65536]], "does not say"),
        ([[0, True, 65536]], "does not say"),
        ([[0, 65536, 0], [0, 100_000, 65536]], "does not say"),
        ([[-1, 65536, 1], [0, 100_000, 65536]], "does not say"),
    ],
)
def test_users_of_the_node_are_refused(users: object, refused: str) -> None:
    assert refused in why_not_userns({"users": users})
    assert bool(why_not_userns({"users": users})) == bool(refused)


@given(st.recursive(st.none() | st.booleans() | st.text(max_size=5) | st.integers(), lambda x: st.lists(x, max_size=3)))
def test_anything_else_that_a_runner_says_of_its_users_is_refused(said: object) -> None:
    assume(not (isinstance(said, list) and len(said) == 3 and all(type(number) is int for number in said)))
    assert why_not_userns(said)
    assert why_not_userns({"users": [said, [0, 100_000, 65536]]})


def test_this_process_has_the_users_of_its_machine_until_it_has_its_own() -> None:
    program = f"{Path(kernel.__file__).read_text()}\nprint(why_not_userns(kernel_facts()))"
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert "are those of the node" in done.stdout


async def test_no_harness_of_an_unproven_runner_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    class Link:
        kernel = RUNC

        class writer:  # noqa: N801
            class transport:  # noqa: N801
                abort = staticmethod(lambda: closed.append(True))

    async def connect(*arguments: object, **named: object) -> Link:
        return Link()

    monkeypatch.setattr("nouscoder.verifier.sandbox.runners.launch.connect_by_any", connect)
    runner = Runner("pod-1", ("127.0.0.1", 7070), RunnerState.UNPROVEN, 0)
    launch = RunnerLaunch(RunnerAccess(PoolKeys(b""), refusal=lambda facts: f"says {facts}"), SandboxSection(), runner)
    with pytest.raises(KernelUnproven, match=r"pod-1 says .*6\.18\.44"):
        await launch.open()
    assert closed == [True]
    assert await RunnerLaunch(RunnerAccess(PoolKeys(b"")), SandboxSection(), runner).open()


def test_the_pool_of_pods_needs_the_proof_unless_it_is_given_up_by_name(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("0123456789abcdef")

    def refusal(kind: type[GvisorSandbox], facts: object, accepted: bool = False) -> str:
        config = SandboxSection(
            backend=kind.name,
            slots=1,
            pool_managed=False,
            pool_service="x",
            pool_key_file=str(tmp_path / "key"),
            pool_accept_unproven_kernel=accepted,
        )
        return kind(config)._access.refusal(facts)

    assert refusal(GvisorSandbox, GVISOR) == ""
    assert "does not run on gVisor" in refusal(GvisorSandbox, RUNC)
    assert "acceptUnprovenKernel" in refusal(GvisorSandbox, RUNC)
    assert refusal(GvisorSandbox, RUNC, accepted=True) == ""
    assert refusal(UsernsSandbox, RUNC | {"users": [[0, 100_000, 65536]]}) == ""
    assert "hostUsers: false" in refusal(UsernsSandbox, RUNC | {"users": [[0, 0, 4294967295]]}, accepted=True)
