"""Renders messages to text with a chat template or a plain template, and finds the answers in the text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from rlhf_core.data.chat.template_arguments import refuse_unread
from rlhf_core.data.chat.text_encoder import MARK, Span, TextEncoder
from rlhf_core.data.chat.tokenizer_loading import first_line
from rlhf_core.data.documents import Message

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Tools = Sequence[dict[str, Any]]
NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})


class MessageTemplate:
    """Renders with the chat template of a tokenizer ("chat"), or with a plain template that contains one {}.

    `end_of_turn_id` is the token that the template writes after an answer, and `end_of_turn` is the text of
    that token; both are None if the template writes no such token. `arguments` are passed to the chat
    template by name. Raises ValueError if the template cannot be used, or never reads an argument.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str,
        encoder: TextEncoder,
        arguments: Mapping[str, Any] = NO_ARGUMENTS,
    ):
        self.tokenizer = tokenizer
        self.template = template
        self._encoder = encoder
        self._arguments = encoder.hide_values(dict(arguments))
        self._eos = str(tokenizer.eos_token)
        first = tokenizer("a").input_ids[0]
        has_bos = tokenizer.bos_token is not None and first == tokenizer.bos_token_id
        self._bos = str(tokenizer.bos_token) if has_bos else ""
        self._writes_calls: bool | None = None  # tool calls; determined at the first message that has some
        self._chat_template = ""
        self.end_of_turn_id: int | None = tokenizer.eos_token_id
        if template == "chat":
            self._chat_template = self._find_chat_template()
            self.end_of_turn_id = self._find_end_of_turn()
            refuse_unread(self._chat_template, arguments, str(tokenizer.name_or_path))
        self.end_of_turn: str | None = None
        if self.end_of_turn_id is not None:
            self.end_of_turn = str(tokenizer.convert_ids_to_tokens(self.end_of_turn_id))

    def render(
        self, messages: Sequence[Message], generation_prompt: bool, tools: Tools = ()
    ) -> tuple[str, list[Span]]:
        """Returns the rendered text with placeholders, and the character spans of its answers."""
        self._require_calls(messages)
        hidden = self._encoder.hide_messages(messages)
        if self.template != "chat":
            return self._plain(hidden)
        text, spans = self._render(hidden, generation_prompt, tools)
        if GENERATION.search(self._chat_template):
            if self._arguments and hidden and hidden[-1]["role"] == "assistant":
                self._refuse_other_beginning(text, hidden, tools)
            return text, spans
        for index, message in enumerate(hidden):
            if message["role"] == "assistant":
                span = self._answer_in(text, hidden, index, tools)
                if span is None:
                    if self._arguments and index == len(hidden) - 1:
                        self._refuse_other_beginning(text, hidden, tools)
                    raise ValueError(
                        f"the chat template writes the messages before message {index + 1} differently once"
                        " it is there, so the tokens of this answer cannot be found: put {% generation %}"
                        " and {% endgeneration %} around the answers in the template"
                    )
                spans.append(span)
        return text, spans

    def answer_text(
        self, prompt_messages: Sequence[Message], message: Message, tools: Tools = ()
    ) -> str | None:
        """Returns the text that the template renders for an answer, or None if it cannot be found.

        Raises ValueError if arguments of the template make the end of the prompt differ from the beginning of
        the answer.
        """
        self._require_calls([message])
        hidden = self._encoder.hide_messages([*prompt_messages, message])
        text, marked = self._render(hidden, False, tools)
        span = marked[-1] if marked else self._answer_in(text, hidden, len(hidden) - 1, tools)
        if span is None and self._arguments:
            self._refuse_other_beginning(text, hidden, tools)
        if span is None or (marked and text[: span[0]] != self._render(hidden[:-1], True, tools)[0]):
            return None
        return text[slice(*span)]

    def after_answer(
        self, messages: Sequence[Message], new: Sequence[Message], tools: Tools = ()
    ) -> str | None:
        """Returns the text between the last answer in `messages` and the answer to the `new` messages.
        Returns None if the template does not show where the answer ends."""
        before = self._encoder.hide_messages(messages[:-1])
        following = self._encoder.hide_messages(new)
        after = self._after_answer(before, {"role": "assistant", "content": MARK}, following, tools)
        if after is None and messages[-1].get("tool_calls"):
            answer = self._encoder.hide_messages(messages[-1:])[0]
            after = self._after_answer(before, answer, following, tools)
        return after

    def _after_answer(
        self, before: list[Message], answer: Message, new: list[Message], tools: Tools
    ) -> str | None:
        """Returns the template's text between an answer and the next one, or None if it does not show where
        the answer ends."""
        if self.template != "chat":
            text = self._plain([*before, answer, *new])[0]
        else:
            try:
                text = self._render([*before, answer, *new], True, tools)[0]
            except ValueError:
                if answer["content"] == MARK and any(message["role"] == "tool" for message in new):
                    return None  # the template may require that results follow calls
                raise
        if answer["content"] == MARK:
            _, found, after = text.rpartition(MARK)
            return after if found else None
        through = self._render([*before, answer], False, tools)[0].rstrip()  # ends with the end-of-turn token
        return (self.end_of_turn or "") + text[len(through) :] if text.startswith(through) else None

    def _require_calls(self, messages: Sequence[Message]) -> None:
        """Raises ValueError if messages call tools but the template omits the calls or is a plain
        template."""
        if not any(message.get("tool_calls") for message in messages):
            return
        if self._writes_calls is None:
            call = {"type": "function", "id": "call00000", "function": {"name": MARK, "arguments": {}}}
            called: list[Message] = [
                {"role": "user", "content": ""},
                {"role": "assistant", "content": "", "tool_calls": [call]},
            ]
            self._writes_calls = self.template == "chat" and MARK in self._render(called, False)[0]
        if not self._writes_calls:
            kind = "chat" if self.template == "chat" else "plain"
            raise ValueError(
                f"the {kind} template leaves out calls of tools: take a model whose chat template writes"
                " them, or other rows"
            )

    def _answer_in(self, text: str, hidden: list[Message], index: int, tools: Tools = ()) -> Span | None:
        """Returns the span of the answer `hidden[index]` in `text`, or None if the template renders the
        messages before it differently."""
        start = self._answer_start(text, hidden, index, tools)
        if start is None:
            return None
        if self.end_of_turn is None:
            through, _ = self._render(hidden[: index + 1], False, tools)
            return (start, len(through)) if text.startswith(through) else None
        # No answer contains this text: control tokens in messages are replaced by placeholders.
        found = text.find(self.end_of_turn, start)
        return start, found + len(self.end_of_turn) if found >= 0 else len(text)

    def _answer_start(self, text: str, hidden: list[Message], index: int, tools: Tools) -> int | None:
        """Returns where the answer `hidden[index]` begins in `text`, after its prompt. A template may omit
        the end of the generation prompt (an empty reasoning block) before an answer that other messages
        follow. The answer then begins where the template puts its content. Returns None if the start cannot
        be found."""
        prompt, _ = self._render(hidden[:index], True, tools)
        if text.startswith(prompt):
            return len(prompt)
        if index == len(hidden) - 1:
            return None
        before, _ = self._render(hidden[:index], False, tools)
        marked = [*hidden[:index], {**hidden[index], "content": MARK}, *hidden[index + 1 :]]
        header, found, _ = self._render(marked, False, tools)[0].partition(MARK)
        return len(header) if found and header.startswith(before) and text.startswith(header) else None

    def _refuse_other_beginning(self, text: str, hidden: list[Message], tools: Tools) -> None:
        """Raises ValueError if `text` does not begin with the prompt of the last message."""
        if not text.startswith(self._render(hidden[:-1], True, tools)[0]):
            raise ValueError(
                f"with template_args ({', '.join(self._arguments)}) the chat template begins message"
                f" {len(hidden)}, an answer, differently than its prompt ends, so another prompt would be"
                " trained than is sampled: change the arguments, or leave such answers (thoughts) out"
            )

    def _render(
        self, messages: list[Message], generation_prompt: bool, tools: Tools = ()
    ) -> tuple[str, list[Span]]:
        try:
            texts, spans = render_jinja_template(
                conversations=[messages],
                tools=self._encoder.hide_values(list(tools)) or None,
                chat_template=self._chat_template,
                return_assistant_tokens_mask=bool(GENERATION.search(self._chat_template)),
                add_generation_prompt=generation_prompt,
                **self.tokenizer.special_tokens_map,
                **self._arguments,
            )
        except Exception as error:  # a template is a program and may raise any error
            roles = ", ".join(message["role"] for message in messages)
            what = (
                first_line(error)
                if isinstance(error, TemplateError)
                else f"{type(error).__name__}: {first_line(error)}"
            )
            raise ValueError(
                f"the chat template refuses messages with the roles ({roles}): {what}"
            ) from error
        return texts[0], list(spans[0]) if spans else []

    def _plain(self, messages: list[Message]) -> tuple[str, list[Span]]:
        text = self._bos
        system = ""
        spans = []
        for message in messages:
            if message["role"] == "system":
                system += message["content"] + "\n\n"
            elif message["role"] == "user":
                text += self.template.replace("{}", system + message["content"])
                system = ""
            elif message["role"] == "assistant":
                spans.append((len(text), len(text) + len(message["content"]) + len(self._eos)))
                text += message["content"] + self._eos
            else:
                raise ValueError(
                    f"a plain template knows the roles system, user and assistant, not {message['role']!r}:"
                    " use 'chat'"
                )
        return text, spans

    def _find_chat_template(self) -> str:
        try:
            return str(self.tokenizer.get_chat_template())
        except ValueError as error:
            raise ValueError(
                f"{self.tokenizer.name_or_path}: the model has no chat template: set the template of the data"
                " to a plain one, with one {} for the prompt"
            ) from error

    def _find_end_of_turn(self) -> int | None:
        """Returns the first special token that the template puts after an answer, or None if there is
        none."""
        word = "answer-to-find"
        text, _ = self._render(
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": word}], False
        )
        if word not in text:
            raise ValueError(
                f"{self.tokenizer.name_or_path}: the chat template leaves out what the assistant says: use"
                " another template"
            )
        special = {index for index, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        tokens = self._encoder.ids(text.rpartition(word)[2])
        return next((token for token in tokens if token in special), None)
