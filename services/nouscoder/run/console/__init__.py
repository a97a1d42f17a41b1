"""The page that shows a run while it goes on: its files, which a browser asks for by the names in `PARTS`.

INVARIANT: the page loads nothing but these parts, and its script asks only its own server. The policy that comes with
it allows no inline script and no inline style. Text of a run is only ever set as text.

uPlot.iife.min.js and uPlot.min.css are the published files of uPlot 1.6.32, unchanged (MIT, uPlot.LICENSE).
"""

from __future__ import annotations

import functools
from importlib.resources import files
from string import Template

from nouscoder.report.samples import browser

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)
_SCRIPT, _STYLE = "text/javascript; charset=utf-8", "text/css; charset=utf-8"
# The style and the list of rollouts are those of the reports.
_OF_REPORTS = {"page.css": _STYLE, "rollouts.css": _STYLE, "page.js": _SCRIPT, "rollouts.js": _SCRIPT}
_OWN = {
    **{"console.css": _STYLE, "uPlot.min.css": _STYLE, "uPlot.iife.min.js": _SCRIPT},
    **{"console.js": _SCRIPT, "charts.js": _SCRIPT, "tables.js": _SCRIPT},
}
PARTS = {f"console/{name}": kind for name, kind in (_OF_REPORTS | _OWN).items()}


@functools.cache
def part(path: str) -> bytes:
    """One of `PARTS`."""
    name = path.removeprefix("console/")
    return files("nouscoder.report" if name in _OF_REPORTS else __name__).joinpath(name).read_bytes()


@functools.cache
def console_page() -> bytes:
    """The page, which is the same for every run."""
    frame = files(__name__).joinpath("console.html").read_text(encoding="utf8")
    return Template(frame).substitute(rollouts=browser()).encode("utf8")
