"""`nouscoder` and `python -m nouscoder`."""

from __future__ import annotations

import sys

from nouscoder.errors import ExitCode
from nouscoder.installation import how_to_install, install_command


def main() -> None:
    """Entry point of the command line. Exits with one line when its libraries are not installed."""
    try:
        from nouscoder.cli import main as command_line
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "nouscoder":
            raise
        sys.stderr.write(
            f"nouscoder: the library {error.name} is not installed; the grading client alone has no commands: "
            f"to grade, {install_command('verifier')}; to train, {how_to_install('demo')}\n"
        )
        sys.exit(ExitCode.UNUSABLE)
    except KeyboardInterrupt:  # while the libraries are loaded
        sys.stderr.write("nouscoder: interrupted\n")
        sys.exit(ExitCode.INTERRUPTED)
    command_line()


if __name__ == "__main__":
    main()
