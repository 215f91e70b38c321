"""Parses tool calls in answers, in the format that the model's chat template writes.

The format is detected by rendering one call: JSON (Hermes, Qwen 2.5 and 3, Llama 3, Mistral), a name followed
by JSON (newer Mistral, DeepSeek), or tags for each argument (Qwen3-Coder, Qwen3.5).
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from rlhf_core.data.chat import Renderer
from rlhf_core.environments.conversation import Call

NAME = "find_tool_name"
ARGUMENT = "find_argument"
VALUE = "find_value"
TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "a tool",
        "parameters": {
            "type": "object",
            "properties": {ARGUMENT: {"type": "string", "description": "a text"}},
            "required": [ARGUMENT],
        },
    },
}
DECODER = json.JSONDecoder()


class CallFormat(NamedTuple):
    """The strings around the parts of a call. `begin`: before the call ("": the whole answer is a call).
    `between`: after the name and before the arguments; None if one JSON object contains both. `tags`: for
    arguments in tags, the strings before the argument's name, before its value and after its value."""

    begin: str
    between: str | None = None
    tags: tuple[str, str, str] | None = None

    def read(self, text: str) -> tuple[str, list[Call]]:
        """Returns the text before the first call, and all calls."""
        if not self.begin:
            calls = _of_json(text.strip(), whole=True) if text.lstrip().startswith(("{", "[")) else []
            return ("", calls) if calls else (text, [])
        before, *parts = text.split(self.begin)
        return before.rstrip() if parts else text, [call for part in parts for call in self._calls(part)]

    def _calls(self, part: str) -> list[Call]:
        if self.between is None:
            return _of_json(part.lstrip(), whole=False)
        name, found, rest = part.partition(self.between)
        if not found:
            return [Call(name.strip()[:80], {}, "there are no arguments after the name")]
        if self.tags is None:
            return [_call(name.strip(), _decoded(rest.lstrip()))]
        before, middle, after = map(re.escape, self.tags)
        given = re.findall(f"{before}(.*?){middle}(.*?){after}", rest, re.DOTALL)
        return [Call(name.strip(), {key.strip(): _value(value) for key, value in given})]


def call_format(renderer: Renderer) -> CallFormat:
    """Returns the template's call format. Raises ValueError for a template without tool support."""
    asked = [{"role": "user", "content": "a"}]
    call = {"type": "function", "id": "call00000", "function": {"name": NAME, "arguments": {ARGUMENT: VALUE}}}
    wrong = (
        f"{renderer.tokenizer.name_or_path}: the chat template writes no calls of tools: take a model that"
        " was trained with tools"
    )
    if renderer.template != "chat":
        raise ValueError("a plain template writes no calls of tools: set the template of the prompts to chat")
    try:
        text = renderer.text(
            [*asked, {"role": "assistant", "content": "", "tool_calls": [call]}], False, [TOOL]
        )
        prompt, without = (
            renderer.text(asked, generation_prompt, [TOOL]) for generation_prompt in (True, False)
        )
    except ValueError as error:
        raise ValueError(f"{wrong} ({error})") from error
    said = text[len(prompt if text.startswith(prompt) else without) :]
    if NAME not in said or VALUE not in said:
        raise ValueError(wrong)
    return _format(said)


def _format(said: str) -> CallFormat:
    """Returns the format of a rendered call."""
    for start in [place for place, letter in enumerate(said) if letter == "{"]:
        value = _decoded(said[start:])
        if isinstance(value, dict) and value.get("name", value.get("function")) == NAME:
            return CallFormat(said[:start].rstrip().removesuffix("[").strip())
        if isinstance(value, dict) and value == {ARGUMENT: VALUE}:
            begin, _, between = said[:start].partition(NAME)
            return CallFormat(begin.strip(), between.strip() or "\n")
    begin, _, rest = said.partition(NAME)
    before, _, rest = rest.partition(ARGUMENT)
    middle, _, after = rest.partition(VALUE)
    tag = before.strip().rpartition("\n")[2]
    closing = after.strip().split("\n")[0]
    between = before.strip().removesuffix(tag).strip() or tag[: tag.find("<")] or ">"
    return CallFormat(begin.strip(), between, (tag.removeprefix(between), middle.strip(), closing))


def _decoded(text: str) -> Any:
    try:
        return DECODER.raw_decode(text)[0]
    except (ValueError, RecursionError):
        return None


def _of_json(text: str, whole: bool) -> list[Call]:
    """Parses an object or a list of objects at the start of a string. With `whole`, values that are not calls
    are skipped instead of being returned as wrong calls."""
    value = _decoded(text)
    objects = value if isinstance(value, list) else [value]
    calls = []
    for found in objects:
        inner = found if isinstance(found, dict) else {}
        inner = inner["function"] if isinstance(inner.get("function"), dict) else inner
        if isinstance(inner.get("name"), str):
            calls.append(_call(inner["name"], inner.get("arguments", inner.get("parameters", {}))))
        elif not whole:
            calls.append(Call("", {}, f"this is not a JSON object with a name and arguments: {text[:80]}"))
    return calls


def _call(name: str, arguments: Any) -> Call:
    if isinstance(arguments, str):
        arguments = _decoded(arguments)
    return (
        Call(name, arguments)
        if isinstance(arguments, dict)
        else Call(name, {}, "its arguments are no JSON object")
    )


def _value(text: str) -> Any:
    """Parses the value of a tagged argument as JSON if possible, otherwise returns it as text."""
    stripped = text.strip()
    value = _decoded(stripped)
    return (
        value
        if value is not None and not isinstance(value, str) and json.dumps(value)[:1] == stripped[:1]
        else stripped
    )
