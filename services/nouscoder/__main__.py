"""`nouscoder` and `python -m nouscoder`."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the command line. Exits with one line when its libraries are not installed."""
    try:
        from nouscoder.cli import main as command_line
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "nouscoder":
            raise
        sys.exit(
            f"nouscoder: the library {error.name} is not installed; the grading client alone has no commands: "
            "pip install 'nouscoder[verifier]' to grade, 'nouscoder[demo]' to train"
        )
    command_line()


if __name__ == "__main__":
    main()
