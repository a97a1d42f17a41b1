"""Compiles init, the C sources of the harness, into a library in this user's cache when it is first needed.

INVARIANT: a library under its final name is complete and compiled from exactly these sources. The folder's
name holds their digest, and the library is written under another name and then renamed.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from nouscoder.errors import NousCoderError
from nouscoder.private_folder import is_trusted, user_cache
from nouscoder.verifier.harness import __file__ as _harness_init
from nouscoder.verifier.sandbox.base import SandboxUnavailable

HARNESS = Path(_harness_init).resolve().parent
_SOURCES = HARNESS / "init"
_FLAGS = ("-O2", "-std=c11", "-D_GNU_SOURCE", "-shared", "-fPIC", "-Wl,-z,now,-z,norelro,-z,noseparate-code")
_COMPILE_LIMIT_S = 120.0
_MODE = 0o755  # whatever the umask: nobody else may write
_FOLDER_ENVIRONMENT = "NOUSCODER_INIT_FOLDER"  # set in images; otherwise the cache is used


@functools.cache
def init_library_path() -> Path:
    """The path of the library, which is compiled now if missing. Raises SandboxUnavailable with what is missing."""
    library = _folder() / f"init-{_digest()}" / "init.so"
    if not library.is_file():
        _compile(library)
    if not (is_trusted(library.parent) and is_trusted(library)):
        raise SandboxUnavailable(
            f"the sandbox cannot start: another user could have written {library}: remove {library.parent}, or let"
            " XDG_CACHE_HOME name a folder of your own"
        )
    return library


def _folder() -> Path:
    folder = os.environ.get(_FOLDER_ENVIRONMENT)
    return Path(folder) if folder else user_cache("init")


def _digest() -> str:
    made = hashlib.sha256(repr((_FLAGS, platform.machine(), platform.libc_ver())).encode())
    for source in sorted(_SOURCES.iterdir()):
        made.update(source.name.encode() + b"\0" + source.read_bytes())
    return made.hexdigest()[:16]


def _compile(library: Path) -> None:
    sources = sorted(str(source) for source in _SOURCES.glob("*.c"))
    try:
        library.parent.mkdir(_MODE, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as part:
            made = Path(part) / library.name
            compile_c([*_FLAGS, "-o", str(made), *sources, "-lm"], "init")
            made.chmod(_MODE)
            made.rename(library)
    except NotCompiled as error:
        raise SandboxUnavailable(f"the sandbox cannot start: {error}") from error
    except OSError as error:
        raise SandboxUnavailable(f"the sandbox cannot start: init cannot be compiled: {error}") from error


class NotCompiled(NousCoderError):
    """A C source cannot be compiled. The message says why."""


def compile_c(arguments: Sequence[str], what: str) -> None:
    """Call this machine's C compiler for `what`. Raises NotCompiled."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NotCompiled(
            f"{what} is not compiled, and there is no C compiler to compile it (on Debian: apt-get install gcc"
            " libc6-dev)"
        )
    try:
        subprocess.run([compiler, *arguments], check=True, capture_output=True, timeout=_COMPILE_LIMIT_S)
    except subprocess.CalledProcessError as error:
        message = error.stderr.decode("utf8", "replace").strip()[:300]
        raise NotCompiled(f"{compiler} cannot compile {what}: {message}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise NotCompiled(f"{what} cannot be compiled: {error}") from error
