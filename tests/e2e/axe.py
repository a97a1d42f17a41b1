"""axe-core on a page in headless Chromium. It comes from its npm package, which is fetched once and never committed."""

from __future__ import annotations

from tests.e2e.chromium import Chromium
from tests.npm_package import NpmPackage

_AXE = NpmPackage(
    name="axe-core",
    version="4.14.1",
    sha256="e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745",
    folder_name="axe-core",
    files=("axe.min.js",),
)
_FOUND = """axe.run(document, {resultTypes: ["violations"]}).then(({violations}) => violations.map(
  (rule) => rule.id + " at " + rule.nodes.map((node) => node.target.join(" ")).slice(0, 5).join(", ")
    + " (" + rule.nodes.length + "): " + rule.help))"""


def axe_script() -> str:
    """The script of axe. Skips the test where it cannot be had."""
    return (_AXE.folder() / "axe.min.js").read_text(encoding="utf8")


def violations_on(browser: Chromium, axe: str) -> list[str]:
    """What axe finds on the page that is open, once its transitions have ended."""
    browser.settled()
    browser.value(f"{axe};0")
    found: list[str] = browser.value(_FOUND)
    return found
