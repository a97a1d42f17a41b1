"""Runs a command that is killed when its parent exits: `python -IS parent_death.py PARENT_PID COMMAND...`.

A supervisor that is killed with SIGKILL cannot stop its processes, so the kernel does: PR_SET_PDEATHSIG survives exec.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Set the parent death signal, check that the parent still runs, and exec the command."""
    parent_pid, *command = sys.argv[1:]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have exited before the call above took effect.
    if os.getppid() != int(parent_pid):
        sys.exit("parent_death: the supervisor is gone")
    os.execvp(command[0], command)


main()
