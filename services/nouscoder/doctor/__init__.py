"""`nouscoder doctor`: what this machine or a cluster can run, what is missing, and how to get it, as findings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. `needed` means that the defaults need it. `fix` is "" when nothing is missing.

    `known` is False if it could not be determined, because of missing rights or a failed trial; `ok` is then False.
    """

    name: str
    ok: bool
    needed: bool
    detail: str
    fix: str = ""
    known: bool = True


def report(findings: Sequence[Finding], what: str, *, as_json: bool) -> tuple[str, int]:
    """(text to print, exit code). The exit code is 0 when `what` can run."""
    code = int(not all(finding.ok for finding in findings if finding.needed))
    if as_json:
        return json.dumps({"ok": code == 0, "findings": [asdict(finding) for finding in findings]}, indent=1), code
    return as_text(findings, what), code


def as_text(findings: Sequence[Finding], what: str) -> str:
    """One line per finding, one more for its fix, and a summary."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{_mark(finding):8}{finding.name:{width}}  {finding.detail}")
        if finding.fix:
            lines.append(f"{'':8}{'':{width}}  to get it: {finding.fix}")
    broken = [finding.name for finding in findings if finding.needed and finding.known and not finding.ok]
    unknown = [finding.name for finding in findings if finding.needed and not finding.known]
    if broken:
        verdict = f"cannot run: {', '.join(broken)}"
    elif unknown:
        verdict = f"may run, but these are unknown: {', '.join(unknown)}"
    else:
        verdict = "can run here"
    lines.append(f"{what} {verdict}")
    return "\n".join(lines)


def _mark(finding: Finding) -> str:
    mark = "ok" if finding.ok else "missing" if finding.known else "unknown"
    return mark.upper() if finding.needed and not finding.ok else mark
