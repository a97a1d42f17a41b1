"""Writes every path that a Python process makes to a file: for the tests of two users on one host."""

import json
import os
import sys

_record = os.open(os.environ["MADE_PATHS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _note(event: str, path: object, mode: int) -> None:
    if isinstance(path, bytes | str):
        line = [event, os.path.abspath(os.fsdecode(path)), mode, sys.argv[:6]]
        os.write(_record, json.dumps(line).encode() + b"\n")


def _hook(event: str, args: tuple[object, ...]) -> None:
    if event == "open" and isinstance(args[2], int) and args[2] & os.O_CREAT:
        _note("open", args[0], args[2])
    elif event == "os.mkdir" and isinstance(args[1], int):
        _note("mkdir", args[0], args[1])
    elif event in ("os.link", "os.symlink", "os.rename"):
        _note(event, args[1], 0)
    elif event == "socket.bind" and isinstance(args[1], str) and not args[1].startswith("\0"):
        _note("bind", args[1], 0)


sys.addaudithook(_hook)
