"""Grades every program of a folder: examples/grade_a_folder.py FOLDER [--url URL]

The folder has tests.json, in the form of the field `tests` of POST /v1/grade, and programs. The ending of a program's
name says its language. Prints the verdict of each, with the first test that it fails. The exit code is 1 when a program
is not accepted, and 2 when the service could not grade one: that is never a wrong program.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nouscoder.client import Client, GradingFailed

LANGUAGES = {
    **{".py": "python", ".c": "c", ".cpp": "cpp", ".cc": "cpp", ".java": "java", ".go": "go", ".rs": "rust"},
    **{".js": "javascript", ".ts": "typescript", ".rb": "ruby", ".pl": "perl", ".lua": "lua", ".php": "php"},
}


def requests(programs: list[Path], tests: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One request for each program. All tests are run, so that the number of passed ones says something."""
    rules = {"tests": tests, "stop_on_first_failure": False}
    for program in programs:
        yield {"language": LANGUAGES[program.suffix], "code": program.read_text(encoding="utf8"), **rules}


def main() -> int:
    """Grade the folder. Returns the exit code."""
    parser = argparse.ArgumentParser(description="grades every program of a folder")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="the grading service")
    given = parser.parse_args()
    file = given.folder / "tests.json"
    try:
        tests = json.loads(file.read_text(encoding="utf8"))
    except (OSError, ValueError) as error:
        parser.error(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}")
    programs = sorted(path for path in given.folder.iterdir() if path.suffix in LANGUAGES)
    if not programs:
        parser.error(f"{given.folder} has no program: their names end in {' '.join(LANGUAGES)}")

    code = 0
    with Client(given.url) as client:
        for program, result in zip(programs, client.grade_many(requests(programs, tests)), strict=True):
            if isinstance(result, GradingFailed) or result["verdict"] == "internal_error":
                reason = str(result) if isinstance(result, GradingFailed) else result["detail"]
                print(f"{program.name}: not graded, {reason}")
                code = 2
                continue
            print(f"{program.name}: {result['verdict']}, {result['passed']} of {result['total']} tests passed")
            if failure := result["first_failure"]:
                print(f"  first failure: {json.dumps(failure)[:300]}")
            if result["verdict"] != "accepted":
                code = max(code, 1)
    return code


if __name__ == "__main__":
    sys.exit(main())
