"""The page /docs in headless Chromium: every call is shown, and "Try it out" grades the example of a request."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from tests.e2e.axe import axe_script, violations_on
from tests.e2e.chromium import Chromium, asked, chromium_program, troubles

GRADE = "document.getElementById('operations-default-grade_v1_grade_post')"
ANSWER = "document.querySelector('.live-responses-table')"
# What axe finds in Swagger UI itself.
OF_SWAGGER_UI = {
    *("color-contrast", "heading-order", "label", "nested-interactive", "region", "scrollable-region-focusable"),
    "select-name",
}


@pytest.fixture(scope="module")
def page(grading_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    browser = Chromium(chromium_program(), tmp_path_factory.mktemp("profile"))
    browser.open(f"{grading_url}/docs", "document.querySelectorAll('.opblock').length > 0")
    yield browser
    browser.close()


def test_every_call_is_shown_and_the_page_asks_no_other_site(page: Chromium, grading_url: str) -> None:
    document = httpx.get(f"{grading_url}/openapi.json").json()
    num_calls = sum(len(item) for item in document["paths"].values())
    assert page.value("document.querySelectorAll('.opblock').length") == num_calls > 15
    assert page.value("getComputedStyle(document.querySelector('.opblock')).borderRadius") == "4px"  # it has its style
    assert troubles(page) == []
    assert all(url.startswith((f"{grading_url}/", "data:")) for url in asked(page))


def test_the_example_of_a_request_is_sent_and_answered(page: Chromium) -> None:
    page.value(f"{GRADE}.querySelector('button').click()")
    for button in ("try-out__btn", "execute"):
        page.until(f"{GRADE}.querySelector('.{button}') !== null")
        page.value(f"{GRADE}.querySelector('.{button}').click()")
    page.until(f"{ANSWER} !== null && {ANSWER}.innerText.includes('verdict')")
    assert '"verdict": "accepted"' in page.value(f"{ANSWER}.innerText")
    assert troubles(page) == []


def test_axe_finds_nothing_but_what_swagger_ui_itself_has(page: Chromium) -> None:
    found = violations_on(page, axe_script())
    assert {one.split(" at ")[0] for one in found} <= OF_SWAGGER_UI, found
