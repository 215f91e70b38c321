"""Rows to documents, pairs and prompts, with a survey of what was read. Torch-free.

Rows are read one at a time, in the order of the files. Documents and pairs go to disk (`rlhf_core.data.store`) and are read from there
one by one, in the order of the mixture; prompts, which carry their row, stay in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.config import Data
from rlhf_core.data.columns import Kind, Located, conversation_of, preference_of, prompt_of
from rlhf_core.data.documents import DataReport, Document, Loaded, Message, Pair, Prompt, answered
from rlhf_core.data.rows import mixture_of, names, placed_rows, unusable
from rlhf_core.data.store import Shape, Writer, stored
from rlhf_core.data.survey import ANSWER_CUT, Made, Surveyor
from rlhf_core.stage import digest

if TYPE_CHECKING:  # chat imports transformers, which checking columns does not need
    from rlhf_core.data.chat import Renderer

PROGRESS_SECONDS = 20.0
DOCUMENTS = Shape(1, lambda documents, _: documents[0])
PAIRS = Shape(2, lambda documents, margin: Pair(documents[0], documents[1], margin))
SAME, SAME_CUT = "chosen and rejected are the same", "chosen and rejected are the same within the token limit"


def sft_documents(data: Data, renderer: Renderer, max_len: int, seed: int, folder: Path | None = None) -> Loaded[Document]:
    """Conversations (`messages`, or `prompt` and `response`) as documents of at most `max_len` tokens.

    A longer one is cut on the right and counted, nothing is forced onto it; one without an answer (left) to train on is dropped and
    counted. `folder` keeps the documents for a resumed run. Raises ValueError as `load_rows`, for missing columns and wrong types, and
    when no row is left.
    """

    def make(located: Located) -> Made:
        whole = at(located.where, renderer.conversation, conversation_of(located))
        document = whole.cut(max_len)
        answer = sum(whole.mask)
        prompt = whole.mask.index(True) if answer else len(whole)
        if not any(document.mask):
            return Made((), 0, 1, ANSWER_CUT if answer else "no answer", prompt, (answer,) if answer else ())
        return Made([((document,), 0.0)], len(whole) > max_len, 1, "", prompt, (answer,))

    why = f"no answer within the first {max_len} tokens"
    return collect(data, renderer, "sft", max_len, seed, make, DOCUMENTS, why, folder)


def preference_pairs(data: Data, renderer: Renderer, max_len: int, seed: int, folder: Path | None = None) -> Loaded[Pair]:
    """Pairs of documents of at most `max_len` tokens with the same prompt tokens.

    When a pair is longer the prompt keeps its end, down to half of `max_len`; then the answers are cut on the right. Both count as
    truncated. Rows without a preference and pairs whose answers are (or become) the same are dropped and counted. Folder and errors
    as in `sft_documents`.
    """

    def make(located: Located) -> Made:
        preference = preference_of(located)
        if preference.chosen == preference.rejected:
            return Made((), 0, 1, SAME)
        texts = (preference.chosen, preference.rejected)
        (chosen, rejected), lengths, cut = answers_within(located.where, renderer, preference.prompt, texts, max_len, preference.cut)
        if not any(chosen.mask) or not any(rejected.mask):
            return Made((), 0, 1, ANSWER_CUT, *lengths)
        if chosen.tokens == rejected.tokens:
            return Made((), 0, 1, SAME_CUT, *lengths)
        return Made([((chosen, rejected), preference.margin)], cut, 1, "", *lengths)

    why = f"no preference, or chosen and rejected the same within {max_len} tokens"
    return collect(data, renderer, "preference", max_len, seed, make, PAIRS, why, folder)


def prompts(data: Data, renderer: Renderer, prompt_max_len: int, seed: int) -> Loaded[Prompt]:
    """Prompts of at most `prompt_max_len` tokens; a longer one keeps its end (`Renderer.prompt_within`) and is counted.

    Errors as in `sft_documents`.
    """
    renderer.check_limit(prompt_max_len)
    mixture, surveyor = mixture_of(data, seed), Surveyor(data, "prompt", prompt_max_len)
    found: list[tuple[int, Prompt]] = []
    for placed in placed_rows(data, seed, "prompt", mixture):
        located, messages = placed.located, prompt_of(placed.located)
        tokens, truncated = at(located.where, renderer.prompt_within, messages, prompt_max_len)
        found.append((placed.place, Prompt(tuple(messages), tokens, located.row, truncated)))
        surveyor.see(placed, Made([((), 0.0)], truncated, 1, "", len(tokens)))
    items = [item for _, item in sorted(found, key=lambda pair: pair[0])]
    cut, tokens = sum(item.truncated for item in items), sum(len(item.tokens) for item in items)
    return Loaded(items, DataReport(len(items), len(items), cut, 0, tokens, surveyor.finish(mixture)))


def collect(
    data: Data,
    renderer: Renderer,
    kind: Kind,
    limit: int,
    seed: int,
    make: Callable[[Located], Made],
    shape: Shape,
    why: str,
    folder: Path | None,
) -> Loaded[Any]:
    """The items that `make` gives for the rows, on disk, with their report. ValueError when there are none, `why` says the reason."""
    renderer.check_limit(limit)

    def build(writer: Writer) -> DataReport:
        mixture, surveyor = mixture_of(data, seed), Surveyor(data, kind, limit)
        rows = truncated = 0
        told = time.monotonic()
        for placed in placed_rows(data, seed, kind, mixture):
            lacks = unusable(placed.located, kind)
            made = Made((), 0, 1, lacks) if lacks else make(placed.located)
            for documents, value in made.items:
                writer.add(placed.place, documents, value)
            surveyor.see(placed, made)
            rows += made.rows
            truncated += made.cut
            if time.monotonic() - told > PROGRESS_SECONDS:
                told = time.monotonic()
                print(f"reading {names(data)}: {rows:,} rows, {writer.tokens:,} tokens", flush=True)
        if not writer.items:
            raise ValueError(f"{names(data)}: all {rows} rows were dropped ({why}): raise the token limit or correct the data")
        return DataReport(rows, writer.items, truncated, rows - writer.items, writer.tokens, surveyor.finish(mixture))

    return stored(folder, f"data-{_key(data, renderer, kind, limit, seed)}", shape, build)


def answers_within(
    where: str, renderer: Renderer, messages: list[Message], texts: Sequence[str], max_len: int, cut: Sequence[bool] = ()
) -> tuple[list[Document], tuple[int, list[int]], bool]:
    """Answers to one prompt as documents of at most `max_len` tokens with the same prompt tokens; the tokens that prompt and answers
    had before; whether something was cut.

    The prompt keeps its end, down to half of `max_len`; then the answers are cut on the right. `cut`: those that had no end of their own
    when they were sampled, and are given none.
    """
    prompt = at(where, renderer.prompt, messages)
    said = [renderer.said(messages, text) for text in texts]
    said = [tokens[:-1] if unended else tokens for tokens, unended in zip(said, cut or [False] * len(said), strict=True)]
    lengths = len(prompt), [len(tokens) for tokens in said]
    longest = max(lengths[1])
    over = len(prompt) + longest > max_len
    if over:
        prompt, _ = renderer.prompt_within(messages, max(max_len - longest, max_len // 2, renderer.frame_len + 1))
    return [answered(prompt, tokens).cut(max_len) for tokens in said], lengths, over


def at(where: str, render: Any, *values: Any) -> Any:
    """Calls the renderer, and adds the row to its errors."""
    try:
        return render(*values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _key(data: Data, renderer: Renderer, kind: Kind, limit: int, seed: int) -> str:
    """A digest of all that decides the documents; local files by size and time of change."""
    files = [Path(source.path) for source in data.sources]
    states = [[file.stat().st_size, file.stat().st_mtime_ns] if file.is_file() else [] for file in files]
    tokenizer = renderer.tokenizer
    known = [str(tokenizer.name_or_path), len(tokenizer), str(tokenizer.chat_template)]
    return digest({"data": data.model_dump(mode="json"), "files": states, "tokenizer": known, "kind": kind, "limit": limit, "seed": seed})
