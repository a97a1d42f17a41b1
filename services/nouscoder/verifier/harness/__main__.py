"""Entry point of a slot, started by its path: `python -I -S __main__.py SETTINGS_JSON`.

The last statement of this module also runs the candidate: in a candidate's process all calls below have returned, so
that the program runs at the same depth as a script of the interpreter.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import sys
from typing import Any

_PACKAGE = "nouscoder_harness"
_STACK_BYTES = 256 * 1024**2


def _restart_with_stack() -> None:
    """Raise the soft stack limit and exec again: the kernel reserves the address space of a deep stack at exec."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    wanted = _STACK_BYTES if hard == resource.RLIM_INFINITY else min(_STACK_BYTES, hard)
    if soft == wanted:
        return
    resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _load() -> Any:
    """Import this folder as a separate package, independent of an installed project."""
    folder = os.path.dirname(os.path.abspath(__file__))
    spec = importlib.util.spec_from_file_location(
        _PACKAGE, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_PACKAGE] = module
    spec.loader.exec_module(module)
    return importlib.import_module(f"{_PACKAGE}.zygote")


def _run(job: Any) -> None:
    """Run the candidate. Uses no global of this module after the program has run, because it may have changed them."""
    status = 0
    try:
        if job.prelude is not None:
            exec(job.prelude, job.namespace)  # noqa: S102
            job.take_judge()
        exec(job.code, job.namespace)  # noqa: S102 - this file exists to run candidates
        job.call()
    except BaseException as error:
        status = job.failed(error)
    job.leave(status)


if __name__ == "__main__":
    _restart_with_stack()
    _run(_load().main(sys.argv[1]))
