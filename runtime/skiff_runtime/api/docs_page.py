"""The API's description as one page of HTML, made from the OpenAPI document: no script, nothing fetched from elsewhere."""

from html import escape
from typing import Any, Final

_STYLE: Final = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
code, pre { font: 14px/1.4 ui-monospace, monospace; background: #f4f4f4; padding: .1em .3em; border-radius: 3px; }
pre { padding: .8em; overflow-x: auto; }
details { border: 1px solid #ddd; border-radius: 4px; margin: .5rem 0; padding: .5rem .8rem; }
summary { cursor: pointer; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0; }
td, th { text-align: left; vertical-align: top; border-bottom: 1px solid #eee; padding: .2rem .6rem .2rem 0; }
.method { display: inline-block; width: 4rem; font-weight: bold; }
"""
_MAX_SHOWN: Final = 80


def docs_page(document: dict[str, Any]) -> bytes:
    """The page of an OpenAPI document."""
    info, schemas = document["info"], document["components"]["schemas"]
    operations = [
        _operation(method, path, operation, schemas)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    title = escape(f"{info['title']} {info['version']}")
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head>
<body><h1>{title}</h1><p>{escape(info["description"])}</p>
<p>The whole description, for programs: <a href="openapi.json">openapi.json</a></p>
{"".join(operations)}
</body></html>
"""
    return page.encode()


def _operation(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    parts = [f"<p>{escape(operation['description'])}</p>"] if "description" in operation else []
    if "security" in operation:
        parts.append("<p>Needs an API key: <code>Authorization: Bearer KEY</code></p>")
    if "requestBody" in operation:
        parts.append(_body(operation["requestBody"], schemas))
    parts.append(_table("Headers and path", [_parameter(each) for each in operation["parameters"]]))
    parts.append(_table("Responses", [_response(*each) for each in operation["responses"].items()]))
    head = f'<span class="method">{method.upper()}</span><code>{escape(path)}</code> {escape(operation["summary"])}'
    return f"<details><summary>{head}</summary>{''.join(parts)}</details>\n"


def _body(body: dict[str, Any], schemas: dict[str, Any]) -> str:
    schema = schemas[_name(body["content"]["application/json"]["schema"])]
    required = schema.get("required", [])
    rows = [
        (f"<code>{escape(name)}</code>", _kind(field), "required" if name in required else "")
        for name, field in schema["properties"].items()
    ]
    about = f"<p>{escape(schema.get('description', ''))}</p>"
    return about + _table("Body", rows)


def _parameter(parameter: dict[str, Any]) -> tuple[str, str, str]:
    about = escape(parameter.get("description", ""))
    return f"<code>{escape(parameter['name'])}</code>", _kind(parameter["schema"]), about


def _response(status: str, response: dict[str, Any]) -> tuple[str, str, str]:
    kinds = [
        f"<code>{escape(kind)}</code> {_kind(content['schema'])}"
        for kind, content in response["content"].items()
    ]
    return escape(status), escape(response["description"]), "<br>".join(kinds)


def _table(title: str, rows: list[tuple[str, str, str]]) -> str:
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<h4>{escape(title)}</h4><table>{lines}</table>"


def _kind(schema: dict[str, Any]) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        return escape(_name(schema))
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(each) for each in schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(f"<code>{escape(str(value))[:_MAX_SHOWN]}</code>" for value in values)
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return escape(str(schema.get("type", "anything")))


def _name(schema: dict[str, str]) -> str:
    return schema["$ref"].rpartition("/")[2]
