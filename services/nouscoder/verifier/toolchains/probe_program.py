"""Runs inside a sandbox, like a candidate: prints the versions of the tools and libraries that it finds there.

Reads {"path": search path, "languages": {language: command}, "native": {language: {library: command}}} as JSON from
stdin; each command prints a version. Prints {"languages": {language: first line}, "libraries": {name: version},
"native": {language: {library: first line}}} as JSON. What has no version is omitted. A line is a version only if its
command succeeded and the line has a digit; that of a library begins with one. So no message of a compiler is a version.
"""

import importlib.metadata
import json
import os
import pkgutil
import platform
import re
import subprocess
import sys
from typing import Any

_LIMIT_S = 10


def _first_line(command: list[str], path: str) -> str:
    environment = {**os.environ, "PATH": path}
    try:
        done = subprocess.run(command, capture_output=True, timeout=_LIMIT_S, check=True, env=environment)
    except (OSError, subprocess.SubprocessError):
        return ""
    said = done.stdout.strip() or done.stderr.strip()  # some print their version to stderr
    return said.decode(errors="replace").partition("\n")[0].strip()


def _versions(commands: dict[str, list[str]], path: str, pattern: str) -> dict[str, str]:
    found = {name: _first_line(command, path) for name, command in commands.items()}
    return {name: line for name, line in found.items() if re.search(pattern, line)}


def _library_version(module: pkgutil.ModuleInfo) -> str:
    """From the package's metadata, or from the name of the folder that it is in: NAME-VERSION."""
    try:
        return importlib.metadata.version(module.name)
    except importlib.metadata.PackageNotFoundError:
        folder = os.path.basename(str(getattr(module.module_finder, "path", "")))
        return folder.removeprefix(module.name + "-") if folder.startswith(module.name + "-") else ""


def _libraries() -> dict[str, str]:
    modules = [one for one in pkgutil.iter_modules() if one.name not in sys.stdlib_module_names]
    found = {one.name: _library_version(one) for one in modules}
    return {name: version for name, version in sorted(found.items()) if version}


def main() -> None:
    """See the module."""
    asked: dict[str, Any] = json.load(sys.stdin)
    path = asked["path"]
    languages = {"python": f"{platform.python_implementation()} {platform.python_version()}"}
    languages |= _versions(asked["languages"], path, "[0-9]")
    native = {language: _versions(commands, path, "^[0-9]") for language, commands in asked["native"].items()}
    found = {"languages": languages, "libraries": _libraries(), "native": native}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
