"""Init, compiled: the C sources of the harness as a library in this user's cache, made when they are first needed.

INVARIANT: a library of that name is whole, and made of exactly these sources: its folder's name holds their digest, and
it is written under another name first.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from nouscoder.verifier.sandbox.base import SandboxUnavailable
from nouscoder.verifier.sandbox.launch import HARNESS

_SOURCES = HARNESS / "init"
_FLAGS = ("-O2", "-std=c11", "-D_GNU_SOURCE", "-shared", "-fPIC", "-Wl,-z,now")
_COMPILE_LIMIT_S = 120.0
_FOLDER_ENVIRONMENT = "NOUSCODER_INIT_FOLDER"  # where an image keeps it; else the cache


@functools.cache
def init_library_path() -> Path:
    """The library, compiled now if it is not there. Raises SandboxUnavailable with what is missing."""
    library = _folder() / f"init-{_digest()}" / "init.so"
    if not library.is_file():
        _compile(library)
    return library


def _folder() -> Path:
    if given := os.environ.get(_FOLDER_ENVIRONMENT):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nouscoder" / "init"


def _digest() -> str:
    made = hashlib.sha256(repr((_FLAGS, platform.machine(), platform.libc_ver())).encode())
    for source in sorted(_SOURCES.iterdir()):
        made.update(source.name.encode() + b"\0" + source.read_bytes())
    return made.hexdigest()[:16]


def _compile(library: Path) -> None:
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise SandboxUnavailable(
            "the sandbox cannot start: its first process is written in C, and there is no C compiler here (on Debian:"
            f" apt-get install gcc libc6-dev) nor a compiled one in {library.parent}"
        )
    sources = sorted(str(source) for source in _SOURCES.glob("*.c"))
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as part:
            made = Path(part) / library.name
            command = [compiler, *_FLAGS, "-o", str(made), *sources, "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_LIMIT_S)
            made.rename(library)
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode("utf8", "replace").strip()[:300]
        raise SandboxUnavailable(f"the sandbox cannot start: {compiler} does not compile its init: {said}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxUnavailable(f"the sandbox cannot start: its init cannot be compiled: {error}") from error
