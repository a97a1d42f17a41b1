"""The playground in headless Chromium: every example runs, also by keyboard, without other network access."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from tests.e2e.chromium import Chromium, asked, chromium_program, troubles

from nouscoder.verifier.api.pages import highlighter_path, playground
from nouscoder.verifier.judges import mathematics


@pytest.fixture(scope="module")
def new_page(grading_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Chromium]]:
    browser = Chromium(chromium_program(), tmp_path_factory.mktemp("profile"))

    def make() -> Chromium:
        browser.events.clear()
        browser.open(grading_url, "document.getElementById('code').value !== ''")
        return browser

    yield make
    browser.close()


RESULT = "document.getElementById('status').innerText"
BADGE = "document.querySelector('#status .badge')"
OUTCOMES = "[...document.querySelectorAll('#outcomes li')].map((item) => item.className)"


def test_the_policy_is_strict_and_needs_no_token(grading_url: str) -> None:
    answer = httpx.get(grading_url)
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "script-src 'sha256-" in policy
    assert "http" not in answer.text.replace("nouscoder", "")
    assert "<!--" not in answer.text
    assert "/*s" not in answer.text


def test_ctrl_enter_runs_and_outcomes_stream_in(new_page: Callable[[], Chromium], grading_url: str) -> None:
    page = new_page()
    assert "fails on purpose" in page.value("document.getElementById('hint').innerText")
    page.value("document.getElementById('code').focus()")
    page.press("Enter", 13, modifiers=2)
    page.until(f"{BADGE} !== null")
    assert page.value(f"{BADGE}.innerText") == "wrong answer"
    assert "2 of 3 tests passed, 3 run" in page.value(RESULT)
    assert page.value(OUTCOMES) == ["good", "good", "bad"]
    assert page.value("document.getElementById('failure').innerText").split() == (
        ["Test", "3", "Input", "5", "5", "Expected", "11", "Output", "10"]
    )
    colors = f"{grading_url}{highlighter_path()}"
    assert asked(page) - {"data:,"} == {f"{grading_url}/", colors, f"{grading_url}/v1/grade/stream"}
    assert troubles(page) == []


@pytest.mark.parametrize("name", ["call", "assert", "checker", "interactive", "math"])
def test_the_example_of_every_test_type_is_accepted(new_page: Callable[[], Chromium], name: str) -> None:
    page = new_page()
    page.value(
        f"(() => {{ const s = document.getElementById('example'); s.value = '{name}';"
        " s.dispatchEvent(new Event('change')); document.getElementById('run').click(); })()"
    )
    page.until(f"{BADGE} !== null || {RESULT}.includes(':')")
    assert page.value(f"{BADGE} && {BADGE}.innerText") == "accepted", page.value("document.body.innerText")
    assert troubles(page) == []


def test_a_phone_is_told_of_no_keys_that_it_lacks(new_page: Callable[[], Chromium]) -> None:
    page = new_page()
    try:
        for width, shown in ((1280, True), (390, False)):
            page.ask(
                "Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=not shown
            )
            text = page.value("document.body.innerText")
            assert [words in text for words in ("Ctrl+Enter", "Esc then Tab")] == [shown, shown]
            assert page.value("document.documentElement.scrollWidth") <= width
    finally:
        page.ask("Emulation.clearDeviceMetricsOverride")


def test_the_editor_indents_numbers_its_lines_and_can_be_left_by_keyboard(new_page: Callable[[], Chromium]) -> None:
    page = new_page()
    page.value("document.getElementById('code').select()")
    page.type("if 1:")
    page.press("Enter", 13, text="\r")
    page.type("print(3)")
    assert page.value("document.getElementById('code').value") == "if 1:\n    print(3)"
    assert page.value("document.getElementById('lines').textContent.trim()") == "1\n2"
    page.value("document.getElementById('code').select()")
    page.press("Tab", 9)
    assert page.value("document.getElementById('code').value") == "    if 1:\n        print(3)"
    page.press("Tab", 9, modifiers=8)
    assert page.value("document.getElementById('code').value") == "if 1:\n    print(3)"
    assert page.value("document.activeElement.id") == "code"
    page.press("Escape", 27)
    page.press("Tab", 9)
    assert page.value("document.activeElement.id") == "type"


def test_program_output_stays_text_and_invalid_tests_have_a_message(new_page: Callable[[], Chromium]) -> None:
    page = new_page()
    hostile = "print('<img src=x onerror=document.title=1><script>document.title=2</script>')"
    page.value(f"document.getElementById('code').value = {json.dumps(hostile)}; document.getElementById('run').click()")
    page.until(f"{BADGE} !== null")
    assert "<img src=x" in page.value("document.getElementById('failure').innerText")
    assert page.value("document.title") == "NousCoder playground"
    page.value(
        "document.getElementById('type').value = 'call';"
        " document.getElementById('type').dispatchEvent(new Event('change'));"
        " document.getElementById('tests-json').value = '{'; document.getElementById('run').click()"
    )
    page.until(f"{RESULT}.startsWith('The tests are not valid JSON')")
    page.value(
        "document.getElementById('tests-json').value = '{\"type\": \"call\"}'; document.getElementById('run').click()"
    )
    page.until(f"{RESULT}.startsWith('422: tests.')")


def test_light_and_dark(new_page: Callable[[], Chromium], tmp_path: Path) -> None:
    """Text must contrast with its background. Saves screenshots to $PLAYGROUND_SHOTS if that is set."""
    page = new_page()
    page.value("document.getElementById('run').click()")
    page.until(f"{BADGE} !== null")
    backgrounds = []
    for scheme in ("light", "dark"):
        page.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        page.shoot(Path(os.environ.get("PLAYGROUND_SHOTS", tmp_path)) / f"{scheme}.png")
        for place in ("body", "#code", "#run", ".hint", ".badge", "#outcomes li", "#failure dd", *COLORED):
            assert page.value(f"({CONTRAST})({json.dumps(place)})") >= 4.5, (scheme, place)
        backgrounds.append(page.value("getComputedStyle(document.body).backgroundColor"))
    assert backgrounds[0] != backgrounds[1]
    assert page.value("document.documentElement.scrollWidth <= window.innerWidth")


COLORED = ("#colors", "#colors .hljs-built_in")


# WCAG 2's contrast ratio between an element's text and the nearest painted background.
CONTRAST = """(selector) => {
  const element = document.querySelector(selector);
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = numbers(color).map((c) => linear(c / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  let back = element;
  while (back && numbers(getComputedStyle(back).backgroundColor)[3] === 0) back = back.parentElement;
  const pair = [light(getComputedStyle(element).color), light(getComputedStyle(back || document.body).backgroundColor)];
  return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
}"""


def test_run_is_disabled_while_a_program_runs(new_page: Callable[[], Chromium]) -> None:
    page = new_page()
    page.value("document.getElementById('code').value = 'import time; time.sleep(1); print(input())'")
    page.value("document.getElementById('run').click()")
    assert page.value("document.getElementById('run').disabled") is True
    page.until("!document.getElementById('run').disabled")
    assert page.value(f"{BADGE} !== null") is True


def test_a_type_of_tests_that_is_not_installed_is_not_offered() -> None:
    assert 'data-absent="math"' in playground(["python"], absent=["math"]).text
    assert 'data-absent=""' in playground(["python"]).text


def test_math_is_offered_where_it_is_installed(new_page: Callable[[], Chromium]) -> None:
    offered = new_page().value("[...document.getElementById('type').options].map((one) => one.value)")
    assert ("math" in offered) is mathematics.is_installed()
