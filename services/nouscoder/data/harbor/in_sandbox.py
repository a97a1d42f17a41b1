"""The checker of an imported Harbor folder. Its text is the checker program; it runs in the sandbox of a candidate.

Arguments: the folder as JSON, and an answer, which is a bash script. The script runs in the folder's working directory
as an agent would; then tests/test.sh runs, and its reward decides: 1 is right, 0 to 1 is partly right. Where the folder
has a verifier of its own, only the declared artifacts remain. Without a reward this program fails, as Harbor does.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDERS = ("app", "workspace", "logs", "tests", "solution")  # links into /tmp (verifier/harness/isolation.py)
REWARDS = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")


def placed(files: dict[str, str]) -> None:
    """Write files, whose contents are base64."""
    for name, content in files.items():
        made(os.path.dirname(name))
        Path(name).write_bytes(base64.b64decode(content))
        os.chmod(name, 0o755)


def made(folder: str) -> None:
    """Make a folder below one of the links into /tmp."""
    real = os.path.realpath("/" + folder.split("/")[1])
    os.makedirs(real + "/" + "/".join(folder.split("/")[2:]), exist_ok=True)


def ran(script: str, workdir: str, env: dict[str, str]) -> None:
    """Run a script with bash, and end all that it leaves running. Its exit code does not count, as with Harbor."""
    own = {
        "PWD": workdir,
        "PATH": f"/tmp/.bin:{os.environ['PATH']}",
        "PYTHONPATH": ":".join(filter(None, sys.path[1:])),
    }
    subprocess.run(["bash", script], cwd=workdir, env={**os.environ, **own, **env}, stdin=subprocess.DEVNULL, stdout=2)
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)  # every process here but this one and the sandbox's own


def kept(artifacts: list[str], workdir: str) -> None:
    """Remove what the answer has made, except the artifacts."""
    paths = [os.path.realpath(os.path.join(workdir, path)) for path in [*artifacts, "/logs/artifacts"]]
    store = "/tmp/.artifacts"
    os.makedirs(store)
    found = [(at, path) for at, path in enumerate(paths) if os.path.exists(path) and path.startswith("/tmp/")]
    for at, path in found:
        os.rename(path, f"{store}/{at}")
    for name in FOLDERS:
        shutil.rmtree(f"/tmp/{name}", ignore_errors=True)
        made(f"/{name}")
    made(workdir)
    for at, path in found:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.rename(f"{store}/{at}", path)


def reward() -> float:
    """The reward that the tests have written. Raises ValueError for none, or one that is no number from 0 to 1."""
    path = next((name for name in REWARDS if os.path.exists(name)), "")
    if not path:
        raise ValueError("tests/test.sh has written no reward")
    text = Path(path).read_text()
    value: Any = json.loads(text) if path.endswith(".json") else float(text)
    if isinstance(value, dict):
        (value,) = value.values() if len(value) == 1 else [value.get("reward", "of several names")]
    if isinstance(value, str) or not (math.isfinite(value) and 0 <= value <= 1):
        raise ValueError(f"the reward {value!r:.40} is no number from 0 to 1")
    return float(value)


def main() -> int:
    """The exit code of testlib: 0 right, 1 wrong, 7 partly right."""
    folder = json.loads(Path(sys.argv[1]).read_text())
    answer = os.path.abspath(sys.argv[2])
    for name in FOLDERS:
        made(f"/{name}")
    os.makedirs("/tmp/.bin")
    for name in ("python", "python3"):
        os.symlink(sys.executable, f"/tmp/.bin/{name}")
    Path("/tmp/.bin/pytest").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pytest "$@"\n')
    os.chmod("/tmp/.bin/pytest", 0o755)
    made(folder["workdir"])
    placed(folder["environment"])
    ran(answer, folder["workdir"], folder["env"])
    workdir = folder["verifier_workdir"]
    if folder["separate"]:
        kept(folder["artifacts"], folder["workdir"])
        made(workdir)
        placed(folder["verifier"])
    made("/logs/verifier")
    for name in REWARDS:
        Path(name).unlink(missing_ok=True)
    shutil.rmtree("/tmp/tests", ignore_errors=True)
    placed(folder["tests"])
    ran("/tests/test.sh", workdir, folder["verifier_env"])
    value = reward()
    if 0 < value < 1:
        sys.stdout.write(f"{value}\n")
        return 7
    return 0 if value else 1


if __name__ == "__main__":
    sys.exit(main())
