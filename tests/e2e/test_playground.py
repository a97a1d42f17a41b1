"""The playground in headless Chromium: every example runs, also by keyboard, without other network access."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

_LIMIT_S = 60.0


class Chromium:
    """A browser controlled over a pipe with the DevTools protocol: JSON messages, each followed by a NUL byte."""

    def __init__(self, program: str, profile: Path) -> None:
        reading_end, self._commands = _pipe()
        self._answers, writing_end = _pipe()
        options = [
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *(
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--disable-extensions",
            ),
            *("--remote-debugging-pipe", f"--user-data-dir={profile}", "--window-size=1280,900"),
            # The proxy does not exist, so only the service under test can be reached.
            *("--proxy-server=127.0.0.1:9", "--proxy-bypass-list=127.0.0.1"),
        ]
        # The browser reads commands from descriptor 3 and writes answers to descriptor 4.
        shell = f'exec "$@" 3<&{reading_end} 4>&{writing_end}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", program, *options],
            pass_fds=(reading_end, writing_end),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(reading_end)
        os.close(writing_end)
        self._rest = b""
        self._last_id = 0
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None

    def open(self, url: str) -> None:
        """Open a new tab at `url` and wait until it has loaded."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        self.ask("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && document.getElementById('code').value !== ''")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command and return its answer. Events that arrive meanwhile are kept."""
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._answers, 1 << 20)
            assert data, "the browser has exited"
            self._rest += data
        line, self._rest = self._rest.split(b"\0", 1)
        record: dict[str, Any] = json.loads(line)
        return record

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + _LIMIT_S
        while not self.value(expression):
            assert time.monotonic() < end, (expression, self.value("document.body.innerText"))
            time.sleep(0.02)

    def press(self, key: str, code: int, modifiers: int = 0, text: str = "") -> None:
        """Press and release one key. Modifiers: 2 is Ctrl, 8 is Shift."""
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.ask("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        self.ask("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        """Type text into the focused element."""
        self.ask("Input.insertText", text=text)

    def shoot(self, file: Path) -> None:
        """Save a screenshot of the whole page."""
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait(60)
        os.close(self._commands)
        os.close(self._answers)


def _pipe() -> tuple[int, int]:
    """A pipe (read end, write end), whose numbers differ from those that the browser uses."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]


@pytest.fixture(scope="module")
def new_page(grading_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Chromium]]:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("chromium is missing: install it (apt-get install chromium) to drive the playground")
    browser = Chromium(program, tmp_path_factory.mktemp("profile"))

    def make() -> Chromium:
        browser._session = None
        browser.events.clear()
        browser.open(grading_url)
        return browser

    yield make
    browser.close()


RESULT = "document.getElementById('status').innerText"
BADGE = "document.querySelector('#status .badge')"
OUTCOMES = "[...document.querySelectorAll('#outcomes li')].map((item) => item.className)"


def troubles(page: Chromium) -> list[str]:
    """The errors of the browser: exceptions, blocked requests, violations of the policy. Advice is not included."""
    kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Network.loadingFailed")
    found = [event for event in page.events if event.get("method") in kinds]
    return [json.dumps(one) for one in found if one["params"].get("entry", {}).get("level") not in ("verbose", "info")]


def asked(page: Chromium) -> set[str]:
    """Every address that the page requested."""
    sent = [event for event in page.events if event.get("method") == "Network.requestWillBeSent"]
    return {event["params"]["request"]["url"] for event in sent}


def test_the_policy_is_strict_and_needs_no_token(grading_url: str) -> None:
    answer = httpx.get(grading_url)
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "http" not in answer.text.replace("nouscoder", "")
    for mark in ("/*style*/", "/*script*/", "<!--languages-->"):
        assert mark not in answer.text


def test_ctrl_enter_runs_and_outcomes_stream_in(new_page: Callable[[], Chromium], grading_url: str) -> None:
    page = new_page()
    page.value("document.getElementById('code').focus()")
    page.press("Enter", 13, modifiers=2)
    page.until(f"{BADGE} !== null")
    assert page.value(f"{BADGE}.innerText") == "wrong answer"
    assert "2 of 3 tests passed, 3 run" in page.value(RESULT)
    assert page.value(OUTCOMES) == ["good", "good", "bad"]
    assert page.value("document.getElementById('failure').innerText").split() == (
        ["Test", "3", "Input", "5", "5", "Expected", "11", "Output", "10"]
    )
    assert asked(page) - {"data:,"} == {f"{grading_url}/", f"{grading_url}/v1/grade/stream"}
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
        for place in ("body", "#code", "#run", ".hint", ".badge", "#outcomes li", "#failure dd"):
            assert page.value(f"({CONTRAST})({json.dumps(place)})") >= 4.5, (scheme, place)
        backgrounds.append(page.value("getComputedStyle(document.body).backgroundColor"))
    assert backgrounds[0] != backgrounds[1]
    assert page.value("document.documentElement.scrollWidth <= window.innerWidth")


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
