"""Converts the prompts of tasks to text messages. Standard library only."""

from __future__ import annotations

from typing import Any


def messages_of(prompt: Any) -> list[dict[str, str]]:
    """Returns a prompt, given as text or as messages, in the form of text messages."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [{"role": message["role"], "content": _text_of(message.get("content"))} for message in prompt]


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part.get("text") or f"[{part.get('type')}]" for part in content)
    return str(content or "")
