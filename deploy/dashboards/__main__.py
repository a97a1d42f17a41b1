"""Write the chart's Grafana dashboards: `python -m deploy.dashboards` from the root; `--check` only compares."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from deploy.dashboards.broker import BROKER
from deploy.dashboards.cost import COST
from deploy.dashboards.generation import GENERATION
from deploy.dashboards.panels import as_json
from deploy.dashboards.run import RUN
from deploy.dashboards.verifier import VERIFIER

FOLDER = Path(__file__).parents[2] / "helm" / "nouscoder" / "dashboards"
BOARDS = {
    "run.json": RUN,
    "verifier.json": VERIFIER,
    "broker.json": BROKER,
    "generation.json": GENERATION,
    "cost.json": COST,
}


def main() -> int:
    """Write the files and return 0. With --check, return 1 if a file is out of date."""
    parser = argparse.ArgumentParser(prog="python -m deploy.dashboards", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail when a file is out of date")
    check = parser.parse_args().check
    stale = []
    for name, board in BOARDS.items():
        path, text = FOLDER / name, as_json(board)
        if path.is_file() and path.read_text(encoding="utf8") == text:
            continue
        stale.append(name)
        if not check:
            path.write_text(text, encoding="utf8")
    if check and stale:
        sys.stderr.write(f"{', '.join(stale)} out of date: run python -m deploy.dashboards\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
