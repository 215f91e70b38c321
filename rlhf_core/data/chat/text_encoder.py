"""Encodes rendered text, in which placeholders represent the control tokens that were typed in messages."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf_core.data.documents import Document, Message

# Unicode noncharacters, which text should not contain. An OPEN in the text is itself replaced by a
# placeholder.
OPEN = "\ufdd0"
CLOSE = "\ufdd1"
PLACEHOLDER = re.compile(f"{OPEN}([0-9]+){CLOSE}")
MARK = "\ufdd2"  # replaces an answer to find where it ends
Span = tuple[int, int]


class TextEncoder:
    """Hides control tokens in messages, and encodes text with one tokenizer. `control_tokens` finds control
    tokens that are typed as plain text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        special = sorted(
            (token.content for token in tokenizer.added_tokens_decoder.values() if token.special),
            key=len,
            reverse=True,
        )
        self.control_tokens = re.compile("|".join(re.escape(text) for text in special) or "(?!)")
        self._hidden = [OPEN, MARK, *special]
        self._hidden_pattern = re.compile("|".join(re.escape(text) for text in self._hidden))
        self._eos = str(tokenizer.eos_token)
        self._fast = _backend(tokenizer)
        # Some tokenizers put a space before the start of a text. Parts after the first are encoded after an
        # eos token to avoid it.
        self._anchored = self.ids(self._eos) == [tokenizer.eos_token_id]

    def hide(self, content: str) -> str:
        """Returns the text with control tokens replaced by placeholders."""
        return self._hidden_pattern.sub(
            lambda match: f"{OPEN}{self._hidden.index(match.group())}{CLOSE}", content
        )

    def hide_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Hides the control tokens in all strings of messages."""
        return [self.hide_values(message) for message in messages]

    def hide_values(self, value: Any) -> Any:
        """Hides the control tokens in all strings of a message or a tool."""
        if isinstance(value, dict):
            return {name: self.hide_values(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.hide_values(inner) for inner in value]
        return self.hide(value) if isinstance(value, str) else value

    def ids(self, text: str, split_special_tokens: bool = False) -> list[int]:
        """Returns the tokens of a text without placeholders."""
        fast = self._fast
        if fast is not None and fast.truncation is None and fast.padding is None:
            fast.encode_special_tokens = split_special_tokens
            (encoded,) = fast.encode_batch_fast([text], add_special_tokens=False)
            return list(encoded.ids)
        # verbose=False: no warning about texts over the model's maximum length, which are cut later.
        encoded = self.tokenizer(
            text, add_special_tokens=False, split_special_tokens=split_special_tokens, verbose=False
        )
        return list(encoded.input_ids)

    def encode_part(self, text: str, first: bool) -> list[int]:
        """Returns the tokens of a text with placeholders. `first` means that nothing precedes the text."""
        tokens: list[int] = []
        for number, piece in enumerate(PLACEHOLDER.split(text)):
            if number % 2:
                tokens += self.ids(self._hidden[int(piece)], split_special_tokens=True)
            elif piece and self._anchored and (tokens or not first):
                tokens += self.ids(self._eos + piece)[1:]
            elif piece:
                tokens += self.ids(piece)
        return tokens

    def encode(
        self,
        text: str,
        spans: Sequence[Span],
        stop_token_ids: Collection[int],
        untrained: Collection[int] = (),
    ) -> Document:
        """Encodes a text part by part. In each span the mask ends with the first stop token, which is in the
        span or directly after it. `untrained` holds the indices of the spans that the mask leaves out."""
        tokens: list[int] = []
        mask: list[bool] = []
        unended = False
        borders = [0, *(border for span in spans for border in span), len(text)]
        for number, (start, end) in enumerate(pairwise(borders)):
            in_span = number % 2 == 1
            part = self.encode_part(text[start:end], first=not tokens)
            stop = first_stop(part, stop_token_ids) if spans else None
            counted = [False] * len(part)
            if in_span and number // 2 in untrained:
                unended = False
            elif in_span:
                length = len(part) if stop is None else stop + 1
                counted[:length] = [True] * length
                unended = stop is None
            elif stop == 0 and unended:
                counted[0] = True
            tokens += part
            mask += counted
        return Document(tokens, mask)


def first_stop(tokens: Sequence[int], stop_token_ids: Collection[int]) -> int | None:
    """Returns the index of the first token that ends an answer, or None if there is none."""
    return next((index for index, token in enumerate(tokens) if token in stop_token_ids), None)


def _backend(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Returns the object of the tokenizers library that encodes for `tokenizer`; calling `tokenizer` itself
    takes three times as long for a short text. Returns None if the tokenizer's class overrides its call."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    plain = all(
        getattr(type(tokenizer), name) is getattr(PreTrainedTokenizerFast, name)
        for name in ("__call__", "_encode_plus")
    )
    return tokenizer.backend_tokenizer if plain else None
