"""A fine-tuning in a separate process, which kills itself with SIGKILL at a given point.

The script reads lines `["folder", "moment", resume]`, forks a process for each, and prints its exit code, which is
negative for a signal. The parent process has imported torch but computed nothing.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nouscoder.config import load_config
from nouscoder.learner.state import checkpoint_store
from nouscoder.learner.state.line_file import LineFile
from nouscoder.run.folder import RunFolder
from nouscoder.sft import training
from nouscoder.sft.run import fine_tune
from nouscoder.sft.training import SupervisedTraining


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()  # the signal ends the process before it does anything else


def _patch(owner: Any, name: str, *, call: int = 1, before: bool) -> None:
    """Kill the process before or after the `call`th call of `owner.name`, counted from 1."""
    real, calls = getattr(owner, name), 0

    def counted(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and before:
            _die()
        answer = real(*arguments, **more)
        if calls == call:
            _die()
        return answer

    setattr(owner, name, counted)


def _in_a_line() -> None:
    """Kill when half of the line of step 4 is written."""
    real = LineFile.append

    def torn(file: LineFile, lines: Any) -> None:
        if lines[0]["step"] == 4:
            with file._file.open("a") as output:
                output.write('{"step": 4, "lo')
            _die()
        real(file, lines)

    LineFile.append = torn  # type: ignore[method-assign, assignment]


# A checkpoint is due after every second step.
MOMENTS: dict[str, Callable[[], None]] = {
    "before the first step": lambda: _patch(SupervisedTraining, "_train_step", before=True),
    "after step 5": lambda: _patch(SupervisedTraining, "_train_step", call=5, before=False),
    "in the middle of a line": _in_a_line,
    "before a checkpoint has its name": lambda: _patch(checkpoint_store, "sha256_of", before=True),
    "before the model is written": lambda: _patch(training, "compose_policy", before=True),
    "before the summary": lambda: _patch(RunFolder, "write_json", call=2, before=True),
}


def main() -> None:
    """Fork a process for each line on stdin."""
    for line in sys.stdin:
        folder, moment, resume = json.loads(line)
        child = os.fork()
        if not child:
            try:
                if moment:
                    MOMENTS[moment]()
                fine_tune(load_config(Path(folder) / "sft.toml"), resume=resume)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
