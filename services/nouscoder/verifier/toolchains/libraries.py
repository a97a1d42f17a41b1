"""The libraries that candidates can import in addition to the standard library, each in its own folder.

Candidates must not see this service's own packages. Each allowed library is therefore copied, once per version, to
`<prefix>/share/nouscoder/candidate-libraries/NAME-VERSION`, and candidates see only these folders. Where that folder
cannot be written, or not be shown, the copies are in this user's cache. A copy has the library's compiled Python,
because no candidate could write it, and the shared objects beside it; it has no tests. The libraries that it needs are
copied to the same folder.

INVARIANT: a library is offered or its absence raises: without it a right program would be a failure of its own.
"""

from __future__ import annotations

import compileall
import importlib.metadata
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from py_compile import PycInvalidationMode

from nouscoder.errors import Unusable
from nouscoder.private_folder import is_trusted, user_cache

_NAME = "candidate-libraries"
_OWN_IN_SANDBOX = ("tmp", "dev", "proc", "etc", "program")  # folders of / that are the sandbox's own


class CannotOffer(Unusable):
    """A library that candidates could not import. The message names it and says why."""


def library_folders(names: Iterable[str], shelves: Iterable[Path] | None = None) -> tuple[Path, ...]:
    """One import folder per library, in the first of `shelves` that has it or that can be written.

    Raises CannotOffer.
    """
    places = [Path(sys.prefix) / "share" / "nouscoder" / _NAME, user_cache(_NAME)] if shelves is None else [*shelves]
    return tuple(_offered(name, places) for name in names)


def is_hidden(folder: Path) -> bool:
    """Whether a sandbox has another folder in the place of this one, such as its own /tmp."""
    return any(part in _OWN_IN_SANDBOX for part in folder.resolve().parts[1:2])


def _offered(name: str, shelves: list[Path]) -> Path:
    whys = []
    for shelf in shelves:
        try:
            if is_hidden(shelf):
                raise OSError(f"{shelf} is hidden by the sandbox's own folders")
            return _folder(name, shelf)
        except importlib.metadata.PackageNotFoundError:
            raise CannotOffer(f"candidates cannot import {name}: it is not installed in {sys.prefix}") from None
        except (LookupError, OSError) as error:
            whys.append(str(error))
    raise CannotOffer(
        f"candidates cannot import {name}: {'; '.join(whys)}: let XDG_CACHE_HOME name a folder that you may write, not"
        " below /tmp or /dev/shm"
    )


def _folder(name: str, shelf: Path) -> Path:
    folder = shelf / f"{name}-{importlib.metadata.version(name)}"
    if folder.is_dir():
        if not is_trusted(folder):
            raise OSError(f"another user could have written {folder}")
        return folder
    part = shelf / f".{folder.name}.{os.getpid()}"
    for each in [name, *_needed(name, {name})]:
        _copy(each, part)
    compileall.compile_dir(part, quiet=2, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH, stripdir=str(part))
    for path in (part, *part.rglob("*")):  # a umask may have kept them from candidates, which are another user
        path.chmod(0o755 if path.is_dir() else 0o644)
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
