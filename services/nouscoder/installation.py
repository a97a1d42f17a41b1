"""How a person installs this project: the one place that decides it, for every message and every document.

INVARIANT: each text of this repository that tells a person to install the project says what `install_command` returns,
or, in a message, what `how_to_install` returns.
"""

from __future__ import annotations

# Whether a package index has this project. The commit of the first release sets it by `deploy/release.py texts index`,
# which also writes the new form into the documents.
ON_THE_INDEX = False
IN_A_CLONE = "in a clone of this project's repository"


def install_command(*extras: str) -> str:
    """The command that installs the project with these extras, as documents show it."""
    return f"pip install '{'nouscoder' if ON_THE_INDEX else '.'}[{','.join(extras)}]'"


def how_to_install(*extras: str) -> str:
    """The same for a message, which is read anywhere: it also says where the command works."""
    return install_command(*extras) if ON_THE_INDEX else f"{install_command(*extras)} {IN_A_CLONE}"
