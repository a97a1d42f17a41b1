"""Every page of a report in headless Chromium, narrow and wide: no error, and axe finds no violation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.axe import axe_script, violations_on
from tests.e2e.chromium import Chromium, asked, chromium_program, troubles
from tests.e2e.report_pages import (
    write_compared_runs,
    write_evaluation,
    write_objectives,
    write_rollouts,
    write_run,
)

from nouscoder.report.page import write_report

PAGES = ("run", "evaluation", "rollouts", "objectives", "comparison")
OPENED = "document.querySelectorAll('details').forEach((one) => { one.open = true; })"
# With a rollout on the screen, where the page shows one at a time.
CHOSEN = "document.querySelector('table.rollouts tbody tr')?.click()"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    write_run(folder / "run")
    return {
        "run": write_report(folder / "run"),
        "evaluation": write_evaluation(folder / "evaluation.html"),
        "rollouts": write_rollouts(folder / "run"),
        "objectives": write_objectives(folder / "objectives.html"),
        "comparison": write_compared_runs(folder / "comparison.html"),
    }


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    browser = Chromium(chromium_program(), tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def axe() -> str:
    return axe_script()


def violations(browser: Chromium, page: Path, axe: str, width: int, scheme: str) -> list[str]:
    """What axe finds on the page with everything on it open. Fails when the page has an error or asks for anything."""
    browser.events.clear()
    browser.open(page.as_uri())
    size: dict[str, Any] = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.ask("Emulation.setDeviceMetricsOverride", **size)
    browser.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.value(OPENED)
    browser.value(CHOSEN)
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert troubles(browser) == []
    assert asked(browser) == {page.as_uri()}
    found = violations_on(browser, axe)
    browser.close_page()
    return found


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (1280, "light"),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in ((400, "light"), (1280, "dark"), (400, "dark"))),
    ],
)
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_no_violation(
    name: str, width: int, scheme: str, pages: dict[str, Path], browser: Chromium, axe: str
) -> None:
    assert violations(browser, pages[name], axe, width, scheme) == []


def test_a_page_with_a_fault_has_a_violation(browser: Chromium, axe: str, tmp_path: Path) -> None:
    """The control: axe is there, and finds a button without a name and text of too little contrast."""
    faulty = "<title>x</title><html lang=en><main><h1>x</h1><button></button><p style='color:#bbb'>pale</p></main>"
    (tmp_path / "faulty.html").write_text(f"<!doctype html>{faulty}", encoding="utf8")
    found = violations(browser, tmp_path / "faulty.html", axe, 1280, "light")
    assert {one.split(" at ")[0] for one in found} == {"button-name", "color-contrast"}, json.dumps(found)
