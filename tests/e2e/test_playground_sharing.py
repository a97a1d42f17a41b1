"""What the playground offers beside the run: colours, first programs, links, and requests for curl and Python."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from tests.e2e.axe import axe_script, violations_on
from tests.e2e.chromium import Chromium, chromium_program, troubles
from tests.npm_package import NpmPackage

from nouscoder.verifier.api.pages import highlighter, highlighter_path
from nouscoder.verifier.toolchains.languages import installed, registry

HIGHLIGHTER = NpmPackage(
    name="@highlightjs/cdn-assets",
    version="11.12.0",
    sha256="b8a006d30f45afe783072569f3d69c5b60c0e7b9ca28cd474e12f2584e2a3bd9",
    folder_name="highlightjs",
    files=("highlight.min.js", "LICENSE"),
)
STATUS, SHARED = "document.getElementById('status').innerText", "document.getElementById('shared').innerText"
CODE, TAKEN = "document.getElementById('code').value", "document.getElementById('taken').value"
BADGE = "document.querySelector('#status .badge')"
HARD = 'print("\\\\ \\" \' $HOME `id` EOF é 😀 \u2028", end="")\n# EOF\n'


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    browser = Chromium(chromium_program(), tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def open_page(browser: Chromium, grading_url: str) -> Callable[..., Chromium]:
    """Opens the page, perhaps with a state in the link."""

    def made(fragment: str = "") -> Chromium:
        browser.events.clear()
        browser.open(f"{grading_url}/{fragment}", f"{CODE} !== ''")
        return browser

    return made


def choose(page: Chromium, element: str, value: str) -> None:
    """As a person does: the change is an event."""
    page.value(
        f"(() => {{ const s = document.getElementById({json.dumps(element)}); s.value = {json.dumps(value)};"
        " s.dispatchEvent(new Event('change')); })()"
    )


def write(page: Chromium, code: str) -> None:
    """Write a program."""
    page.value(f"{CODE} = {json.dumps(code)}; document.getElementById('code').dispatchEvent(new Event('input'))")


def link_to(state: Any) -> str:
    """The fragment of a link to a state."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    data = packer.compress(state if isinstance(state, bytes) else json.dumps(state).encode()) + packer.flush()
    return "#state=" + base64.urlsafe_b64encode(data).decode().rstrip("=")


STATE: dict[str, Any] = {
    "language": "python",
    "code": "print(input()[::-1])",
    "tests": {"type": "stdin", "cases": [{"input": "ab", "output": "ba"}]},
    "limits": {"wall_time_s": 3, "cpu_time_s": 2, "memory_bytes": 64 << 20},
    "comparator": {"type": "kattis", "float_tolerance": 0.5},
    "stop_on_first_failure": True,
}


def test_the_highlighter_is_the_published_file() -> None:
    folder = HIGHLIGHTER.folder()
    assert highlighter().text == (folder / "highlight.min.js").read_text(encoding="utf8")


def test_the_highlighter_may_be_kept_and_a_token_is_not_needed(grading_url: str) -> None:
    answer = httpx.get(f"{grading_url}{highlighter_path()}")
    assert answer.headers["content-type"].startswith("text/javascript")
    assert "immutable" in answer.headers["cache-control"]
    assert hashlib.sha256(answer.content).hexdigest()[:12] in highlighter_path()


def test_the_program_is_colored_and_stays_text(open_page: Callable[..., Chromium]) -> None:
    page = open_page()
    colors = "document.getElementById('colors')"
    assert page.value(f"{colors}.textContent === {CODE}") is True
    assert page.value(f"{colors}.querySelectorAll('span').length") > 0
    write(page, "x = '<img src=x onerror=document.title=1>'\n")
    assert page.value(f"{colors}.textContent === {CODE} && {colors}.querySelector('img') === null") is True
    write(page, "x = 1\n" * 20_000)  # too long to color while somebody types
    assert page.value(f"{colors}.textContent === '' && !document.querySelector('.colored')") is True
    assert troubles(page) == []


def test_the_colors_lie_under_the_letters(open_page: Callable[..., Chromium]) -> None:
    """Also after scrolling: what is drawn is the layer below the text."""
    page = open_page()
    write(page, "\n".join(f"{'x' * 150} = {n}" for n in range(300)))
    moved = page.value(
        """(async () => { const [code, colors] = ['code', 'colors'].map((id) => document.getElementById(id));
        code.scrollTop = 1e6; code.scrollLeft = 1e6;
        await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
        const place = colors.getBoundingClientRect(), own = code.getBoundingClientRect();
        return [place.top - own.top - 10 + code.scrollTop, place.left - own.left - 10 + code.scrollLeft,
          code.scrollTop > 1000, code.scrollLeft > 100, colors.offsetHeight + 20 - code.scrollHeight]; })()"""
    )
    assert moved[2:4] == [True, True]
    assert all(abs(number) <= 1 for number in (*moved[:2], moved[4])), moved


@pytest.mark.parametrize(
    "language",
    ["javascript", *(pytest.param(one, marks=pytest.mark.heavy) for one in sorted(registry()) if one != "javascript")],
)
def test_each_language_has_a_first_program_that_is_right(open_page: Callable[..., Chromium], language: str) -> None:
    if language not in installed():
        pytest.skip(f"{language} is not installed")
    page = open_page()
    before = page.value(CODE)
    choose(page, "language", language)
    assert (page.value(CODE) != before) is (language not in ("python", "pypy"))
    assert page.value("document.querySelectorAll('#colors span').length") > 0
    page.value("document.getElementById('run').click()")
    page.until(f"{BADGE} !== null || {STATUS}.includes(':')", limit_s=240)  # go without its cache compiles for a minute
    assert "2 of 3 tests passed" in page.value(STATUS), page.value("document.body.innerText")


def test_a_program_that_was_written_is_not_replaced_by_another_language(open_page: Callable[..., Chromium]) -> None:
    page = open_page()
    write(page, "mine")
    choose(page, "language", "cpp")
    assert page.value(CODE) == "mine"


def test_a_link_holds_the_whole_state(open_page: Callable[..., Chromium], grading_url: str) -> None:
    page = open_page()
    choose(page, "example", "checker")
    write(page, HARD)
    page.value("document.getElementById('wall').value = 7; document.getElementById('token').value = 'secret-token'")
    wanted = page.value("requestGiven()")
    page.value("document.getElementById('link').click()")
    page.until(f"{TAKEN} !== ''")
    link = page.value(TAKEN)
    assert link.startswith(f"{grading_url}/#state=")
    assert page.value("location.href") == link
    page.close_page()
    page = open_page(link.removeprefix(f"{grading_url}/"))
    page.until(f"{STATUS}.startsWith('This is the program of the link')")
    assert page.value("requestGiven()") == wanted
    assert page.value("document.getElementById('token').value") == ""
    assert troubles(page) == []


def test_a_link_changes_the_page_and_runs_nothing(open_page: Callable[..., Chromium]) -> None:
    page = open_page(link_to(STATE))
    page.until(f"{STATUS}.startsWith('This is the program of the link')")
    given = page.value("requestGiven()")
    assert given == STATE
    assert not any("/v1/" in url for url in map(str, page.events))
    page.value("document.getElementById('run').click()")
    page.until(f"{BADGE} !== null")
    assert page.value(f"{BADGE}.innerText") == "accepted"


@pytest.mark.parametrize(
    ("fragment", "reason"),
    [
        ("#state=!", "The link cannot be read"),
        ("#state=" + "A" * 30_001, "it is too long"),
        (link_to(b"not json"), "The link cannot be read"),
        (link_to(b"\xff\xfe"), "The link cannot be read"),
        (link_to(b'"' + b"x" * (50 << 20)), "it is too long"),
        (link_to(b'"' + b"x" * (20 << 20)), "it is too large"),
        (link_to([1]), "it is not a link of this page"),
        (link_to(None), "it is not a link of this page"),
        (link_to(STATE | {"language": "<b>cobol"}), "<b>cobol is not installed here"),
        (link_to(STATE | {"tests": {"type": "riddle"}}), "tests of type riddle are not offered here"),
        (link_to(STATE | {"tests": {"type": "stdin", "cases": [None]}}), "its tests are not cases"),
        (link_to(STATE | {"tests": {"type": "stdin", "cases": 7}}), "its tests are not cases"),
    ],
    ids=range(12),
)
def test_a_bad_link_is_one_sentence_and_changes_nothing(
    open_page: Callable[..., Chromium], fragment: str, reason: str
) -> None:
    untouched = open_page().value("requestGiven()")
    page = open_page(fragment)
    page.until(f"{STATUS}.includes({json.dumps(reason)})")
    assert page.value("requestGiven()") == untouched
    assert troubles(page) == []


def test_odd_values_of_a_link_stay_values(open_page: Callable[..., Chromium]) -> None:
    odd = {"limits": {"wall_time_s": "<b>", "memory_bytes": None}, "comparator": {"type": 7}}
    cases = [{"input": "<img src=x onerror=document.title=1>", "output": {"a": 1}}]
    page = open_page(link_to(STATE | odd | {"tests": {"type": "stdin", "cases": cases}}))
    page.until(f"{STATUS}.startsWith('This is the program of the link')")
    assert page.value("document.title") == "NousCoder playground"
    assert page.value("document.querySelector('img') === null") is True
    assert page.value("document.getElementById('wall').value") == "15"


def test_a_state_too_large_for_a_link_is_refused(open_page: Callable[..., Chromium]) -> None:
    page = open_page()
    write(page, base64.b64encode(os.urandom(60_000)).decode())
    page.value("document.getElementById('link').click()")
    page.until(f"{SHARED} !== ''")
    assert page.value(SHARED).startswith("No link: a link may have 30000 characters, and this one has ")
    assert page.value("location.hash") == ""


@pytest.mark.parametrize("kind", ["curl", "python"])
@pytest.mark.parametrize(
    "name", ["stdin", *(pytest.param(one, marks=pytest.mark.heavy) for one in ("call", "checker"))]
)
def test_the_copied_request_gives_the_same_verdict(open_page: Callable[..., Chromium], kind: str, name: str) -> None:
    """It is run as it is. The token of the page is not in it."""
    page = open_page()
    choose(page, "example", name)
    if name == "stdin":
        write(page, HARD)
    page.value("document.getElementById('token').value = 'secret-token'; document.getElementById('run').click()")
    page.until(f"{BADGE} !== null")
    verdict = page.value(f"{BADGE}.innerText").replace(" ", "_")
    page.value(f"document.getElementById('{kind}').click()")
    page.until(f"{TAKEN} !== ''")
    text = page.value(TAKEN)
    assert "secret-token" not in text
    assert "NOUSCODER_TOKEN" in text
    command = ["bash", "-c", text] if kind == "curl" else [sys.executable, "-c", text]
    environment = {**os.environ, "NOUSCODER_TOKEN": "anything"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert verdict in done.stdout, done.stderr


def test_without_valid_tests_there_is_no_request_to_copy(open_page: Callable[..., Chromium]) -> None:
    page = open_page()
    choose(page, "example", "call")
    page.value("document.getElementById('tests-json').value = '{'; document.getElementById('curl').click()")
    page.until(f"{SHARED}.startsWith('No command: ')")
    assert page.value("document.getElementById('taken').hidden") is True


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (1280, "light"),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in ((400, "light"), (1280, "dark"), (400, "dark"))),
    ],
)
def test_axe_finds_no_violation(browser: Chromium, grading_url: str, width: int, scheme: str) -> None:
    axe = axe_script()
    browser.events.clear()
    browser.open(grading_url)
    size: dict[str, Any] = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.ask("Emulation.setDeviceMetricsOverride", **size)
    browser.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.value("document.getElementById('run').click()")
    browser.until(f"{BADGE} !== null")
    browser.value("document.getElementById('curl').click()")
    browser.until(f"{TAKEN} !== ''")
    browser.value("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert violations_on(browser, axe) == []
    assert troubles(browser) == []
    browser.close_page()
