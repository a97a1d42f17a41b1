"""The documentation site: `python -m deploy.site stage` writes what Zensical reads, `check` tests what it has built.

`make docs` runs both, from the root of the repository, around `zensical build --strict`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from deploy.site.built import faults, weights
from deploy.site.pages import BrokenLink, page, read_pages
from deploy.site.rest_api import grading_document, rest_page

PICTURES = (".svg", ".webp")
ROOT = Path(__file__).parents[2]
STAGED, BUILT = ROOT / ".site" / "pages", ROOT / ".site" / "html"


def stage() -> int:
    """Write every page, the pictures beside them, and the OpenAPI document. Returns the exit code."""
    shutil.rmtree(STAGED, ignore_errors=True)
    pages = read_pages(ROOT)
    for picture in (one for one in (ROOT / "docs").rglob("*") if one.suffix in PICTURES):
        place = STAGED / picture.relative_to(ROOT / "docs")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(picture, place)
    shutil.copyfile(Path(__file__).parent / "site.css", STAGED / "site.css")
    try:
        made = {place: page(pages, name) for name, place in pages.places.items()}
    except BrokenLink as error:
        sys.stderr.write(f"docs: {error}\n")
        return 1
    document = grading_document()
    made["reference/http-api.md"] = rest_page(document)
    made["reference/openapi.json"] = json.dumps(document, indent=1) + "\n"
    for name, text in made.items():
        (STAGED / name).parent.mkdir(parents=True, exist_ok=True)
        (STAGED / name).write_text(text, encoding="utf8")
    return 0


def check() -> int:
    """Print the weight of each page, and every fault of the built site. Returns the exit code."""
    for name, own, shared in weights(BUILT):
        sys.stdout.write(f"{own / 1000:8.1f} kB and {shared / 1000:.1f} kB of shared files  {name}\n")
    found = list(faults(BUILT))
    for fault in found:
        sys.stderr.write(f"docs: {fault}\n")
    sys.stdout.write(f"{len(found)} faults\n")
    return 1 if found else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m deploy.site", description=__doc__)
    parser.add_argument("step", choices=("stage", "check"))
    sys.exit(stage() if parser.parse_args().step == "stage" else check())
