"""The pictures of docs/ have their colours in librsvg, with which forges, file managers and office programs draw."""

from __future__ import annotations

import ctypes
import ctypes.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PICTURES = sorted(DOCS.rglob("*.svg"))


class Rectangle(ctypes.Structure):
    """RsvgRectangle."""

    _fields_ = [(name, ctypes.c_double) for name in ("x", "y", "width", "height")]


def drawn(picture: Path, width: int, height: int) -> bytes:
    """The pixels that librsvg draws, four bytes each: blue, green, red, alpha."""
    names = [ctypes.util.find_library(name) for name in ("rsvg-2", "cairo")]
    if None in names:
        pytest.skip("librsvg is not installed here: apt-get install librsvg2-2")
    svg, cairo = (ctypes.CDLL(name) for name in names)
    for function in (svg.rsvg_handle_new_from_file, cairo.cairo_image_surface_create, cairo.cairo_create):
        function.restype = ctypes.c_void_p
    cairo.cairo_image_surface_get_data.restype = ctypes.c_void_p
    surface = ctypes.c_void_p(cairo.cairo_image_surface_create(0, width, height))
    page, place = ctypes.c_void_p(cairo.cairo_create(surface)), Rectangle(0, 0, width, height)
    handle = ctypes.c_void_p(svg.rsvg_handle_new_from_file(str(picture).encode(), None))
    assert svg.rsvg_handle_render_document(handle, page, ctypes.byref(place), None)
    cairo.cairo_surface_flush(surface)
    return ctypes.string_at(cairo.cairo_image_surface_get_data(surface), 4 * width * height)


def test_pictures_of_pages_are_small_and_the_first_pages_show_report_and_live_page() -> None:
    """`make pictures` takes them."""
    heavy = {file.name: file.stat().st_size for file in DOCS.rglob("*.webp") if file.stat().st_size >= 150_000}
    assert heavy == {}
    for name in ("report.webp", "console/1280-light.webp"):
        assert f"](docs/{name})" in (DOCS.parent / "README.md").read_text(encoding="utf8")
        assert f"]({name})" in (DOCS / "index.md").read_text(encoding="utf8")
    takes = (DOCS.parent / "deploy" / "site" / "pictures.py").read_text(encoding="utf8")
    assert [file.name for file in DOCS.rglob("*.webp") if f'{file.stem}": (' not in takes] == []


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_a_picture_has_no_variables_which_librsvg_draws_black(picture: Path) -> None:
    text = picture.read_text(encoding="utf8")
    assert "var(" not in text
    assert "color-mix(" not in text


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_librsvg_draws_a_picture_in_colours_on_a_light_page(picture: Path) -> None:
    """Before, every pixel of objectives.svg was black."""
    width, height = 360, 360
    pixels = drawn(picture, width, height)
    seen = {pixels[at : at + 3] for at in range(0, len(pixels), 4) if pixels[at + 3] == 255}
    assert len(seen) > 20
    assert any(max(one) - min(one) > 60 for one in seen), "a colour"
    assert any(min(one) > 240 for one in seen), "a light page"
