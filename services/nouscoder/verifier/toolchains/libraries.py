"""The libraries that candidates can import in addition to the standard library, each in its own folder.

Candidates must not see this service's own packages. Each allowed library is therefore copied, once per version, to
`<prefix>/share/nouscoder/candidate-libraries/NAME-VERSION`, and candidates see only these folders. A copy has the
library's compiled Python, because no candidate could write it, and the shared objects in NAME.libs; it has no tests.
"""

from __future__ import annotations

import compileall
import importlib.metadata
import importlib.util
import logging
import os
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
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise LookupError(f"{name} is not a package")
    source = Path(spec.submodule_search_locations[0])
    part = shelf / f".{folder.name}.{os.getpid()}"
    for one in (source, source.with_name(f"{name}.libs")):
        if one.is_dir():
            shutil.copytree(one, part / one.name, ignore=shutil.ignore_patterns("__pycache__", "tests"))
    compileall.compile_dir(part, quiet=2, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH, stripdir=str(part))
    try:
        part.rename(folder)
    except OSError:
        shutil.rmtree(part)
        if not folder.is_dir():  # otherwise another service has made the copy
            raise
    return folder
