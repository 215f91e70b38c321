"""Turns a model's answers into OpenEnv actions, and OpenEnv observations into messages."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rlhf_core.environments.joined_calls import check_depth

TOOL_ACTIONS = {"Action", "CallToolAction", "ListToolsAction"}  # schema titles of servers with MCP tools


def takes_tools(schema: Mapping[str, Any]) -> bool:
    """Returns whether a server's actions are MCP tool calls."""
    return schema.get("title") in TOOL_ACTIONS


def text_field(schema: Mapping[str, Any]) -> str | None:
    """Returns the field that receives the answer's text: the only required field of an action or, failing
    that, its only field. None if neither is unique."""
    fields = [name for name in schema.get("properties") or {} if name != "metadata"]
    required = [name for name in schema.get("required") or () if name in fields]
    return next((names[0] for names in (required, fields) if len(names) == 1), None)


def action_problem(schema: Mapping[str, Any], field: str | None, constant: Mapping[str, Any]) -> str:
    """Returns why the server would reject every action of this form; "" if it would not."""
    properties = schema.get("properties") or {}
    given = {*constant, *([field] if field is not None else [])}
    known = ", ".join(name for name in properties if name != "metadata")
    for name in sorted(given - set(properties)) if properties else ():
        return f"its actions have no field {name!r}; their fields are {known}: correct field or action"
    missing = sorted(set(schema.get("required") or ()) - given)
    if field is not None and missing:
        return f"its actions need {', '.join(missing)} too: set them in action, or leave field out"
    return ""


def action_of(
    text: str, field: str | None, schema: Mapping[str, Any], constant: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the action for an answer: `constant`, plus the text as `field`, parsed as JSON unless the
    schema declares the field a string. Without `field`, adds the first JSON object in the text instead.
    Raises ValueError with a message for the model."""
    if field is None:
        return {**constant, **first_object(text)}
    kind = ((schema.get("properties") or {}).get(field) or {}).get("type", "string")
    if kind == "string":
        return {**constant, field: text.strip()}
    try:
        return {**constant, field: json.loads(text)}
    except (ValueError, RecursionError):
        raise ValueError(f"the answer must be {field} alone, a JSON {kind}") from None


def first_object(text: str) -> dict[str, Any]:
    """Returns the first JSON object in a string. Raises ValueError if no object begins at one of the first
    100 opening braces."""
    decoder = json.JSONDecoder(parse_constant=_refuse)
    start = text.find("{")
    looks = 0
    while start >= 0 and looks < 100:
        try:
            found, _ = decoder.raw_decode(text, start)
            check_depth(found)
            return dict(found)
        except (ValueError, RecursionError):
            start = text.find("{", start + 1)
            looks += 1
    raise ValueError("the answer holds no JSON object: write the action as one")


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def text_of(observation: Mapping[str, Any], fields: Collection[str], longest: int) -> str:
    """Returns the text of an observation that the model sees, at most `longest` characters: the named fields,
    or all non-empty fields if `fields` is empty. Strings are shown unchanged, anything else as JSON."""
    shown = {
        name: value
        for name, value in observation.items()
        if (name in fields if fields else value not in (None, "", [], {}))
    }
    only = next(iter(shown.values())) if len(shown) == 1 else None
    text = only if isinstance(only, str) else json.dumps(shown, ensure_ascii=False, default=str)
    return shortened(text if shown else "", longest)


def shown_to(
    images: bool, observation: Mapping[str, Any], fields: Collection[str], longest: int
) -> str | dict[str, Any]:
    """Returns the part of an observation that the model sees. This is its text (see `text_of`). If the model
    reads `images` and some fields hold images (`data:image/...`), it is a message with these images before
    the text of the other fields."""
    seen = {name: value for name, value in observation.items() if name in fields or not fields}
    urls = [name for name, value in seen.items() if _is_image(value)]
    if not images or not urls:
        return text_of(observation, fields, longest)
    others = {name: value for name, value in observation.items() if name not in urls}
    parts = [{"type": "image", "image": observation[name]} for name in urls]
    text = text_of(others, fields, longest)
    texts = [{"type": "text", "text": text}] if text else []
    return {"role": "user", "content": parts + texts}


def _is_image(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("data:image/")


def tool_text(observation: Mapping[str, Any], longest: int) -> str:
    """Returns the text of a tool's result that the model sees."""
    error = observation.get("error")
    if error:
        told = error.get("message", error) if isinstance(error, dict) else error
        return shortened(f"error: {told}", longest)
    result = observation.get("result")
    if isinstance(result, dict) and result.get("data") is not None:
        result = result["data"]
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    return shortened(text, longest)


def shortened(text: str, longest: int) -> str:
    cut = len(text) - longest
    return text if cut <= 0 else f"{text[:longest]}\n[{cut} more characters]"


def tools_of(observation: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the tools that a server lists, in the format that chat templates take. Raises ValueError if the
    observation lists none."""
    listed = observation.get("tools")
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
        raise ValueError("it lists no tools")
    return [_tool(tool) for tool in listed]


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise ValueError("it lists a tool without a name")
    parameters = tool.get("input_schema") or tool.get("inputSchema") or {"type": "object", "properties": {}}
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": function}
