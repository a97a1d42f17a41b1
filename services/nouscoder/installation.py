"""How a person installs this project: the one place that decides it, for every message and every document.

INVARIANT: each text of this repository that tells a person to install the project says what `install_command` returns,
or, in a message, what `how_to_install` returns.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, metadata
from importlib.util import find_spec

# Whether a package index has this project. The commit of the first release sets it by `deploy/release.py texts index`,
# which also writes the new form into the documents.
ON_THE_INDEX = False
IN_A_CLONE = "in a clone of this project's repository"
GRADER = "nouscoder-grader"


def has_trainer() -> bool:
    """Whether this installation is the whole project. The package nouscoder-grader has the grading service alone."""
    return find_spec("nouscoder.learner") is not None


def install_command(*extras: str) -> str:
    """The command that installs the project, or the grader that stands here alone, with these extras."""
    package = "nouscoder" if ON_THE_INDEX else "."
    if not has_trainer() and _is_offered_by_grader(extras):
        package = GRADER if ON_THE_INDEX else f"./packages/{GRADER}"
    return f"pip install '{package}[{','.join(extras)}]'"


def _is_offered_by_grader(extras: tuple[str, ...]) -> bool:
    try:
        return {*extras} <= {*(metadata(GRADER).get_all("Provides-Extra") or ())}
    except PackageNotFoundError:  # the files were copied, not installed
        return False


def how_to_install(*extras: str) -> str:
    """The same for a message, which is read anywhere: it also says where the command works."""
    return install_command(*extras) if ON_THE_INDEX else f"{install_command(*extras)} {IN_A_CLONE}"
