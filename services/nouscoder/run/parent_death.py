"""Runs a command that dies with the process that started it: `python -IS parent_death.py PARENT_PID COMMAND...`.

A supervisor killed with SIGKILL can stop nobody, so the kernel does it: PR_SET_PDEATHSIG survives exec.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its parent, then become the command."""
    parent_pid, *command = sys.argv[1:]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have died before the call above took hold.
    if os.getppid() != int(parent_pid):
        sys.exit("parent_death: the supervisor is gone")
    os.execvp(command[0], command)


main()
