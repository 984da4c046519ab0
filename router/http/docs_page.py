"""/docs: the OpenAPI document as a page without scripts, which needs no network beyond the router.

It says nothing about this router, so it needs no API key.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from html import escape
from typing import Any

import msgspec
from fastapi import Response

DOCS_PATH = "/docs"
Fields = dict[str, Any]

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "table{border-collapse:collapse;margin:.5rem 0}td{border-top:1px solid #8886;padding:.15rem 1rem .15rem 0;"
    "vertical-align:top}summary{cursor:pointer;padding:.25rem 0}code{font-size:.9em}"
)
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def docs_page(document: bytes) -> Response:
    return Response("".join(_page(msgspec.json.decode(document))), media_type="text/html", headers=_HEADERS)


def _page(document: Fields) -> Iterator[str]:
    yield f"<!doctype html><html lang=en><meta charset=utf-8><title>pdserve API</title><style>{_STYLE}</style>"
    yield "<h1>pdserve API</h1><p>The same for programs: <a href=openapi.json>openapi.json</a>."
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            title = f"<code>{method.upper()} {escape(path)}</code> {escape(operation['summary'])}"
            yield f"<details><summary>{title}</summary>{''.join(_operation(operation))}</details>"
    yield "<h2>Schemas</h2>"
    for name, schema in sorted(document["components"]["schemas"].items()):
        yield f"<h3 id={escape(name)}>{escape(name)}</h3>{''.join(_schema(schema))}"


def _operation(operation: Fields) -> Iterator[str]:
    for parameter in operation.get("parameters", []):
        yield f"<p><code>{escape(parameter['name'])}</code> ({parameter['in']}): {_type(parameter['schema'])}"
    if "requestBody" in operation:
        yield f"<p>Body: {_content(operation['requestBody']['content'])}"
    yield "<table>"
    for status, response in sorted(operation["responses"].items()):
        content = _content(response["content"])
        yield f"<tr><td>{status}<td>{escape(response['description'])}<td>{content}"
    yield "</table>"


def _content(content: Fields) -> str:
    return "; ".join(f"{escape(kind)}: {_type(value['schema'])}" for kind, value in content.items())


def _schema(schema: Fields) -> Iterator[str]:
    yield f"<p>{_description(schema)}"
    if "properties" not in schema:
        yield _type(schema)
        return
    required = schema.get("required", [])
    yield "<table>"
    for name, field in schema["properties"].items():
        note = "required" if name in required else f"default {_json(field['default'])}" if "default" in field else ""
        yield f"<tr><td><code>{escape(name)}</code><td>{_type(field)}<td>{note}<td>{_description(field)}"
    yield "</table>"


def _description(schema: Fields) -> str:
    return escape(schema.get("description", ""))


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
    return f"<code>{escape(msgspec.json.encode(value).decode())}</code>"
