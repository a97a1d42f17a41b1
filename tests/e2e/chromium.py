"""A headless Chromium that tests drive over the DevTools protocol."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

_LIMIT_S = 60.0
# What the browser answers for an expression whose page it leaves for the next one.
_LEFT = (
    "Inspected target navigated or closed",
    "Execution context was destroyed.",
    "Cannot find context with specified id",
    "Cannot find default execution context",
)


class PageLeftError(Exception):
    """The page in which an expression was asked has been left for another."""


class Chromium:
    """A browser controlled over a pipe with the DevTools protocol: JSON messages, each followed by a NUL byte."""

    def __init__(self, program: str, profile: Path) -> None:
        reading_end, self._commands = _pipe()
        self._answers, writing_end = _pipe()
        options = [
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            "--disable-extensions",
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

    def open(self, url: str, ready: str = "true") -> None:
        """Open a new tab at `url` and wait until it has loaded and `ready` is true."""
        self._session = None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        self.ask("Page.navigate", url=url)
        self.until(f"document.readyState === 'complete' && {ready}")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command and return its answer. Events that arrive meanwhile are kept."""
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        left = json.dumps(message).encode() + b"\0"
        while left:
            left = left[os.write(self._commands, left) :]
        while True:
            answer = self._receive()
            if answer.get("id") == self._last_id:
                if answer.get("error", {}).get("message") in _LEFT:
                    raise PageLeftError(answer["error"]["message"])
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

    def until(self, expression: str, limit_s: float = _LIMIT_S) -> None:
        """Wait until an expression is true. A page that is left meanwhile has not made it true."""
        end = time.monotonic() + limit_s
        while not self._is_true(expression):
            assert time.monotonic() < end, (expression, self.value("document.body.innerText"))
            time.sleep(0.02)

    def settled(self) -> None:
        """Wait until every transition of the page has ended: while one runs, colours and sizes are between two."""
        self.until("document.getAnimations().every((one) => one.playState !== 'running')")

    def _is_true(self, expression: str) -> bool:
        try:
            return bool(self.value(expression))
        except PageLeftError:
            return False

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

    def close_page(self) -> None:
        """Close the tab that is open."""
        self.ask("Page.close")
        self._session = None

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


def chromium_program() -> str:
    """The path of Chromium. Skips the test where there is none."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("chromium is missing: install it (apt-get install chromium) to run this test in a real browser")
    return program


def troubles(page: Chromium) -> list[str]:
    """The errors of the browser: exceptions, blocked requests, violations of the policy. Advice is not included."""
    kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Network.loadingFailed")
    found = [event for event in page.events if event.get("method") in kinds]
    return [json.dumps(one) for one in found if one["params"].get("entry", {}).get("level") not in ("verbose", "info")]


def asked(page: Chromium) -> set[str]:
    """Every address that the page requested."""
    sent = [event for event in page.events if event.get("method") == "Network.requestWillBeSent"]
    return {event["params"]["request"]["url"] for event in sent}
