"""The toolchain cache: files that a compiler needs once per host. Go's standard library, for example, takes 15 s.

The `prepare` command of a language fills a folder of this user's cache, outside of any sandbox. Candidates see the
folder read-only at the same path, and it becomes the last argument of `compile`. The folder's name holds a digest of
the tools and the commands, so that another version of the compiler does not use it. The sandbox image has folders of
its own, `IMAGE_FOLDER`/LANGUAGE, which `compile` names itself. When the image is built, root fills them after the
compilers are installed: python3 -m nouscoder.verifier.toolchains.toolchain_cache (it needs the standard library alone).

INVARIANT: a folder of that name is complete, because it is filled under another name and then renamed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from nouscoder.errors import Unusable
from nouscoder.verifier.toolchains.languages import Language, cache_folder_of, find_installed, registry

IMAGE_FOLDER = Path("/usr/local/share/nouscoder/toolchains")
HOW_TO_PREPARE = "nouscoder prepare"
_PREPARE_LIMIT_S = 1800.0


class ToolchainCacheFailed(Unusable):
    """The cache of a language could not be filled. The message gives language and reason."""


def prepare(language: Language, folder: Path | None = None) -> Path:
    """Fill `folder`, or the cache folder of a language, which may take a minute. Raises ToolchainCacheFailed."""
    folder = folder or cache_folder_of(language)
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


def main() -> None:
    """Fill the folder of the sandbox image for each installed language that has one."""
    for language in find_installed(registry()).values():
        if language.prepare is not None:
            sys.stdout.write(f"filled {prepare(language, IMAGE_FOLDER / language.name)}\n")


if __name__ == "__main__":
    try:
        main()
    except ToolchainCacheFailed as error:
        sys.exit(f"toolchain_cache: {error}")
