"""Renders messages to tokens: prompts, conversations and answers. `rlhf_core.data.chat` describes the
rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from rlhf_core.data.chat.message_template import NO_ARGUMENTS, MessageTemplate, Tools
from rlhf_core.data.chat.text_encoder import Span, TextEncoder, first_stop
from rlhf_core.data.chat.tokenizer_loading import check_embedding_rows
from rlhf_core.data.documents import Document, Message, answered, check_limit, with_suffix
from rlhf_core.data.pictures.message_parts import (
    shown_text,
    sources_in,
    texts_of,
    with_texts,
    without_sources,
)
from rlhf_core.data.pictures.picture_source import CUT_AWAY, PictureFault, PictureSource
from rlhf_core.data.rows.columns import without_weights

if TYPE_CHECKING:
    from rlhf_core.data.chat.picture_rendering import PictureRenderer


class Renderer:
    """Renders messages `{"role": ..., "content": ...}` with one tokenizer and one template ("chat", or a
    plain template with one {}). A plain template puts system messages before the next user message, and the
    end-of-sequence token after each answer.

    `stop_token_ids` are the tokens that end an answer: end-of-sequence, and the template's end-of-turn token
    if it differs. `end_token_id` is the token that training puts after an answer. `frame_len` is the
    template's own length in tokens. `prompt_suffix` is appended to the last message of every prompt
    (`rlhf_core.data.documents`), but not to conversations.

    `verbatim` means that the data's answers were sampled. They then already contain the template's prefix of
    an answer (a space, an empty reasoning block), and `response_tokens` does not add it. `template_args` are
    further arguments of the chat template, by name. The constructor raises ValueError if the template cannot
    be used with this tokenizer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str,
        prompt_suffix: str = "",
        verbatim: bool = False,
        template_args: Mapping[str, Any] = NO_ARGUMENTS,
    ):
        self.tokenizer = tokenizer
        self.template = template
        self.prompt_suffix = prompt_suffix
        self.verbatim = verbatim
        self._encoder = TextEncoder(tokenizer)
        self._template = MessageTemplate(tokenizer, template, self._encoder, template_args)
        self.control_tokens = self._encoder.control_tokens  # control tokens as plain text
        end_of_turn = self._template.end_of_turn_id
        self.end_token_id: int = tokenizer.eos_token_id if end_of_turn is None else end_of_turn
        self.stop_token_ids: list[int] = list(dict.fromkeys([tokenizer.eos_token_id, self.end_token_id]))
        frame = self.prompt([{"role": "user", "content": ""}])
        self.frame_len = len(frame)
        check_embedding_rows(tokenizer, [*frame, *self.stop_token_ids, tokenizer.pad_token_id or 0])

    @cached_property
    def pictures(self) -> PictureRenderer:
        """Returns the model's image processor. Raises ValueError for a model that cannot be trained on
        images."""
        # imports processors, which are not needed for text
        from rlhf_core.data.chat.picture_rendering import PictureRenderer

        return PictureRenderer(self.tokenizer)

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Returns the tokens of the messages and the generation prompt. Raises ValueError if the last message
        is the assistant's."""
        return list(self.prompt_document(messages, tools).tokens)

    def prompt_document(self, messages: Sequence[Message], tools: Tools = ()) -> Document:
        """Like `prompt`, but returns a document with its images. Raises PictureFault for an image that cannot
        be used."""
        if not messages or messages[-1]["role"] == "assistant":
            raise ValueError(
                "a prompt needs at least one message, and its last one must not be the assistant's"
            )
        rendered = with_suffix(messages, self.prompt_suffix)
        document = self._encoded(rendered, True, tools)
        return replace(document, mask=[False] * len(document))

    def text(self, messages: Sequence[Message], generation_prompt: bool, tools: Tools = ()) -> str:
        """Returns the rendered template, with placeholders for control tokens typed in messages."""
        return self._template.render(messages, generation_prompt, tools)[0]

    def follow(
        self, messages: Sequence[Message], new: Sequence[Message], ended: bool, tools: Tools = ()
    ) -> list[int]:
        """Like `follow_document`, but returns only the tokens."""
        return list(self.follow_document(messages, new, ended, tools).tokens)

    def follow_document(
        self, messages: Sequence[Message], new: Sequence[Message], ended: bool, tools: Tools = ()
    ) -> Document:
        """Returns the document between the last answer in `messages` and the answer to the `new` messages,
        including the images of `new`. Its mask is False. `ended` means that the last answer's tokens already
        include its end-of-turn token. The answers themselves are not rendered: sampled tokens stay unchanged.
        Images in `messages` need only a name.

        Raises ValueError if the template rejects the messages or does not show where the answer ends, and
        PictureFault for an image that cannot be used.
        """
        if messages[-1]["role"] != "assistant" or not new or new[-1]["role"] == "assistant":
            raise ValueError(
                "new messages follow an answer, and the last of them must not be the assistant's"
            )
        sources = sources_in(new)
        self._require_place(sources)
        after = self._template.after_answer(without_sources(messages), without_sources(new), tools)
        if after is None:
            raise ValueError(
                "the chat template does not show where an answer ends once messages follow it: take another"
                " template"
            )
        if ended and self._template.end_of_turn:
            after = after.removeprefix(self._template.end_of_turn)
        counts: list[int] = []
        if sources:
            after, _, counts = self.pictures.expanded(after, [], sources)
        tokens = self._encoder.encode_part(after, first=False)
        located = self.pictures.located(tokens, sources, counts) if sources else ()
        return Document(tokens, [False] * len(tokens), pictures=located)

    def frame_of(self, tools: Tools) -> int:
        """Returns the template's own length in tokens, including its description of the tools."""
        return len(self.prompt([{"role": "user", "content": ""}], tools)) if tools else self.frame_len

    def least_of(self, messages: Sequence[Message], tools: Tools = ()) -> int:
        """Returns the length of the shortest prompt that `document_within` can make from the messages."""
        last = messages[-1]
        if not sources_in([last]):
            return self.frame_of(tools)
        content = with_texts(last["content"], [""] * len(texts_of(last["content"])))
        try:
            return len(self.prompt([{**last, "content": content}], tools))
        except PictureFault:
            raise
        except ValueError:  # from a template that requires other messages first, such as calls before results
            return len(self.prompt([{"role": "user", "content": content}], tools))

    def prompt_within(
        self, messages: Sequence[Message], limit: int, tools: Tools = ()
    ) -> tuple[list[int], bool]:
        """Returns the tokens of `document_within`, and whether the prompt was truncated."""
        document, is_cut = self.document_within(messages, limit, tools)
        return list(document.tokens), is_cut

    def document_within(
        self, messages: Sequence[Message], limit: int, tools: Tools = ()
    ) -> tuple[Document, bool]:
        """Returns at most `limit` tokens of a prompt with its images, and whether the prompt was truncated.

        Keeps the template's own tokens and the end of the prompt. Drops the oldest turns first, then the
        beginning of the last message's text. Drops system messages only if they and the template fill the
        limit. Keeps the images of the last message. Raises ValueError for the same reasons as `check_limit`.
        Raises PictureFault if these images and the template exceed the limit.
        """
        frame_len = self.frame_of(tools)
        check_limit(limit, frame_len)
        document = self.prompt_document(messages, tools)
        if len(document) <= limit:
            return document, False
        turns = list(messages)
        system: list[Message] = []
        while len(turns) > 1 and turns[0]["role"] == "system":
            system.append(turns.pop(0))
        for start in range(1, len(turns)):
            if turns[start]["role"] == "user":
                document = self.prompt_document(system + turns[start:], tools)
                if len(document) <= limit:
                    return document, True
        last = turns[-1]
        texts = texts_of(last["content"])
        bare = {**last, "content": with_texts(last["content"], [""] * len(texts))}
        shell = len(self.prompt([*system, bare], tools))
        if shell >= limit:
            system = []
            shell = self.least_of([last], tools)
        words = [self._encoder.encode_part(self._encoder.hide(text), first=True) for text in texts]
        cut = max(sum(map(len, words)) - (limit - shell), 0)
        while True:
            content = with_texts(last["content"], self._ends(texts, words, cut))
            document = self.prompt_document([*system, {**last, "content": content}], tools)
            if len(document) <= limit:
                return document, True
            if not shown_text(content) and document.pictures:
                raise PictureFault(
                    CUT_AWAY, f"the images and the template take {len(document)} tokens: the limit is {limit}"
                )
            if not shown_text(content):  # check_limit only ensures that an empty user message fits
                raise ValueError(
                    f"the role {last['role'][:40]!r} and the template take {len(document)} tokens, and the"
                    f" limit is {limit}"
                )
            cut += len(document) - limit

    def _ends(self, texts: Sequence[str], words: Sequence[list[int]], cut: int) -> list[str]:
        """Returns the texts without their first `cut` tokens in total. `words` holds the tokens of each
        text."""
        ends = []
        for text, tokens in zip(texts, words, strict=True):
            kept = str(self.tokenizer.decode(tokens[cut:], clean_up_tokenization_spaces=False))
            # A cut inside a character leaves replacement characters at the beginning.
            ends.append(kept.lstrip("\ufffd") if cut else text)
            cut = max(0, cut - len(tokens))
        return ends

    def conversation(self, messages: Sequence[Message], tools: Tools = ()) -> Document:
        """Returns the messages as a document. The mask covers all answers and their end-of-turn tokens,
        except answers of weight 0.

        Leaves out tokens after the last trained answer; if that is the last message and ends without a stop
        token, adds the end-of-turn token. Without a trained answer the mask is all False. The model's
        processor determines the number of tokens of an image. Raises PictureFault for an image that cannot be
        used.
        """
        document = self._encoded(messages, False, tools)
        if not any(document.mask):
            return document
        end = len(document) - list(document.mask)[::-1].index(True)
        document = document.cut(end)
        last = messages[-1]
        if (
            last["role"] == "assistant"
            and "weight" not in last
            and document.tokens[-1] not in self.stop_token_ids
        ):
            return replace(
                document, tokens=[*document.tokens, self.end_token_id], mask=[*document.mask, True]
            )
        return document

    def _encoded(self, messages: Sequence[Message], generation_prompt: bool, tools: Tools) -> Document:
        """Returns the rendered messages with their images."""
        sources = sources_in(messages)
        self._require_place(sources)
        text, spans = self._template.render(
            without_sources(without_weights(messages)), generation_prompt, tools
        )
        if not sources:
            return self._encoder.encode(text, spans, self.stop_token_ids, _untrained(messages, spans))
        text, spans, counts = self.pictures.expanded(text, spans, sources)
        document = self._encoder.encode(text, spans, self.stop_token_ids, _untrained(messages, spans))
        return replace(document, pictures=self.pictures.located(document.tokens, sources, counts))

    def _require_place(self, sources: Sequence[PictureSource]) -> None:
        if sources and self.template != "chat":
            raise ValueError("a plain template has no place for images: use 'chat'")

    def answer(self, prompt_messages: Sequence[Message], response: str) -> Document:
        """Returns the prompt's tokens, the response and the end-of-turn token, as a sampler produces them.
        The mask covers the response and the end-of-turn token."""
        return self.answer_tokens(self.prompt(prompt_messages), response)

    def answer_tokens(self, prompt_tokens: list[int], response: str) -> Document:
        """Works like `answer`, but for given prompt tokens, which may already be truncated."""
        return answered(prompt_tokens, self._sampled(response))

    def response_tokens(
        self, prompt_messages: Sequence[Message], response: str | Message, tools: Tools = ()
    ) -> list[int]:
        """Returns the tokens of an answer (a string, or a message that calls tools) as in `conversation`,
        with the template's prefix and the end-of-turn token.

        Returns only the response and the end-of-turn token for `verbatim` answers, and for answers that
        cannot be found in the rendered template. Raises ValueError if an answer with tool calls cannot be
        found.
        """
        message = {"role": "assistant", "content": response} if isinstance(response, str) else response
        calls = bool(message.get("tool_calls"))
        if not calls and (self.verbatim or self.template != "chat"):
            return self._sampled(message["content"])
        text = self._template.answer_text(without_sources(prompt_messages), message, tools)
        if text is None and calls:
            raise ValueError(
                "the chat template does not show where an answer with calls of tools begins: leave such rows"
                " out"
            )
        if text is None:
            return self._sampled(message["content"])
        part = self._encoder.encode_part(text, first=False)
        stop = first_stop(part, self.stop_token_ids)
        return [*part, self.end_token_id] if stop is None else part[: stop + 1]

    def _sampled(self, response: str) -> list[int]:
        return [*self._encoder.encode_part(self._encoder.hide(response), first=False), self.end_token_id]

    def decoded(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))


def _untrained(messages: Sequence[Message], spans: Sequence[Span]) -> set[int]:
    """Returns the indices of the spans whose answers have weight 0. Raises ValueError if there are such
    answers and the number of spans differs from the number of answers."""
    answers = [message for message in messages if message["role"] == "assistant"]
    found = {number for number, message in enumerate(answers) if "weight" in message}
    if found and len(spans) != len(answers):
        raise ValueError(
            f"{len(found)} of {len(answers)} answers have weight 0, and the chat template marks {len(spans)}"
            " parts as answers: put one {% generation %} block around each answer in the template"
        )
    return found
