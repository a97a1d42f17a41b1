"""The libraries that candidates can import in addition to the standard library, each in its own folder.

Candidates must not see this service's own packages. Each allowed library is therefore copied, once per version, to
`<prefix>/share/nouscoder/candidate-libraries/NAME-VERSION`, and candidates see only these folders. A copy has the
library's compiled Python, because no candidate could write it, and the shared objects beside it; it has no tests.
The libraries that it needs are copied to the same folder.
"""

from __future__ import annotations

import compileall
import importlib.metadata
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from py_compile import PycInvalidationMode

log = logging.getLogger(__name__)


def library_folders(names: Iterable[str], shelf: Path | None = None) -> tuple[Path, ...]:
    """One import folder per library. A library that is not installed is omitted, with a warning that names it.

    `shelf` is the folder of the copies. It must be writable when a library is copied.
    """
    shelf = shelf or Path(sys.prefix) / "share" / "nouscoder" / "candidate-libraries"
    folders = []
    for name in names:
        try:
            folders.append(_folder(name, shelf))
        except (importlib.metadata.PackageNotFoundError, LookupError, OSError) as error:
            log.warning("candidates cannot import a library", extra={"library": name, "detail": str(error)})
    return tuple(folders)


def _folder(name: str, shelf: Path) -> Path:
    folder = shelf / f"{name}-{importlib.metadata.version(name)}"
    if folder.is_dir():
        return folder
    part = shelf / f".{folder.name}.{os.getpid()}"
    for each in [name, *_needed(name, {name})]:
        _copy(each, part)
    compileall.compile_dir(part, quiet=2, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH, stripdir=str(part))
    try:
        part.rename(folder)
    except OSError:
        shutil.rmtree(part)
        if not folder.is_dir():  # otherwise another service has made the copy
            raise
    return folder


def _copy(name: str, into: Path) -> None:
    """Copy the packages and modules of a library. Raises LookupError when its files are not known."""
    library = importlib.metadata.distribution(name)
    parts = {file.parts[0] for file in library.files or ()}
    kept = [part for part in parts if part not in ("..", "__pycache__") and not part.endswith(".dist-info")]
    if not kept:
        raise LookupError(f"the files of {name} are not known")
    into.mkdir(parents=True, exist_ok=True)
    for part in kept:
        source = Path(str(library.locate_file(part)))
        if source.is_dir():
            shutil.copytree(source, into / part, ignore=shutil.ignore_patterns("__pycache__", "tests"))
        else:
            shutil.copy(source, into / part)


def _needed(name: str, known: set[str]) -> list[str]:
    """The installed libraries that a library needs, without those of its extras. `known` gets their names."""
    found = []
    for requirement in importlib.metadata.requires(name) or ():
        other = re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0].lower()
        if "extra ==" in requirement or other in known or not _is_installed(other):
            continue
        known.add(other)
        found += [other, *_needed(other, known)]
    return found


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # needed on other systems only
        return False
    return True
