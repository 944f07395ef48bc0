"""What OpenAPI says of ``POST /predict``, and the page at ``/docs``.

The page is plain HTML made from the OpenAPI document: no script, nothing from elsewhere, so that it works
with no internet and under a strict content security policy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from sam3_ray.serve.bodies import MAX_PHRASE_CHARACTERS
from sam3_ray.serve.errors import MEDIA_TYPE, ProblemType
from sam3_ray.serve.schemas import Options, PredictBody, ProblemBody
from sam3_ray.serve.uploads import Limits

_REF = "#/components/schemas/{model}"


def predict_openapi(limits: Limits) -> dict[str, Any]:
    """Description, body and query of ``POST /predict``: FastAPI sees none of them in its signature."""
    digest_alone = {"image_digest": "0123456789abcdef0123456789abcdef", "prompts": ["blue square"]}
    return {
        "description": (
            "Send the image in one of four ways; the answer is the same.\n\n"
            "1. `application/json`, the image file as base64.\n"
            "2. `multipart/form-data`, the image as a file; options are fields, `prompts` repeated.\n"
            "3. The image file itself as `image/*`; options are query parameters, `prompts` repeated.\n"
            "4. Not at all: only `image_digest`, from an earlier answer, in any of these ways. 404 "
            "`image-not-cached` says that it has to be sent again.\n\n"
            "Without prompts the image cache is filled, and nothing is looked for. At most "
            f"{limits.max_prompts} prompts of {MAX_PHRASE_CHARACTERS} characters, and an image file of "
            f"{limits.max_upload_bytes:,} bytes. An unknown field or query parameter is an error."
        ),
        "requestBody": {
            "content": {
                "application/json": {
                    "schema": {"$ref": _REF.format(model="PredictBody")},
                    "examples": {
                        "image": {"value": {"image": "<base64>", "prompts": ["red circle"]}},
                        "digest": {"value": digest_alone},
                    },
                },
                "multipart/form-data": {"schema": _multipart_schema()},
                "image/*": {"schema": {"type": "string", "format": "binary"}},
            }
        },
        "parameters": [
            {
                "name": name,
                "in": "query",
                "required": False,
                "schema": schema,
                "description": f"With an `image/*` body, or none. {schema.get('description', '')}".strip(),
            }
            for name, schema in _option_schemas().items()
        ],
    }


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The ``responses`` of a route for its problems, each with the types it can have."""
    return {
        status: {
            "description": "; ".join(
                f"`{k.slug}`: {k.title}" for k in ProblemType if k.status == status
            ),
            "content": {MEDIA_TYPE: {"schema": {"$ref": _REF.format(model="ProblemBody")}}},
        }
        for status in statuses
    }


def with_body_schemas(app: FastAPI) -> None:
    """Make ``app.openapi()`` include the schemas that only ``openapi_extra`` refers to."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            _, extra = models_json_schema(
                [(PredictBody, "validation"), (ProblemBody, "serialization")], ref_template=_REF
            )
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(extra.get("$defs", {}))
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _option_schemas() -> dict[str, dict[str, Any]]:
    """The options as a form or a query has them: an object prompt is its JSON."""
    properties: dict[str, dict[str, Any]] = Options.model_json_schema(ref_template=_REF)[
        "properties"
    ]
    text = "A noun phrase, or the JSON of an object with text and threshold; repeat for several."
    properties["prompts"] = {"type": "array", "items": {"type": "string"}, "description": text}
    return properties


def _multipart_schema() -> dict[str, Any]:
    image = {"type": "string", "format": "binary", "description": "The image file."}
    return {
        "type": "object",
        "properties": {"image": image} | _option_schemas(),
        "additionalProperties": False,
    }


# -- the page --------------------------------------------------------------------------------------

CSS = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h2 { margin-top: 2.5rem; border-top: 1px solid #8886; padding-top: 1rem; }
code, pre { font: 0.9em/1.4 ui-monospace, monospace; }
pre { background: #8882; padding: 0.75rem; overflow-x: auto; border-radius: 6px; }
.table { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 0.3rem 0.8rem 0.3rem 0; }
tr { border-bottom: 1px solid #8884; }
p { white-space: pre-line; }
"""


def docs_page(document: Mapping[str, Any]) -> str:
    """An OpenAPI document as a page to read."""
    info = document["info"]
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<title>{escape(info["title"])} API</title><link rel="stylesheet" href="docs.css"></head>',
        f"<body><main><h1>{escape(info['title'])} {escape(info['version'])}</h1>",
        f"<p>{_prose(info.get('description', ''))}</p>",
        '<p><a href="openapi.json">openapi.json</a> for your tools; <a href="./">the page to try it</a>.</p>',
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts += _operation(path, method, operation)
    parts.append("<h2>Schemas</h2>")
    for name, schema in document.get("components", {}).get("schemas", {}).items():
        parts.append(f'<h3 id="{escape(name)}">{escape(name)}</h3>{_properties(schema)}')
    parts.append("</main></body></html>")
    return "".join(parts)


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> list[str]:
    parts = [
        f"<h2><code>{method.upper()} {escape(path)}</code></h2>",
        f"<p><b>{escape(operation.get('summary', ''))}</b></p>",
        f"<p>{_prose(operation.get('description', ''))}</p>",
    ]
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        parts.append(
            f"<h3>Body: <code>{escape(media_type)}</code></h3>{_schema(content['schema'])}"
        )
        for name, example in content.get("examples", {}).items():
            shown = json.dumps(example["value"], indent=2)
            parts.append(f"<p>Example, {escape(name)}:</p><pre>{escape(shown)}</pre>")
    if parameters := operation.get("parameters"):
        rows = [(p["name"], _type(p["schema"]), p.get("description", "")) for p in parameters]
        parts.append(f"<h3>Query</h3>{_table(('name', 'type', ''), rows)}")
    rows = []
    for status, response in operation.get("responses", {}).items():
        bodies = " ".join(
            f"{escape(media_type)} {_type(content.get('schema', {}))}"
            for media_type, content in response.get("content", {}).items()
        )
        rows.append((status, bodies, response.get("description", "")))
    parts.append(f"<h3>Answers</h3>{_table(('status', 'body', ''), rows)}")
    return parts


def _schema(schema: Mapping[str, Any]) -> str:
    return _properties(schema) if "properties" in schema else f"<p>{_type(schema)}</p>"


def _properties(schema: Mapping[str, Any]) -> str:
    rows = []
    for name, value in schema.get("properties", {}).items():
        note = value.get("description", "")
        bounds = [f"{k} {value[k]}" for k in ("default", "minimum", "maximum") if k in value]
        rows.append((name, _type(value), "; ".join(filter(None, [note.rstrip("."), *bounds]))))
    return f"<p>{_prose(schema.get('description', ''))}</p>{_table(('field', 'type', ''), rows)}"


def _type(schema: Mapping[str, Any]) -> str:
    if reference := schema.get("$ref"):
        name = escape(str(reference).rsplit("/", 1)[-1])
        return f'<a href="#{name}">{name}</a>'
    if options := schema.get("anyOf"):
        return " | ".join(_type(option) for option in options)
    if values := schema.get("enum"):
        return " | ".join(f"<code>{escape(str(value))}</code>" for value in values)
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}" if "items" in schema else "list"
    return escape(str(schema.get("format") or schema.get("type", "any")))


def _table(head: tuple[str, ...], rows: list[tuple[str, str, str]]) -> str:
    """Cells: a name, ready HTML, prose."""
    body = "".join(
        f"<tr><td><code>{escape(str(name))}</code></td><td>{html}</td><td>{_prose(note)}</td></tr>"
        for name, html, note in rows
    )
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    return f'<div class="table"><table><tr>{top}</tr>{body}</table></div>'


def _prose(text: str) -> str:
    """Escaped text; what is between backquotes is code."""
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if i % 2 else piece for i, piece in enumerate(pieces))
