"""docs/dashboards has a picture of every dashboard of today, with its panels' data, drawn from a recorded run."""

from __future__ import annotations

import json
import lzma
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2]))
from deploy.dashboards.live import FOLDER, CannotCheck, Span
from deploy.pictures.boards import Board, Panel, read_board
from deploy.pictures.drawing import COMMAND, HERE, PICTURES, draw_recording, stale
from deploy.pictures.page import Source, picture
from deploy.pictures.recording import ABOUT, SAMPLES, read_about, record, replay
from deploy.pictures.series import Series
from deploy.pictures.units import scale_of

ROOT = Path(__file__).parents[2]
FILES = sorted(FOLDER.glob("*.json"))
SVG = "{http://www.w3.org/2000/svg}"
MARKS = ("path", "rect", "circle")
# Generation reads the policy's folder when all services run on one machine, so it fetches nothing from the learner.
NO_DATA = ["generation: Fetch"]
SPAN = Span(0, 10, 1)


def drawn_panels(text: str) -> dict[int, ElementTree.Element]:
    """The groups of the panels in a picture, by the panel's number."""
    groups = ElementTree.fromstring(text).iter(f"{SVG}g")
    return {int(group.attrib["data-panel"]): group for group in groups}


def texts(element: ElementTree.Element) -> list[str]:
    return [one.text or "" for one in element.iter(f"{SVG}text")]


def marks_of_series(group: ElementTree.Element) -> list[ElementTree.Element]:
    """Curves, areas and cells; not the frame, the grid and the legend."""
    classes = {"line", "spark", "area"}
    return [
        one
        for mark in MARKS
        for one in group.iter(f"{SVG}{mark}")
        if classes & set(one.get("class", "").split()) or (one.get("opacity") and one.get("class") == "f0")
    ]


def panels_of(board: Board) -> list[Panel]:
    return [panel for panel in board.panels if panel.kind != "row"]


def test_every_dashboard_has_a_picture_of_its_file_of_today() -> None:
    assert len(FILES) == 5
    assert stale(PICTURES, HERE, FOLDER) == [], f"run {COMMAND}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_panel_has_data_in_its_picture_or_says_that_it_has_none(file: Path) -> None:
    board = read_board(file)
    groups = drawn_panels((PICTURES / f"{file.stem}.svg").read_text("utf8"))
    assert set(groups) == {panel.number for panel in panels_of(board)}
    for panel in panels_of(board):
        group = groups[panel.number]
        assert panel.title in texts(group)
        if f"{file.stem}: {panel.title}" in NO_DATA:
            assert texts(group) == [panel.title, "no data"]
            continue
        assert "no data" not in texts(group), panel.title
        assert int(group.attrib["data-series"]) >= 1, panel.title
        assert marks_of_series(group), panel.title


def test_the_documents_show_every_picture() -> None:
    text = (ROOT / "docs" / "operating.md").read_text("utf8")
    assert [file.stem for file in FILES if f"dashboards/{file.stem}.svg" not in text] == []


def test_a_changed_dashboard_or_recording_has_no_picture_of_today(tmp_path: Path) -> None:
    dashboards, recording = tmp_path / "dashboards", tmp_path / "recording"
    shutil.copytree(FOLDER, dashboards)
    recording.mkdir()
    for name in (ABOUT, SAMPLES):
        shutil.copy(HERE / name, recording)
    tree = json.loads((dashboards / "cost.json").read_text("utf8"))
    tree["panels"][1]["targets"][0]["expr"] += " + 1"
    (dashboards / "cost.json").write_text(json.dumps(tree), "utf8")
    (dashboards / "new.json").write_text((dashboards / "run.json").read_text("utf8"), "utf8")
    assert stale(PICTURES, recording, dashboards) == ["cost", "new"]
    (recording / ABOUT).write_text((recording / ABOUT).read_text("utf8") + " ", "utf8")
    assert stale(PICTURES, recording, FOLDER) == [file.stem for file in FILES]


@pytest.fixture(scope="module")
def prometheus() -> Iterator[str]:
    """The URL of a Prometheus that holds the recording."""
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        pytest.skip("prometheus is missing: apt-get install prometheus")
    with replay(HERE) as url:
        yield url


def test_prometheus_gives_back_the_samples_of_the_recording(prometheus: str, tmp_path: Path) -> None:
    about = read_about(HERE)
    # The samples at the very start are inside, too.
    assert record(prometheus, replace(about, start_s=about.start_s - 1), tmp_path) > 10_000
    assert lzma.decompress((tmp_path / SAMPLES).read_bytes()) == lzma.decompress((HERE / SAMPLES).read_bytes())
    assert read_about(tmp_path) == about


def test_prometheus_draws_the_pictures_of_the_documents_again(prometheus: str, tmp_path: Path) -> None:
    del prometheus  # it skips this test where there is none
    assert draw_recording(HERE, tmp_path) == NO_DATA
    version = subprocess.run(["prometheus", "--version"], capture_output=True, text=True, timeout=60, check=True)
    for file in FILES:
        drawn, kept = ((folder / f"{file.stem}.svg").read_text("utf8") for folder in (tmp_path, PICTURES))
        if " version 2." in version.stdout + version.stderr:
            assert drawn == kept, f"run {COMMAND}"
        # Version 3 does not count a sample at the very start of a range, so that values differ a little.
        assert {number: texts(group)[0] for number, group in drawn_panels(drawn).items()} == {
            number: texts(group)[0] for number, group in drawn_panels(kept).items()
        }


def test_a_release_that_was_not_recorded_has_no_sample(prometheus: str, tmp_path: Path) -> None:
    with pytest.raises(CannotCheck, match="has no sample of the release other in the namespace compose"):
        record(prometheus, replace(read_about(HERE), release="other"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_live_release_is_drawn_and_its_panels_without_data_are_named(prometheus: str, tmp_path: Path) -> None:
    """The recording is long ago, so a Prometheus that holds it has nothing of the last minute."""
    done = pictures("live", "--prometheus", prometheus, "--over-s", "60", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "no data: verifier: Queue depth" in done.stdout
    assert {file.stem for file in tmp_path.iterdir()} == {file.stem for file in FILES}
    group = next(iter(drawn_panels((tmp_path / "verifier.svg").read_text("utf8")).values()))
    assert texts(group) == ["Submissions per second", "no data"]


def pictures(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deploy.pictures", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("live", "--prometheus", "http://127.0.0.1:9"), "no Prometheus at http://127.0.0.1:9: "),
        (("live", "--prometheus", "nowhere"), "no Prometheus at nowhere: "),
        (("live", "--prometheus", "http://127.0.0.1:9", "--over-s", "nan"), "a picture must show more than 0 s"),
        (("record", "--minutes", "-1"), "a recording takes more than 0 and at most 60 minutes"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_writes_nothing(
    tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    done = pictures(*words, *(("--out", str(tmp_path / "out")) if words[0] == "live" else ()))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"deploy.pictures: {sentence}")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_one_sentence(prometheus: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here", "utf8")
    done = pictures("live", "--prometheus", prometheus, "--out", str(tmp_path / "file"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("deploy.pictures: the pictures cannot be written: ")


@pytest.mark.parametrize("content", [b"", b"no xz", lzma.compress(b"no sample\n")])
def test_a_broken_recording_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    shutil.copy(HERE / ABOUT, tmp_path)
    (tmp_path / SAMPLES).write_bytes(content)
    with pytest.raises(CannotCheck, match=r"recording|missing"):
        draw_recording(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def one_panel(kind: str, *, stacked: bool = False) -> Board:
    board = read_board(FOLDER / "run.json")
    panel = next(panel for panel in board.panels if panel.kind == kind and panel.stacked == stacked)
    return replace(board, panels=(panel,))


def drawn(board: Board, *found: Series) -> ElementTree.Element:
    (panel,) = board.panels
    text = picture(board, {panel.number: found}, SPAN, Source("A test.", {}, ""))
    return drawn_panels(text)[panel.number]


finite = st.floats(allow_nan=False, allow_infinity=False, width=32)


@given(st.lists(st.lists(st.none() | finite, min_size=11, max_size=11), min_size=1, max_size=12), st.booleans())
def test_curves_of_any_finite_values_stay_in_the_picture(rows: list[list[float | None]], stacked: bool) -> None:
    found = [Series(f"<{index}>", {}, tuple(row)) for index, row in enumerate(rows) if any(v is not None for v in row)]
    group = drawn(one_panel("timeseries", stacked=stacked), *found)
    assert ("no data" in texts(group)) == (not found)
    for mark in group.iter(f"{SVG}path"):
        numbers = mark.attrib["d"].replace("M", " ").replace("L", " ").replace("h", " ").replace("z", " ").split()
        assert all(0 <= float(number) <= 1300 for number in numbers)


def test_a_gap_is_not_drawn_and_a_lone_value_is_a_dot() -> None:
    values = (1.0, 2.0, None, 4.0, None, 5.0, 6.0, None, None, None, None)
    group = drawn(one_panel("timeseries"), Series("one", {}, values))
    (line,) = [mark for mark in group.iter(f"{SVG}path") if "line" in mark.get("class", "").split()]
    assert line.attrib["d"].count("M") == 2
    assert len(list(group.iter(f"{SVG}circle"))) == 1


def test_a_legend_with_too_many_series_says_how_many_it_leaves_out() -> None:
    found = [Series(f"series {index}", {}, (float(index),) * 11) for index in range(9)]
    shown = texts(drawn(one_panel("timeseries"), *found))
    assert "series 8" in shown
    assert "series 1" not in shown
    assert "and 5 more, at most 4 %" not in shown
    assert any(text.startswith("and 5 more, at most") for text in shown)


def test_a_heat_map_shows_the_differences_of_the_buckets() -> None:
    bounds = (("+Inf", 5.0), ("1.0", 5.0), ("0.5", 4.0))
    group = drawn(one_panel("heatmap"), *(Series("", {"le": le}, (value,) * 11) for le, value in bounds))
    cells = [mark for mark in group.iter(f"{SVG}rect") if mark.get("opacity")]
    assert sorted(float(cell.attrib["opacity"]) for cell in cells) == [0.25, 1.0]  # 1 of 4, 4 of 4; none in +Inf


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        ("none", 5120, "5\u2009120"),
        ("none", 0.123456, "0.123"),
        ("percentunit", 0.4567, "45.7 %"),
        ("currencyUSD", 3.1, "$3.1"),
        ("s", 0.00042, "420 µs"),
        ("s", 0.042, "42 ms"),
        ("s", 7.25, "7.25 s"),
        ("s", 600, "10 min"),
        ("s", 9000, "2.5 h"),
        ("bytes", 3 * 1024**2, "3 MiB"),
        ("s", 0, "0"),
    ],
)
def test_values_are_written_in_their_unit(unit: str, value: float, text: str) -> None:
    assert scale_of(unit, value).text(value) == text


@given(st.sampled_from(["none", "percentunit", "s", "bytes"]), st.floats(1e-6, 1e15))
def test_the_written_value_is_within_half_a_percent(unit: str, value: float) -> None:
    scale = scale_of(unit, value)
    number = scale.text(value).removesuffix(scale.suffix).replace("\u2009", "")
    assert math.isclose(float(number) * scale.divisor, value, rel_tol=0.0051)


def test_an_unknown_unit_is_refused_by_name() -> None:
    with pytest.raises(CannotCheck, match="does not know the unit 'furlong'"):
        scale_of("furlong", 1)
