"""/docs: the OpenAPI document as a page without scripts, which needs no network beyond the router.

Swagger UI, Scalar, RapiDoc and OpenAPI Explorer need scripts, inline styles or markup from strings, which the pages'
Content-Security-Policy forbids. The page says nothing about this router, so it needs no API key.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from typing import Any

import msgspec
from fastapi import Response

DOCS_PATH = "/docs"
Fields = dict[str, Any]

_COLORS = files("router.dashboard").joinpath("page/colors.css").read_text(encoding="utf-8")
_STYLE = _COLORS + files("router.http").joinpath("docs_page.css").read_text(encoding="utf-8")
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def docs_page(document: bytes) -> Response:
    return Response("".join(_page(msgspec.json.decode(document))), media_type="text/html", headers=_HEADERS)


def _page(document: Fields) -> Iterator[str]:
    yield "<!doctype html><html lang=en><meta charset=utf-8><title>API · pdserve</title>"
    yield f'<meta name=viewport content="width=device-width, initial-scale=1"><style>{_STYLE}</style>'
    yield "<header><h1>pdserve API</h1><p>The same for programs: <a href=openapi.json>openapi.json</a>."
    yield " A router with API keys also wants <code>-H 'Authorization: Bearer KEY'</code>.</header>"
    yield "<main><h2>Operations</h2>"
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            title = f"<b class={method}>{method.upper()}</b> <code>{escape(path)}</code> {escape(operation['summary'])}"
            yield f"<details><summary>{title}</summary>{''.join(_operation(method, path, operation))}</details>"
    yield "<section><h2>Schemas</h2>"
    for name, schema in sorted(document["components"]["schemas"].items()):
        yield f"<div><h3 id={escape(name)}>{escape(name)}</h3>{''.join(_schema(schema))}</div>"
    yield "</section></main>"


def _operation(method: str, path: str, operation: Fields) -> Iterator[str]:
    body = operation.get("requestBody", {}).get("content", {})
    yield f"<h3>Example</h3><pre><code>{escape(_curl(method, path, body))}</code></pre>"
    if operation["parameters"]:
        rows = [
            (_code(parameter["name"]), parameter["in"], _type(parameter["schema"]))
            for parameter in operation["parameters"]
        ]
        yield f"<h3>Parameters</h3>{_table(('Name', 'In', 'Type'), rows)}"
    if body:
        yield f"<h3>Body</h3><p>{_content(body)}"
    answers = sorted(operation["responses"].items())
    rows = [(status, _text(answer["description"]), _content(answer["content"])) for status, answer in answers]
    yield f"<h3>Responses</h3>{_table(('Status', 'Meaning', 'Content'), rows)}"


def _curl(method: str, path: str, body: Fields) -> str:
    """Return a command for a shell that sends the example of a body."""
    is_default = method == "get" or body
    command = f"curl{'' if is_default else f' -X {method.upper()}'} http://127.0.0.1:8000{path.replace('{id}', 'ID')}"
    for kind, content in body.items():
        text = msgspec.json.encode(content["example"]).decode().replace("'", "'\\''")
        command += f" -H 'Content-Type: {kind}' \\\n  -d '{text}'"
    return command


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th scope=col>{title}</th>" for title in titles)
    table = ""
    for row in rows:
        cells = zip(titles, row, strict=True)
        table += f"<tr>{''.join(f'<td data-title={title}>{cell}</td>' for title, cell in cells)}</tr>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{table}</tbody></table>"


def _content(content: Fields) -> str:
    return "; ".join(f"{escape(kind)}: {_type(value['schema'])}" for kind, value in content.items())


def _schema(schema: Fields) -> Iterator[str]:
    yield f"<p>{_description(schema)}"
    if "properties" not in schema:
        yield _type(schema)
        return
    required = schema.get("required", [])
    rows = []
    for name, field in schema["properties"].items():
        default = "required" if name in required else _json(field["default"]) if "default" in field else ""
        rows.append((_code(name), _type(field), default, _description(field)))
    yield _table(("Field", "Type", "Default", "Meaning"), rows)


def _description(schema: Fields) -> str:
    return _text(schema.get("description", ""))


def _text(markup: str) -> str:
    """Return the HTML of a text with code in one or two backticks."""
    return re.sub(r"(`{1,2})([^`]+)\1", r"<code>\2</code>", escape(markup))


def _type(schema: Fields) -> str:
    match schema:
        case {"$ref": ref}:
            name = escape(ref.rpartition("/")[2])
            return f"<a href=#{name}>{name}</a>"
        case {"anyOf": kinds}:
            return " | ".join(map(_type, kinds))
        case {"enum": values}:
            return " | ".join(map(_json, values))
        case {"type": "array", "items": dict() as items}:
            return f"list of {_type(items)}"
        case {"type": "object", "additionalProperties": dict() as values}:
            return f"object of {_type(values)}"
    return escape(str(schema.get("type", "any")))


def _json(value: Any) -> str:
    return _code(msgspec.json.encode(value).decode())


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"
