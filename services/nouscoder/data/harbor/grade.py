"""Grades the program of an agent with the tests of this folder: tests/test.sh of an exported Harbor task runs it.

It needs no package. The modules that it imports are copies beside it, so that a verdict is that of the grading service.
The tests stay with root: the program runs as another user where this process is root. Without a reward file something
is wrong with the container, and Harbor counts no reward.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from nouscoder.domain.submission import Comparator, ComparatorKind
from nouscoder.verifier.harness import program_names
from nouscoder.verifier.judges.comparators import UnreadableResult, parse_result, right_values, same_text, same_value

_EXTRA = 1.15  # a program that exceeds its limit a little is measured on a busy machine
_NOBODY = 65534
# Runs main.py in a module, after `before`; then calls a function of it, or executes a case.
_DRIVER = """import json, os, sys, types
def judge():
    execute, compiled, rules = exec, compile, {}
    given = json.load(open("given.json"))
    os.unlink("given.json")
    sys.argv = ["main.py", *given["argv"]]
    module = sys.modules[given["name"]] = types.ModuleType(given["name"])
    space = module.__dict__
    exec(given["rules"], rules)
    before = compile(given["before"], "<before>", "exec")
    exec(before, space)
    code = compile(open("main.py").read(), "main.py", "exec")
    names = rules["ProgramNames"](space, {**space}, code, before)
    exec(code, space)
    result = given.get("token", "")
    if "case" in given:
        execute(names.require_use(compiled(given["case"], "<test>", "exec")), space)
    elif "call" in given:
        name, args, kwargs = given["call"]
        call = rules["find_entry_point"](space, name, code)
        result = json.dumps(call(*args, **kwargs), default=lambda value: value.tolist())
    os.write(given["result"], result.encode())
judge()
"""


def passes(problem: dict[str, Any], source: str, index: int) -> bool:
    """Whether a program passes a test."""
    tests, given, token = problem["tests"], dict[str, Any](), secrets.token_hex(16)
    case = tests["cases"][index]
    kind = tests["type"]
    if kind == "call":
        given["call"] = [tests["entry_point"], case.get("args", []), case.get("kwargs", {})]
    elif kind == "assert":
        given |= {"case": case, "token": token}
    stdin = case["input"] if kind == "stdin" else ""
    given |= {
        "name": "__main__" if kind == "stdin" else "main",
        "argv": case.get("args", []) if kind == "stdin" else [],
        "before": f"{problem['before']}\nexec({tests.get('setup', '')!r})",
        "rules": Path(program_names.__file__).read_text("utf8"),
    }
    ended = run(given, source, stdin.encode("utf8", "surrogatepass"), problem["limits"])
    if ended is None:
        return False
    stdout, result = ended
    rules = dict(problem["comparator"])
    comparator = Comparator(ComparatorKind(rules.pop("type")), **rules)
    if kind == "stdin":
        return same_text(case["output"], stdout, comparator)
    if kind == "assert":
        return secrets.compare_digest(result, token.encode())
    with contextlib.suppress(UnreadableResult):
        value = parse_result(result, json.dumps(case["expected"]))
        wanted = right_values(case["expected"], wrapped=tests.get("wrapped", False))
        return any(same_value(one, value, comparator.absolute, comparator.relative) for one in wanted)
    return False


def run(given: dict[str, Any], source: str, stdin: bytes, limits: dict[str, Any]) -> tuple[bytes, bytes] | None:
    """(stdout, result) of one process in a folder of its own; None when it failed or went beyond a limit."""

    def limit() -> None:
        for kind, most in (
            (resource.RLIMIT_CPU, math.ceil(limits["cpu_time_s"] * _EXTRA)),
            (resource.RLIMIT_AS, limits["memory_bytes"]),
            (resource.RLIMIT_FSIZE, limits["output_bytes"]),
        ):
            resource.setrlimit(kind, (most, most))

    user = _NOBODY if os.geteuid() == 0 else None
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile() as stdout,
        tempfile.TemporaryFile() as result,
        tempfile.TemporaryFile() as given_stdin,
    ):
        os.chmod(folder, 0o777)
        given_stdin.write(stdin)
        given_stdin.seek(0)
        Path(folder, "main.py").write_text(source, "utf8")
        Path(folder, "given.json").write_text(json.dumps(given | {"result": result.fileno()}))
        process = subprocess.Popen(
            [sys.executable, "-c", _DRIVER], cwd=folder, stdin=given_stdin, stdout=stdout, stderr=subprocess.DEVNULL,
            pass_fds=(result.fileno(),), start_new_session=True, preexec_fn=limit, user=user, group=user,
            extra_groups=None if user is None else [],
        )  # fmt: skip
        try:
            code = process.wait(limits["wall_time_s"] * _EXTRA)
        except subprocess.TimeoutExpired:
            code = 1
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if code:
            return None
        stdout.seek(0)
        result.seek(0)
        return stdout.read(), result.read()


def main(solution: Path, rewards: Path) -> None:
    """Write the reward: 1 when the program passes all tests, else 0."""
    here = Path(__file__).parent
    if os.geteuid() == 0:
        os.chmod(here, 0o700)
    problem = json.loads((here / "problem.json").read_text("utf8"))
    if missing := [name for name in problem.get("libraries", []) if importlib.util.find_spec(name) is None]:
        sys.exit(f"this image lacks {', '.join(missing)}, which the program needs")
    problem["before"] = (here / "prelude.py").read_text("utf8")
    source = solution.read_text("utf8", "replace") if solution.is_file() else ""
    right = bool(source) and all(passes(problem, source, index) for index in range(len(problem["tests"]["cases"])))
    rewards.parent.mkdir(parents=True, exist_ok=True)
    rewards.write_text(json.dumps({"reward": float(right)}))


if __name__ == "__main__":
    main(Path("/app/solution.py"), Path("/logs/verifier/reward.json"))
