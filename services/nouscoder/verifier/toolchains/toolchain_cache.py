"""The toolchain cache: files that a compiler needs once per host. Go's standard library, for example, takes 15 s.

The `prepare` command of a language fills a folder of this user's cache, outside of any sandbox. Candidates see the
folder read-only at the same path, and it becomes the last argument of `compile`. The folder's name holds a digest of
the tools and the commands, so that another version of the compiler does not use it. The sandbox image has folders of
its own, `IMAGE_FOLDER`/LANGUAGE, which are filled when it is built (image_cache.py) and which `compile` names itself.

INVARIANT: a folder of that name is complete, because it is filled under another name and then renamed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from nouscoder.errors import Unusable

if TYPE_CHECKING:
    from nouscoder.verifier.toolchains.languages import Language

IMAGE_FOLDER = Path("/usr/local/share/nouscoder/toolchains")
HOW_TO_PREPARE = "nouscoder prepare"
_PREPARE_LIMIT_S = 1800.0


class ToolchainCacheFailed(Unusable):
    """The cache of a language could not be filled. The message gives language and reason."""


def folder_of(language: Language) -> Path:
    """The cache folder of a language, whether or not it exists. The tools of `language` must be absolute paths."""
    made = hashlib.sha256(repr((language.prepare, language.compile)).encode())
    for tool in language.detect:
        stat = os.stat(tool)
        made.update(f"{os.path.realpath(tool)} {stat.st_size} {stat.st_mtime_ns}".encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "nouscoder" / "toolchains" / f"{language.name}-{made.hexdigest()[:16]}"


def prepare(language: Language, folder: Path | None = None) -> Path:
    """Fill `folder`, or the cache folder of a language, which may take a minute. Raises ToolchainCacheFailed."""
    folder = folder or folder_of(language)
    if folder.is_dir() or language.prepare is None:
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise ToolchainCacheFailed(f"{folder.parent} cannot be written: {error.strerror}") from error
    try:
        _run(language, part, folder)
        part.chmod(0o755)
        part.rename(folder)
    except OSError as error:
        if not folder.is_dir():  # otherwise another process has filled it
            raise ToolchainCacheFailed(f"the toolchain cache of {language.name} cannot be filled: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _run(language: Language, part: Path, folder: Path) -> None:
    """Run `prepare`, with `{cache}` as the folder to fill and `{final}` as its final path."""
    argv = [word.replace("{cache}", str(part)).replace("{final}", str(folder)) for word in language.prepare or ()]
    environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(part)}
    try:
        subprocess.run(argv, check=True, capture_output=True, cwd=part, env=environment, timeout=_PREPARE_LIMIT_S)
    except subprocess.CalledProcessError as error:
        last_line = error.stderr.decode("utf8", "replace").strip().rpartition("\n")[2]
        raise ToolchainCacheFailed(
            f"the toolchain cache of {language.name} cannot be filled: {argv[0]} exited with status"
            f" {error.returncode}: {last_line}"
        ) from error
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolchainCacheFailed(f"the toolchain cache of {language.name} cannot be filled: {error}") from error
