"""The table that `nouscoder eval` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nouscoder.domain.elo import Elo, elo_text

_MOST_DISAGREEMENTS = 20


def summary_text(record: dict[str, Any], out: Path) -> str:
    """The results of report.json as text."""
    lines = [f"{record['num_problems']} problems, {record['num_samples']} samples"]
    for profile, results in record["profiles"].items():
        lines.append(f"\ngrading: {profile}")
        lines += [_row(f"pass@{k}", "", one) for k, one in results["pass_at_k"].items()]
        for group, rows in results["by"].items():
            lines += [_row(f"  {group} {row['name']}", f"{row['num_problems']}", row) for row in rows]
        lines += [_elo(results["elo"])] if results["elo"] else []
        lines += [f"{name:<34}{count:>6}" for name, count in results["verdicts"].items()]
    lines.append(f"\n{'truncated':<34}{record['truncated']['samples']:>6}")
    lines.append(f"{'mean ' + record['lengths']['unit']:<34}{record['lengths']['mean']:>6.0f}")
    lines += _disagreements(record) if len(record["profiles"]) > 1 else []
    lines.append(f"report: {out / 'report.html'}")
    return "\n".join(lines)


def _row(name: str, count: str, one: dict[str, Any]) -> str:
    return f"{name:<34}{count:>6}{one['value']:>9.4f}   {one['low']:.4f} to {one['high']:.4f}"


def _elo(one: dict[str, Any]) -> str:
    return f"{'Elo rating':<34}{one['num_problems']:>6}   {elo_text(Elo(one['value'], one['low'], one['high']))}"


def _disagreements(record: dict[str, Any]) -> list[str]:
    found = record["disagreements"]
    shown = [
        f"  {one['problem_id']}, sample {one['position']}: "
        + ", ".join(f"{profile} {verdict}" for profile, verdict in one["verdicts"].items())
        for one in found[:_MOST_DISAGREEMENTS]
    ]
    more = [f"  and {len(found) - len(shown)} more in report.json"] if len(found) > len(shown) else []
    return [f"accepted by one profile only: {len(found)}", *shown, *more]
