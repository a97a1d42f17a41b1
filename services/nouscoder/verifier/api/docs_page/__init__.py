"""The page at `/docs`: the OpenAPI document as HTML, made by the service, without scripts and without the network.

INVARIANT: every text of the document is escaped. The Content-Security-Policy allows only the page's own style sheet.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from nouscoder.verifier.api.page import Page, digest_source, headers_of

_LINES = "application/x-ndjson"
_PREFIX = "#/components/schemas/"
# The keywords of a schema that are shown as they are.
_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "over",
    "maximum": "at most",
    "minLength": "characters at least",
    "maxLength": "characters at most",
    "minItems": "items at least",
    "maxItems": "items at most",
    "pattern": "pattern",
    "format": "format",
    "default": "default",
}

Record = Mapping[str, Any]


def docs_page(document: Record) -> Page:
    """The page of an OpenAPI document."""
    style = files(__name__).joinpath("docs.css").read_text(encoding="utf8")
    policy = (
        f"default-src 'none'; style-src '{digest_source(style)}'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return Page("".join(_page(document, style)), headers_of("no-cache", policy))


def _page(document: Record, style: str) -> Iterator[str]:
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}")
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f'<meta name="color-scheme" content="light dark"><title>{title}</title><link rel="icon" href="data:,">'
    yield f"<style>{style}</style></head><body><header><h1>{title}</h1><p>{escape(info.get('description', ''))}</p>"
    yield '<p><a href="/">Playground</a> <a href="/openapi.json">openapi.json</a></p></header>'
    yield from _navigation(document)
    yield "<main>"
    yield from _security(document)
    yield "<h2>Calls</h2>"
    for path, item in document["paths"].items():
        for method, operation in item.items():
            yield from _operation(method, path, operation)
    yield "<h2>Records</h2>"
    for name, schema in sorted(document["components"]["schemas"].items()):
        yield f'<section id="{escape(name)}"><h3>{escape(name)}</h3>{_text(schema)}{_schema_body(schema)}</section>'
    yield "</main></body></html>"


def _navigation(document: Record) -> Iterator[str]:
    yield '<nav aria-label="Calls"><ul>'
    for path, item in document["paths"].items():
        for method in item:
            yield f'<li><a href="#{_anchor(method, path)}">{_call(method, path)}</a></li>'
    yield "</ul></nav>"


def _security(document: Record) -> Iterator[str]:
    schemes = document["components"].get("securitySchemes")
    yield "<h2>Tokens</h2>"
    if not schemes:
        yield "<p>No tokens are configured: every request of this site is admitted.</p>"
        return
    yield "<dl>"
    for name, scheme in schemes.items():
        yield f"<dt>{escape(name)}</dt><dd>Authorization: {escape(scheme['scheme'].capitalize())}, "
        yield f"{escape(scheme['description'])}</dd>"
    yield "</dl>"


def _operation(method: str, path: str, operation: Record) -> Iterator[str]:
    yield f'<section id="{_anchor(method, path)}"><h3>{_call(method, path)}</h3>{_text(operation)}'
    if "security" in operation:
        yield "<p class=note>Needs a token.</p>"
    rows = [_parameter(each) for each in operation.get("parameters", ())]
    yield from _table("Parameters", ("name", "in", "type", "meaning"), rows)
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"<h4>Body: {escape(kind)}</h4><p>{_type(content['schema'])}</p>"
        for name, example in content.get("examples", {}).items():
            yield f'<details><summary>Example: {escape(name)}</summary><pre tabindex="0">'
            yield f"{escape(_example(kind, example['value']))}</pre></details>"
    answers = [
        (escape(status), escape(answer.get("description", "")), " ".join(_contents(answer)))
        for status, answer in operation["responses"].items()
    ]
    yield from _table("Answers", ("status", "when", "body"), answers)
    yield "</section>"


def _parameter(each: Record) -> tuple[str, ...]:
    name = escape(each["name"]) + (" (required)" if each.get("required") else "")
    meaning = each.get("description") or each["schema"].get("description", "")
    return name, escape(each["in"]), _type(each["schema"]), escape(meaning)


def _contents(answer: Record) -> Iterator[str]:
    for kind, content in answer.get("content", {}).items():
        shown = _type(content["schema"]) if content.get("schema") else ""
        yield f"{escape(kind)}: {shown}" if shown else escape(kind)


def _example(kind: str, value: Any) -> str:
    if kind == _LINES:
        return "\n".join(json.dumps(line) for line in value)
    return json.dumps(value, indent=2)


def _schema_body(schema: Record) -> str:
    """A record as a table of its fields; another schema as its type."""
    if "properties" not in schema:
        return f"<p>{_type(schema)}</p>"
    required = schema.get("required", ())
    rows = [
        (escape(name), "yes" if name in required else "", _type(field), escape(_meaning(field)))
        for name, field in schema["properties"].items()
    ]
    return "".join(_table("", ("field", "required", "type", "meaning"), rows))


def _meaning(field: Record) -> str:
    """The description of a field, perhaps of its part that is not null."""
    parts = (field, *field.get("anyOf", ()))
    return next((str(part["description"]) for part in parts if part.get("description")), "")


def _type(schema: Record) -> str:
    """The type of a schema in one line of HTML."""
    if "$ref" in schema:
        name = escape(schema["$ref"].removeprefix(_PREFIX))
        return f'<a href="#{name}">{name}</a>'
    for key in ("anyOf", "oneOf"):
        if key in schema and all("required" not in part for part in schema[key]):
            return " or ".join(_type(part) for part in schema[key])
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(f"<code>{escape(json.dumps(value))}</code>" for value in values) + _bounds(schema)
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}{_bounds(schema)}"
    values = schema.get("additionalProperties")
    if schema.get("type") == "object" and isinstance(values, dict):
        return f"object of {_type(values)}{_bounds(schema)}"
    return escape(str(schema.get("type", "any JSON value"))) + _bounds(schema)


def _bounds(schema: Record) -> str:
    found = [f"{word} {json.dumps(schema[key])}" for key, word in _BOUNDS.items() if key in schema]
    return f" <span>({escape('; '.join(found))})</span>" if found else ""


def _table(title: str, heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """The cells are HTML already."""
    if not rows:
        return
    if title:
        yield f"<h4>{title}</h4>"
    label = f' aria-label="{title}"' if title else ' aria-label="Fields"'
    yield f'<div class="wide" tabindex="0" role="group"{label}><table><thead><tr>'
    yield "".join(f"<th scope=col>{head}</th>" for head in heads)
    yield "</tr></thead><tbody>"
    for first, *others in rows:
        yield f"<tr><th scope=row>{first}</th>{''.join(f'<td>{cell}</td>' for cell in others)}</tr>"
    yield "</tbody></table></div>"


def _text(record: Record) -> str:
    return f"<p>{escape(record['description'])}</p>" if record.get("description") else ""


def _call(method: str, path: str) -> str:
    return f"<b>{escape(method.upper())}</b> {escape(path)}"


def _anchor(method: str, path: str) -> str:
    return escape(f"{method}{path}".replace("/", "-").replace("{", "").replace("}", ""))
