"""Decodes the sampled tokens that a reward source reads as text, in one batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from tokenizers.decoders import DecodeStream

from rlhf_core.rewards.reward_contract import Sample
from rlhf_core.stages.ppo.rollout_records import Rollout

Lengths = Callable[[Sequence[int]], list[int]]
# Arguments: the tokens of each text, and whether to leave out special tokens.
Decode = Callable[[Sequence[Sequence[int]], bool], list[str]]
WAITING = 16  # most consecutive tokens that wait for a character; each one decodes all of them again


def decoder(tokenizer: Any) -> Decode:
    """Returns a function that decodes many texts, on all cores if the tokenizer supports it. Its results
    equal the results of `tokenizer.decode`."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None or getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return lambda rows, skip: [str(tokenizer.decode(list(row), skip_special_tokens=skip)) for row in rows]
    return lambda rows, skip: list(fast.decode_batch([list(row) for row in rows], skip_special_tokens=skip))


def lengths_of(tokenizer: Any) -> Lengths:
    """Returns a function that counts the complete characters of a text after each of its tokens, without
    special tokens."""
    fast: Any = getattr(tokenizer, "backend_tokenizer", None)

    def count(tokens: Sequence[int]) -> list[int]:
        stream = DecodeStream(skip_special_tokens=True)
        return list(accumulate(len(stream.step(fast, token) or "") for token in tokens))

    def count_slowly(tokens: Sequence[int]) -> list[int]:
        texts = (
            str(tokenizer.decode(list(tokens[: i + 1]), skip_special_tokens=True)) for i in range(len(tokens))
        )
        return list(accumulate((len(text.rstrip("\ufffd")) for text in texts), max))

    return count_slowly if fast is None else count


class TokenTexts(NamedTuple):
    """Holds the text of each token and the indices of special tokens. The text is "" if a later token
    completes the character."""

    texts: list[str]
    special: list[int]


def token_texts_of(tokenizer: Any) -> Callable[[Sequence[int]], TokenTexts]:
    """Returns a function that splits a text into the texts of its tokens, including special tokens. Joined,
    they give the whole text, except for bytes that form no character, at its end or in `WAITING` consecutive
    tokens."""
    fast: Any = getattr(tokenizer, "backend_tokenizer", None)
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    special = {token for token, about in added.items() if about.special}
    special |= set(getattr(tokenizer, "all_special_ids", ()))

    def split(tokens: Sequence[int]) -> list[str]:
        if fast is None:
            return [str(tokenizer.decode([token])) for token in tokens]
        stream = DecodeStream(skip_special_tokens=False)
        waiting = 0
        texts = []
        try:
            for token in tokens:
                text = stream.step(fast, token) or ""
                texts.append(text)
                waiting = 0 if text else waiting + 1
                if waiting == WAITING:
                    stream = DecodeStream(skip_special_tokens=False)
                    waiting = 0
        except Exception:  # a Rust error: a token whose text changes the text before it
            return [fast.decode([token], skip_special_tokens=False) for token in tokens]
        return texts

    def of_text(tokens: Sequence[int]) -> TokenTexts:
        return TokenTexts(split(tokens), [at for at, token in enumerate(tokens) if token in special])

    return of_text


def with_own_ends(found: Sequence[Sample], rollouts: Sequence[Rollout]) -> list[Sample]:
    """Returns `samples`, marked as finished if their text is complete, even in an episode that a limit
    truncated afterwards. Re-tokenising gives such texts an end token, as in the sampled tokens."""
    ended = [rollout.finished if rollout.own is None else rollout.own.ended for rollout in rollouts]
    return [sample._replace(finished=end) for sample, end in zip(found, ended, strict=True)]


def samples(rollouts: Sequence[Rollout], decode: Decode, wanted: Collection[str]) -> list[Sample]:
    """Converts rollouts to the form that reward sources read. Texts that are not in `wanted` (`responses`,
    `query`) are empty."""
    nothing = [""] * len(rollouts)
    responses = (
        decode([[] if rollout.messages else rollout.answer for rollout in rollouts], True)
        if "responses" in wanted
        else nothing
    )
    queries = (
        decode([rollout.document.tokens for rollout in rollouts], False) if "query" in wanted else nothing
    )
    found = []
    for rollout, response, query in zip(rollouts, responses, queries, strict=True):
        prompt = rollout.prompt.messages
        answer = response
        if rollout.messages:
            *before, last = (
                rollout.messages
                if rollout.messages[-1]["role"] == "assistant"
                else (*rollout.messages, {"content": ""})
            )
            prompt = tuple(before)
            answer = last["content"]
        found.append(Sample(prompt, answer, rollout.prompt.row, rollout.finished, query))
    return found
