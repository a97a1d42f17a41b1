"""What runs in the sandboxes of an imported Harbor folder (form 2): a call of `answered` or `judged` stands below it.

`answered` is the runner of an answer, a bash script: it runs it in the working directory as an agent would, and packs
the folders or artifacts that count. `judged` is the checker, in another sandbox: it unpacks them, then tests/test.sh
runs, and its reward decides: 1 is right, 0 to 1 is partly right. Without a reward it fails, as Harbor does.

INVARIANT: nothing of an answer is in the sandbox of the tests but files and folders at the paths that count, and links
from there to such paths or to the system. What is packed is hostile: an answer may have taken the runner over.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

FOLDERS = ("app", "workspace", "logs", "tests", "solution")  # links into /tmp (verifier/harness/isolation.py)
MOST_BYTES = 192 << 20  # that an answer may leave
REWARDS = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
# How Python starts with PYTHONSAFEPATH. A script finds what is beside it. Else the modules of the working directory are
# found last, its plugins never, and no `import` of what is installed gets one. So an answer's pytest.py is not pytest.
SITE = """import os, sys
from importlib.machinery import PathFinder

installed = tuple(one + "/" for one in sys.path)
by_name = ("/importlib/__init__.py", "/unittest/loader.py", "/pkgutil.py")

class Last:
    def find_spec(name, path=None, target=None):
        frame = sys._getframe(1)
        while frame and frame.f_code.co_filename.startswith("<frozen "):
            frame = frame.f_back
        file = frame.f_code.co_filename if frame else ""
        if path is None and name != "usercustomize" and (file.endswith(by_name) or not file.startswith(installed)):
            return PathFinder.find_spec(name, [os.getcwd()])

if os.path.isfile(sys.argv[0]):
    sys.path.insert(0, os.path.dirname(os.path.realpath(sys.argv[0])))
elif sys.flags.safe_path:
    sys.meta_path.append(Last)
"""


def placed(files: dict[str, str]) -> None:
    """Write files, whose contents are base64."""
    for name, content in files.items():
        made(os.path.dirname(name))
        Path(name).unlink(missing_ok=True)
        Path(name).write_bytes(base64.b64decode(content))
        os.chmod(name, 0o755)


def real(path: str) -> str:
    """Where a path is that begins with one of the links into /tmp."""
    return "/tmp" + path


def made(folder: str) -> None:
    """Make a folder below one of the links into /tmp."""
    os.makedirs(real(folder), exist_ok=True)


def ran(script: str, workdir: str, env: dict[str, str]) -> None:
    """Run a script with bash, and end all that it leaves running. Its exit code does not count, as with Harbor."""
    own = {
        "PWD": workdir,
        "PATH": f"/tmp/.bin:{os.environ['PATH']}",
        "PYTHONPATH": ":".join(["/tmp/.bin", *filter(None, sys.path[1:])]),
        "PYTHONSAFEPATH": "1",
    }
    subprocess.run(["bash", script], cwd=workdir, env={**os.environ, **own, **env}, stdin=subprocess.DEVNULL, stdout=2)
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)  # every process here but this one and the sandbox's own


def packed(paths: list[str], to: str) -> None:
    """Put what is at the paths into an archive. Hard links become files; pipes and sockets are left out."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        tar.inodes.clear()  # type: ignore[attr-defined]
        if member.size > MOST_BYTES:
            raise ValueError("a file has too many bytes")
        return member if member.isreg() or member.isdir() or member.issym() else None

    with tarfile.open(to + ".part", "x:gz", compresslevel=1) as tar:
        for path in paths:
            if os.path.lexists(real(path)):
                tar.add(real(path), path, filter=plain)
    os.rename(to + ".part", to)


class Header(tarfile.TarInfo):
    """A header of an archive. A long name or a pax header is a member that tarfile reads into memory as a whole."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Header:
        """Raises ValueError for one that is too large."""
        header = super().frombuf(buf, encoding, errors)
        if header.type not in tarfile.REGULAR_TYPES and header.size > 1 << 20:
            raise ValueError("a header of the archive has too many bytes")
        return header


def unpacked(archive: str, paths: list[str]) -> None:
    """Place what is below the paths. Raises ValueError for an archive that is too large."""
    links, num_bytes = [], 0
    with tarfile.open(archive, "r|gz", tarinfo=Header) as tar:
        for member in tar:
            name = os.path.normpath("/" + member.name)
            num_bytes += member.size
            if num_bytes > MOST_BYTES:
                raise ValueError("the answer leaves too many bytes")
            # Python would run the code in __pycache__ in place of a file of the tests that is copied there.
            if not is_below(name, paths) or "__pycache__" in name.split("/"):
                continue
            made(name if member.isdir() else os.path.dirname(name))
            if member.issym():
                links.append((member.linkname, real(name)))
            elif member.isreg() and (content := tar.extractfile(member)):
                Path(real(name)).unlink(missing_ok=True)
                with open(real(name), "xb") as file:
                    shutil.copyfileobj(content, file)
                os.chmod(real(name), member.mode & 0o777 | 0o600)
                os.utime(real(name), (member.mtime, member.mtime))
    for target, name in links:  # last, so that nothing was written through one
        os.symlink(target, name)
    places = [*map(real, paths), "/usr", "/bin", "/sbin", "/lib", "/lib64", sys.base_prefix]
    for _, name in links:
        if not is_below(os.path.realpath(name), places):
            os.unlink(name)


def is_below(path: str, places: list[str]) -> bool:
    """Whether a path is one of the places or below one."""
    return any(path == place or path.startswith(place + "/") for place in places)


def reward() -> float:
    """The reward that the tests have written, the lower of two. Raises ValueError for none or one outside of 0 to 1."""
    rewards = [reward_at(name) for name in REWARDS if os.path.lexists(name)]
    if not rewards:
        raise ValueError("tests/test.sh has written no reward")
    return min(rewards)


def reward_at(path: str) -> float:
    """The reward of a file. Raises ValueError for what is no file or no number from 0 to 1."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise ValueError(f"{path} is no file")
    text = Path(path).read_text()
    value: Any = json.loads(text) if path.endswith(".json") else float(text)
    if isinstance(value, dict):
        (value,) = value.values() if len(value) == 1 else [value.get("reward", "of several names")]
    if isinstance(value, str) or not (math.isfinite(value) and 0 <= value <= 1):
        raise ValueError(f"the reward {value!r:.40} is no number from 0 to 1")
    return float(value)


def begun(workdir: str) -> None:
    """Make the folders that tasks name, and the commands of Python."""
    for name in (*(f"/{one}" for one in FOLDERS), workdir, "/logs/verifier", "/.bin"):
        made(name)
    for name in ("python", "python3"):
        os.symlink(sys.executable, f"/tmp/.bin/{name}")
    Path("/tmp/.bin/sitecustomize.py").write_text(SITE)
    Path("/tmp/.bin/pytest").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pytest "$@"\n')
    os.chmod("/tmp/.bin/pytest", 0o755)


def answered(folder: dict[str, Any]) -> int:
    """Run the answer, whose file is the first argument, and pack what counts into the second."""
    begun(folder["workdir"])
    placed(folder["environment"])
    ran(os.path.abspath(sys.argv[1]), folder["workdir"], folder["env"])
    packed(folder["paths"], sys.argv[2])
    return 0


def judged() -> int:
    """Run the tests on what the answer has left. Returns the exit code of testlib: 0 right, 1 wrong, 7 partly right."""
    folder = json.loads(Path(sys.argv[1]).read_text())
    begun(folder["workdir"])
    placed(folder["image"])
    unpacked(sys.argv[2], folder["paths"])
    placed(folder["tests"])
    ran("/tests/test.sh", folder["workdir"], folder["env"])
    value = reward()
    if 0 < value < 1:  # a checker's points are the number with which its stderr begins, until now that of the tests
        os.ftruncate(2, 0)
        os.pwrite(2, f"{value}\n".encode(), 0)
        return 7
    return 0 if value else 1
