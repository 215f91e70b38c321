"""Reads OpenAI chat completions requests, and writes their answers, complete or as a stream.

Source: https://platform.openai.com/docs/api-reference/chat. The stage decides how to sample, so
`temperature`, `top_p`, `seed` and the penalties in a request are ignored. Options that would change which
tokens are sampled are rejected, because they are not supported here: `stop`, `n` above 1, a response format,
and a forced call.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rlhf_core.environments.conversation import Answer, Call

POLICY = "policy"  # the model name in answers


class AgentRequest(NamedTuple):
    """A request in chat completions form. `most`: the maximum number of tokens in the answer. `usage`:
    whether a stream ends with the token counts."""

    messages: list[dict[str, Any]]
    tools: list[Any]
    most: int | None
    stream: bool
    usage: bool


def read_chat_request(body: Mapping[str, Any]) -> AgentRequest:
    """Reads the body of `POST /v1/chat/completions`. Raises ValueError if the request is invalid or sets an
    unsupported option."""
    refuse_fields(body)
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise ValueError("messages must be a list")
    tools = [] if body.get("tool_choice") == "none" else body.get("tools") or []
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    if not isinstance(tools, list):
        raise ValueError("tools must be a list")
    usage = bool((body.get("stream_options") or {}).get("include_usage"))
    return AgentRequest(messages, tools, count_of(most), bool(body.get("stream")), usage)


def refuse_fields(body: Mapping[str, Any]) -> None:
    """Raises ValueError if the request sets fields that would change the sampling."""
    if body.get("n") not in (None, 1):
        raise ValueError("n must be 1: ask several times")
    if body.get("chat_template_kwargs"):
        raise ValueError("chat_template_kwargs are the stage's: set template_args of its prompts")
    if body.get("stop"):
        raise ValueError("stop is not supported: answers end with the template's end of turn")
    if (body.get("response_format") or {}).get("type") not in (None, "text"):
        raise ValueError("response_format is not supported: the policy writes text")
    if body.get("tool_choice") not in (None, "none", "auto"):
        raise ValueError("tool_choice must be auto or none: calls are not forced")


def count_of(value: Any) -> int | None:
    """Returns a token limit; None stands for no limit. Raises ValueError for any other value that is not a
    positive integer."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"the limit of tokens must be a whole number above 0, not {value!r:.40}")
    return value


def chat_completion(answer: Answer) -> dict[str, Any]:
    """Returns the response body for an answer."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.calls:
        message["tool_calls"] = [_call(call) for call in answer.calls]
    choice = {"index": 0, "message": message, "finish_reason": _reason(answer), "logprobs": None}
    return _head("chat.completion") | {"choices": [choice], "usage": _usage(answer)}


def chat_chunks(answer: Answer, usage: bool) -> Iterator[str]:
    """Yields the server-sent events for an answer that is already complete. `usage`: whether the client
    requested an event with the token counts."""
    head = _head("chat.completion.chunk")
    delta: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.calls:
        delta["tool_calls"] = [{"index": i} | _call(call) for i, call in enumerate(answer.calls)]
    choices = [(delta, None), ({}, _reason(answer))]
    for delta, reason in choices:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        yield event(head | {"choices": [choice]})
    if usage:
        yield event(head | {"choices": [], "usage": _usage(answer)})
    yield "data: [DONE]\n\n"


def event(content: Mapping[str, Any], name: str = "") -> str:
    """Returns a server-sent event."""
    named = f"event: {name}\n" if name else ""
    return f"{named}data: {json.dumps(content)}\n\n"


def _head(kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": POLICY,
    }


def _usage(answer: Answer) -> dict[str, int]:
    total = answer.prompt_tokens + answer.tokens
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.tokens,
        "total_tokens": total,
    }


def _reason(answer: Answer) -> str:
    if not answer.finished:
        return "length"
    return "tool_calls" if answer.calls else "stop"


def _call(call: Call) -> dict[str, Any]:
    """Returns a tool call. Arguments that could not be parsed are left empty."""
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}
