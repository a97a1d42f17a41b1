"""What a newcomer looks for is linked from README.md and named in the file of `nouscoder init`."""

from __future__ import annotations

import re
from pathlib import Path

from nouscoder.run.starter import starter, starter_text

ROOT = Path(__file__).parents[2]


def test_the_readme_links_what_is_looked_for_and_stays_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf8")
    links = dict(re.findall(r"\[([^\]]+)\]\(([^)#]+)", text))
    for name in ("recipes", "environments", "sinks (TensorBoard, W&B, MLflow)", "exit codes"):
        assert (ROOT / links[name]).is_file(), name
    assert len(text.splitlines()) < 90


def test_the_file_of_init_names_sinks_recipes_and_environments() -> None:
    text = starter_text(starter("model", "problems.jsonl", "my"), "my.toml")
    assert re.search(r"^# .*tensorboard, wandb, mlflow.*\nsinks = \[\]$", text, re.MULTILINE)
    assert "nouscoder recipes" in text
    assert "docs/environments.md" in text
