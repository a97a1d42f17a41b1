"""Loads task folders with Harbor and lints them: harbor_tasks.py FOLDER. Prints one line of JSON."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

from harbor.cli.main import app
from harbor.lint.task import lint_task
from harbor.models.task.task import Task
from harbor.models.task.verifier_mode import resolve_task_verifier_mode
from typer.testing import CliRunner

folders = sorted(Path(sys.argv[1]).iterdir())
tasks = [Task(folder) for folder in folders]
print(
    json.dumps(
        {
            "harbor": version("harbor"),
            "names": [task.name for task in tasks],
            "modes": [resolve_task_verifier_mode(task.config).value for task in tasks],
            "lint": CliRunner().invoke(app, ["lint", *map(str, folders)]).exit_code,
            "all_rules": sorted({finding.rule.value for folder in folders for finding in lint_task(folder)}),
        }
    )
)
