"""The documentation site in headless Chromium, as `make docs` has built it: search, navigation, no other addresses."""

from __future__ import annotations

import functools
import http.server
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from deploy.site.built import weights
from tests.e2e.axe import axe_script, violations_on
from tests.e2e.chromium import Chromium, asked, chromium_program, troubles

pytestmark = pytest.mark.docs

BUILT = Path(__file__).parents[2] / ".site" / "html"
# Zensical shows search in a shadow tree.
SEARCH = "[...document.querySelectorAll('*')].find(one => one.shadowRoot)?.shadowRoot"
RESULTS = f"[...({SEARCH}?.querySelectorAll('a[role=option]') ?? [])].map(one => one.href)"
# What axe finds in Zensical's own parts, in tables whose first column needs no head, and in the alerts' headings.
KNOWN = {"landmark-unique", "empty-table-header", "scrollable-region-focusable", "heading-order"}
MAX_PAGE_BYTES = 260_000  # without pictures
MAX_SHARED_BYTES = 400_000


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves the built site, and says nothing."""

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    assert (BUILT / "index.html").is_file(), "make docs has not built the site"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=BUILT)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    made = Chromium(chromium_program(), tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("dead letters", "operating.html"),
        ("pass@k", "tutorials/grade.html"),
        ("tutorial", "tutorials/train.html"),
        ("grade_many", "reference/client.html"),
        ("v1/tests", "reference/http-api.html"),
    ],
)
def test_search_finds_a_page_and_opens_it(words: str, page: str, browser: Chromium, site: str) -> None:
    browser.open(f"{site}/index.html")
    browser.value("document.querySelector('.md-search__button').click()")
    browser.until(f"{SEARCH}?.activeElement?.tagName === 'INPUT'")
    browser.type(words)
    browser.until(f"{RESULTS}.length > 0")
    found = next((one for one in browser.value(RESULTS) if one.startswith(f"{site}/{page}")), None)
    assert found, browser.value(RESULTS)
    browser.value(f"[...{SEARCH}.querySelectorAll('a[role=option]')].find(one => one.href === {found!r}).click()")
    browser.until(f"location.href.startsWith('{site}/{page}') && document.querySelector('h1') !== null")
    assert troubles(browser) == []


def test_the_three_users_have_a_part_of_the_navigation_which_begins_with_a_tutorial(
    browser: Chromium, site: str
) -> None:
    browser.open(f"{site}/index.html")
    tabs = browser.value("[...document.querySelectorAll('.md-tabs__link')].map(one => one.innerText.trim())")
    assert tabs[:4] == ["Home", "Train", "Grade", "Operate"]
    for tab, page in zip(tabs[1:4], ("train", "grade", "operate"), strict=True):
        link = f"[...document.querySelectorAll('.md-tabs__link')].find(one => one.innerText.trim() === '{tab}')"
        assert browser.value(f"{link}.href") == f"{site}/tutorials/{page}.html"


@pytest.mark.parametrize("page", ["index", "operating", "grading", "comparisons", "reference/http-api", "changes"])
def test_a_page_asks_no_other_address_fits_a_phone_and_is_accessible(page: str, browser: Chromium, site: str) -> None:
    browser.events.clear()
    browser.open(f"{site}/{page}.html")
    browser.ask("Emulation.setDeviceMetricsOverride", width=400, height=800, deviceScaleFactor=1, mobile=True)
    browser.until("innerWidth === 400")
    assert browser.value("document.documentElement.scrollWidth") == 400
    assert all(url.startswith((f"{site}/", "data:", "blob:")) for url in asked(browser))
    assert troubles(browser) == []
    found = violations_on(browser, axe_script())
    assert {one.split(" at ")[0] for one in found} <= KNOWN, found


def test_tables_have_room_on_a_phone_and_no_command_runs_under_its_copy_button(browser: Chromium, site: str) -> None:
    browser.open(f"{site}/trainers.html")
    browser.ask("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True)
    browser.until("innerWidth === 390")
    cell = "[...document.querySelectorAll('td')].find((one) => one.innerText.includes('reward_funcs='))"
    assert browser.value(f"{cell}.clientWidth") >= 200
    for width in (390, 1440):
        browser.open(f"{site}/tutorials/train.html")
        browser.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500
        )
        browser.until(f"innerWidth === {width}")
        blocks = "[...document.querySelectorAll('.language-sh pre > code')]"
        assert browser.value(f"{blocks}.length") > 5
        assert (
            browser.value(
                f"{blocks}.filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.innerText)"
            )
            == []
        )
        right = "parseFloat(getComputedStyle(document.querySelector('.language-sh pre > code')).paddingRight)"
        button = "document.querySelector('.language-sh .md-code__button').getBoundingClientRect().width"
        assert browser.value(f"{right} >= {button}")


def test_no_page_is_heavy() -> None:
    found = list(weights(BUILT))
    pages = {path.relative_to(BUILT).as_posix(): path.stat().st_size for path in BUILT.rglob("*.html")}
    assert len(found) == len(pages) > 50
    heaviest, shared = max(pages.values()), max(one[2] for one in found)
    print(f"\nheaviest page {heaviest / 1000:.0f} kB, shared files {shared / 1000:.0f} kB")
    assert heaviest < MAX_PAGE_BYTES
    assert shared < MAX_SHARED_BYTES
