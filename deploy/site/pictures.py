"""Takes the pictures of docs/: `make pictures` runs the demo once, and shows its pages to Chromium.

`python -m deploy.site.pictures RUN` takes them of the run in the folder RUN. Each is a WebP file of less than 150 kB.
"""

from __future__ import annotations

import base64
import sys
import tempfile
from pathlib import Path

from tests.e2e.chromium import Chromium, chromium_program

from nouscoder.report.page import write_report
from nouscoder.run.pages import open_pages

ROOT = Path(__file__).parents[2]
MOST_BYTES = 150_000
TAKEN = "document.querySelectorAll('canvas, svg.chart').length > 10"
# Of each picture: the page, the width, the height, the colours, and what is at its top.
PICTURES = {
    "report": ("report.html", 1280, 960, "light", ""),
    "console/1280-light": ("", 1280, 960, "light", ""),
    "console/1280-dark": ("", 1280, 960, "dark", ""),
    "console/1280-light-rollouts": ("", 1280, 900, "light", "#evaluations"),
    "console/400-light": ("", 400, 900, "light", ""),
    "console/400-dark": ("", 400, 900, "dark", ""),
}


def take(run: Path, to: Path) -> None:
    """Write every picture. Raises SystemExit for one that is too large."""
    write_report(run)
    with tempfile.TemporaryDirectory() as profile, open_pages(run, "127.0.0.1:0") as address:
        browser = Chromium(chromium_program(), Path(profile))
        try:
            for name, (page, width, height, scheme, top) in PICTURES.items():
                browser.open(f"http://{address}/{page}", TAKEN)
                size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 640}
                browser.ask("Emulation.setDeviceMetricsOverride", **size)
                browser.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
                browser.value("document.documentElement.style.overflow = 'hidden'")  # no bar beside the page
                if top:
                    scrolled = f"document.querySelector('{top}').scrollIntoView()"
                    browser.value(scrolled)
                    browser.until("document.querySelectorAll('.token').length > 10")
                    browser.value(scrolled)
                browser.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
                browser.settled()
                shot = browser.ask("Page.captureScreenshot", format="webp", quality=80)
                data = base64.b64decode(shot["data"])
                if len(data) >= MOST_BYTES:
                    raise SystemExit(f"{name}: {len(data)} bytes")
                (to / f"{name}.webp").write_bytes(data)
                browser.close_page()
        finally:
            browser.close()


if __name__ == "__main__":
    take(Path(sys.argv[1]), ROOT / "docs")
