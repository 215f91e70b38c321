"""Reads OpenAI responses API requests, and writes their answers, complete or as a stream.

Source: https://platform.openai.com/docs/api-reference/responses. A request is converted to a list of chat
completions messages: `instructions` become a system message, and calls and their outputs become assistant and
tool messages. `previous_response_id` stands for all messages up to that response in the same episode.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf_core.environments.agents.chat_protocol import POLICY, AgentRequest, count_of, event, refuse_fields
from rlhf_core.environments.conversation import Answer

TEXTS = ("input_text", "output_text", "text")


def read_responses_request(body: Mapping[str, Any], earlier: Sequence[dict[str, Any]]) -> AgentRequest:
    """Reads the body of `POST /v1/responses`. `earlier`: the messages up to `previous_response_id`. Raises
    ValueError if the request is invalid or sets an unsupported option."""
    refuse_fields(body)
    if ((body.get("text") or {}).get("format") or {}).get("type") not in (None, "text"):
        raise ValueError("text.format is not supported: the policy writes text")
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list):
        raise ValueError("input must be a text or a list of items")
    instructions = body.get("instructions")
    first = [{"role": "system", "content": instructions}] if instructions else []
    rest = [message for message in earlier if not (first and message["role"] == "system")]
    messages = [*first, *rest, *messages_of(items)]
    tools = [] if body.get("tool_choice") == "none" else [_tool(tool) for tool in body.get("tools") or []]
    most = count_of(body.get("max_output_tokens"))
    return AgentRequest(messages, tools, most, bool(body.get("stream")), False)


def messages_of(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Converts the items of an input to chat completions messages. Raises ValueError for an item that is not
    supported."""
    messages = list[dict[str, Any]]()
    for item in items:
        kind = item.get("type", "message") if isinstance(item, dict) else type(item).__name__
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _content(item.get("content"))})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id", ""), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = _content(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id", ""), "content": output})
        elif kind != "reasoning":
            raise ValueError(f"input has an item of type {kind!r}: the policy reads messages and calls")
    return messages


def _content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [
        part | {"type": "text"} if isinstance(part, dict) and part.get("type") in TEXTS else part
        for part in content
    ]


def _tool(tool: Any) -> dict[str, Any]:
    """Returns a function tool in chat completions form. Raises ValueError for a hosted tool."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else type(tool).__name__
        raise ValueError(f"tools of type {kind!r} run at OpenAI: give functions")
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name)}}


def response_of(answer: Answer) -> dict[str, Any]:
    """Returns the response body for an answer."""
    output = list[dict[str, Any]]()
    if answer.text or not answer.calls:
        part = {"type": "output_text", "text": answer.text, "annotations": []}
        output.append(_item("message", "msg") | {"role": "assistant", "content": [part]})
    for call in answer.calls:
        of_call = {"call_id": call.id, "name": call.name, "arguments": json.dumps(call.arguments)}
        output.append(_item("function_call", "fc") | of_call)
    cut = None if answer.finished else {"reason": "max_output_tokens"}
    total = answer.prompt_tokens + answer.tokens
    usage = {"input_tokens": answer.prompt_tokens, "output_tokens": answer.tokens, "total_tokens": total}
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "completed" if answer.finished else "incomplete",
        "incomplete_details": cut,
        "error": None,
        "model": POLICY,
        "instructions": None,
        "previous_response_id": None,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "metadata": {},
        "temperature": None,
        "top_p": None,
        "usage": usage | details,
    }


def _item(kind: str, prefix: str) -> dict[str, Any]:
    return {"type": kind, "id": f"{prefix}_{uuid.uuid4().hex}", "status": "completed"}


def response_events(response: Mapping[str, Any]) -> Iterator[str]:
    """Yields the server-sent events for an answer that is already complete."""
    begun = {**response, "status": "in_progress", "output": []}
    parts: list[tuple[str, dict[str, Any]]] = [("response.created", {"response": begun})]
    for index, item in enumerate(response["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        nothing: dict[str, Any] = {"content": []} if item["type"] == "message" else {"arguments": ""}
        empty = item | nothing
        parts.append(("response.output_item.added", {"output_index": index, "item": empty}))
        if item["type"] == "message":
            parts += _text_events(item["content"][0], place)
        else:
            said = {"delta": item["arguments"]}
            parts.append(("response.function_call_arguments.delta", place | said))
            done = {"arguments": item["arguments"], "name": item["name"]}
            parts.append(("response.function_call_arguments.done", place | done))
        parts.append(("response.output_item.done", {"output_index": index, "item": item}))
    last = "response.completed" if response["status"] == "completed" else "response.incomplete"
    parts.append((last, {"response": dict(response)}))
    for number, (name, content) in enumerate(parts):
        yield event({"type": name, "sequence_number": number} | content, name)


def _text_events(part: Mapping[str, Any], place: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    at = {**place, "content_index": 0}
    empty = {**part, "text": ""}
    return [
        ("response.content_part.added", at | {"part": empty}),
        ("response.output_text.delta", at | {"delta": part["text"], "logprobs": []}),
        ("response.output_text.done", at | {"text": part["text"], "logprobs": []}),
        ("response.content_part.done", at | {"part": dict(part)}),
    ]
