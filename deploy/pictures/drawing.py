"""The pictures of all dashboards, from a recording or from a live Prometheus, and whether they are of today's files."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from deploy.dashboards.live import FOLDER, CannotCheck, Span
from deploy.pictures.boards import digest, read_board
from deploy.pictures.page import Source, picture
from deploy.pictures.recording import digest as recording_digest
from deploy.pictures.recording import read_about, replay
from deploy.pictures.series import read_series

HERE = Path(__file__).parent
PICTURES = HERE.parents[1] / "docs" / "dashboards"
COMMAND = "python -m deploy.pictures draw"
NUM_POINTS = 120
_FIRST_SCRAPES = 2  # a rate needs two samples


def draw(url: str, variables: Mapping[str, str], span: Span, source: Source, out: Path) -> list[str]:
    """Write a picture of every dashboard. Returns the panels without data. Raises CannotCheck."""
    boards = [read_board(path) for path in sorted(FOLDER.glob("*.json"))]
    texts, empty = {}, []
    for board in boards:
        panels = [panel for panel in board.panels if panel.kind != "row"]
        found = {panel.number: read_series(url, panel, variables, span) for panel in panels}
        texts[board.name] = picture(board, found, span, source)
        empty += [f"{board.name}: {panel.title}" for panel in panels if not found[panel.number]]
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (out / f"{name}.svg").write_text(text, "utf8")
    except OSError as error:
        raise CannotCheck(f"the pictures cannot be written: {error}") from None
    return empty


def draw_recording(folder: Path, out: Path) -> list[str]:
    """Write pictures of the recording in a folder. Returns the panels without data. Raises CannotCheck."""
    about = read_about(folder)
    rate_interval = f"{4 * about.scrape_s:g}s"  # Grafana's rule
    shown = {"Window": "1m", "Scrape interval": f"{about.scrape_s:g}s"}
    variables = {"namespace": about.namespace, "release": about.release, "window": "1m"}
    start_s = about.start_s + _FIRST_SCRAPES * about.scrape_s
    span = Span(start_s, about.end_s, (about.end_s - start_s) / (NUM_POINTS - 1))
    day = datetime.fromtimestamp(about.start_s, UTC).date()
    source = Source(f"Recorded on {day}: {about.sentence}.", shown, recording_digest(folder))
    with replay(folder) as url:
        return draw(url, {**variables, "__rate_interval": rate_interval}, span, source, out)


def draw_live(url: str, variables: Mapping[str, str], over_s: float, out: Path) -> list[str]:
    """Write pictures of a release's last `over_s` seconds. Returns the panels without data. Raises CannotCheck."""
    if not 0 < over_s < math.inf:
        raise CannotCheck("a picture must show more than 0 s, and not endlessly many")
    now = time.time()
    span = Span(now - over_s, now, over_s / (NUM_POINTS - 1))
    shown = {name.capitalize(): variables[name] for name in ("namespace", "release", "window")}
    sentence = f"The {over_s:g} s before {datetime.fromtimestamp(now, UTC):%Y-%m-%d %H:%M} UTC."
    return draw(url, variables, span, Source(sentence, shown, ""), out)


def stale(pictures: Path, folder: Path, dashboards: Path) -> list[str]:
    """The names of dashboards whose picture is missing, or of another dashboard or recording. Raises CannotCheck."""
    recording = recording_digest(folder)
    return [
        path.stem
        for path in sorted(dashboards.glob("*.json"))
        if _drawn_from(pictures / f"{path.stem}.svg") != (digest(path), recording)
    ]


def _drawn_from(file: Path) -> tuple[str, ...]:
    """The digests of the dashboard and the recording that a picture is of; () if there is no picture."""
    if not file.is_file():
        return ()
    match = re.search(r'data-dashboard="(\w+)" data-recording="(\w*)"', file.read_text("utf8"))
    return match.groups() if match else ()
