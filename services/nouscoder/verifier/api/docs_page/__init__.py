"""The page at `/docs`: Swagger UI on the OpenAPI document, with examples of requests and "Try it out".

INVARIANT: the page needs no network access except to its own service. Its Content-Security-Policy allows only the two
scripts of this folder, by their digests, and style sheets of and requests to its own origin; nothing inline.

swagger-ui-bundle.js and swagger-ui.css are the published files of swagger-ui-dist 5.35.0, unchanged (Apache-2.0,
swagger-ui.LICENSE; the licenses of what the bundle contains are in swagger-ui-bundle.js.LICENSE.txt).
"""

from __future__ import annotations

import base64
import functools
import hashlib
from html import escape
from importlib.resources import files

from nouscoder.verifier.api.page import Page, headers_of

_TYPES = {"swagger-ui.css": "text/css", "swagger-ui-bundle.js": "text/javascript", "start.js": "text/javascript"}


def docs_page(title: str) -> Page:
    """The page, whose parts are at the paths of `docs_parts`."""
    # Browsers take digests of scripts in files, but not of style sheets in files.
    scripts = " ".join(f"'{_digest(name)}'" for name, kind in _TYPES.items() if kind == "text/javascript")
    policy = (
        f"default-src 'none'; style-src 'self'; script-src {scripts}; connect-src 'self'; img-src data:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    styled, *run = (f'"{_path(name)}" integrity="{_digest(name)}"' for name in _TYPES)
    text = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)}</title><link rel="icon" href="data:,"><link rel="stylesheet" href={styled}>'
        "</head><body>"
        '<header><a href="/">Playground</a> <a href="/openapi.json">openapi.json</a></header><div id="calls"></div>'
        f"{''.join(f'<script src={one}></script>' for one in run)}</body></html>"
    )
    return Page(text, headers_of("no-cache", policy))


def docs_parts() -> dict[str, tuple[bytes, str, dict[str, str]]]:
    """Contents, media type and headers of each part, by its path; the path has a digest, so browsers may keep it."""
    headers = headers_of("public, max-age=31536000, immutable")
    return {_path(name): (_part(name), kind, headers) for name, kind in _TYPES.items()}


def _path(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    return f"/docs-{stem}-{hashlib.sha256(_part(name)).hexdigest()[:12]}.{suffix}"


@functools.cache
def _digest(name: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(_part(name)).digest()).decode()


@functools.cache
def _part(name: str) -> bytes:
    return files(__name__).joinpath(name).read_bytes()
