"""Builds documents, pairs and prompts from rows, with a survey of the data. Torch-free.

Rows are read one at a time, in the order of the files. Documents and pairs are written to disk
(`document_files.py`) and read back one by one, in the order of the mixture. Prompts, which contain their row,
stay in memory.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rlhf_core.config import Data
from rlhf_core.data.document_files import ItemShape, Writer, stored
from rlhf_core.data.documents import (
    Document,
    Labelled,
    Message,
    Pair,
    Prompt,
    answered,
    check_limit,
    reward_suffix,
    with_suffix,
)
from rlhf_core.data.pictures.message_parts import sources_in
from rlhf_core.data.pictures.picture_source import CUT_AWAY, MISNAMED, PICTURE_FAULTS, PictureFault
from rlhf_core.data.prompt_rows import prompt_within
from rlhf_core.data.rows.columns import (
    Kind,
    Located,
    answer_of,
    conversation_of,
    labelled_of,
    preference_of,
    reward_of,
    tools_of,
)
from rlhf_core.data.rows.mixture import mixture_of, names, placed_rows, unusable
from rlhf_core.data.survey import ANSWER_CUT, BuiltItems, DataReport, Loaded, Surveyor
from rlhf_core.system import progress
from rlhf_core.system.files import digest

if TYPE_CHECKING:  # chat imports transformers, which checking columns does not need
    from rlhf_core.data.chat import Renderer

PROGRESS_SECONDS = 20.0
DOCUMENTS = ItemShape(1, lambda documents, _: documents[0])
PAIRS = ItemShape(2, lambda documents, margin: Pair(documents[0], documents[1], margin))
LABELLED = ItemShape(1, lambda documents, label: Labelled(documents[0], bool(label)))
SuffixOf = Callable[[float], str]
Maker = Callable[[Located], BuiltItems]
UNWEIGHTED = "every answer has weight 0"
SAME = "chosen and rejected are the same"
SAME_CUT = "chosen and rejected are the same within the token limit"


def sft_documents(
    data: Data, renderer: Renderer, max_len: int, seed: int, folder: Path | None = None
) -> Loaded[Document]:
    """Builds documents of at most `max_len` tokens from conversations (`messages`, or `prompt` and
    `response`).

    Cuts a longer document on the right and counts it, without adding an end-of-turn token. Drops and counts a
    document without an answer within the limit. The documents are kept in `folder` for a resumed stage.
    Raises ValueError as `load_rows` does, for missing columns or wrong types, and if no row is left.
    """

    make = maker_of("sft", renderer, max_len)
    why = f"no answer within the first {max_len} tokens"
    return collect(data, renderer, "sft", max_len, seed, make, DOCUMENTS, why, folder)


def preference_pairs(
    data: Data, renderer: Renderer, max_len: int, seed: int, folder: Path | None = None
) -> Loaded[Pair]:
    """Builds pairs of documents of at most `max_len` tokens with the same prompt tokens.

    If a pair is longer, cuts the prompt first, down to half of `max_len`, and keeps its end; then cuts the
    answers on the right. Both count as truncated. Drops and counts rows without a preference, and pairs whose
    answers are (or become) equal. Folder and errors are as in `sft_documents`.
    """

    make = maker_of("preference", renderer, max_len)
    why = f"no preference, or chosen and rejected the same within {max_len} tokens"
    return collect(data, renderer, "preference", max_len, seed, make, PAIRS, why, folder)


def maker_of(kind: Kind, renderer: Renderer, limit: int, suffix_of: SuffixOf | None = None) -> Maker:
    """Returns a function from a row to a stage's items within `limit` tokens. `suffix_of` maps a reward to a
    prompt suffix, for scored rows.

    The function raises ValueError, with the row's place, for wrong types and for rows that the template
    rejects.
    """
    if kind == "sft":
        return partial(_conversation_within, renderer, limit)
    if kind == "preference":
        return partial(_pair_within, renderer, limit)
    if kind == "labelled":
        return partial(_labelled_within, renderer, limit)
    if kind == "prompt":
        return lambda located: prompt_within(renderer, limit, located)[1]
    return partial(_answer_within, renderer, limit, suffix_of)


def _conversation_within(renderer: Renderer, limit: int, located: Located) -> BuiltItems:
    messages = conversation_of(located)
    try:
        whole = at(located.where, renderer.conversation, messages, tools_of(located))
        misnamed = any(picture.source.is_misnamed for picture in whole.pictures)
    except PictureFault as fault:
        return BuiltItems((), 0, 1, fault.fact, marks=(fault.fact,))
    document = whole.cut(limit)
    marks = [MISNAMED] * misnamed + [CUT_AWAY] * (len(document.pictures) < len(whole.pictures))
    answer = sum(whole.mask)
    prompt = whole.mask.index(True) if answer else len(whole)
    if not any(document.mask):
        if answer:
            return BuiltItems((), 0, 1, ANSWER_CUT, prompt, (answer,), marks)
        return BuiltItems(
            (), 0, 1, UNWEIGHTED if any("weight" in message for message in messages) else "no answer", prompt
        )
    return BuiltItems([((document,), 0.0)], len(whole) > limit, 1, "", prompt, (answer,), marks)


def _pair_within(renderer: Renderer, limit: int, located: Located) -> BuiltItems:
    preference = preference_of(located)
    if preference.chosen == preference.rejected:
        return BuiltItems((), 0, 1, SAME)
    texts = (preference.chosen, preference.rejected)
    tools = tools_of(located)
    prompt = preference.prompt
    try:
        within = answers_within(located.where, renderer, prompt, texts, limit, preference.cut, tools)
        (chosen, rejected), lengths, cut = within
        marks = _picture_marks(prompt, chosen)
    except PictureFault as fault:
        return BuiltItems((), 0, 1, fault.fact, marks=(fault.fact,))
    if not any(chosen.mask) or not any(rejected.mask):
        return BuiltItems((), 0, 1, ANSWER_CUT, *lengths, marks)
    if chosen.tokens == rejected.tokens:
        return BuiltItems((), 0, 1, SAME_CUT, *lengths, marks)
    return BuiltItems([((chosen, rejected), preference.margin)], cut, 1, "", *lengths, marks)


def _picture_marks(prompt: list[Message], document: Document) -> list[str]:
    """Returns the facts about the images of a prompt, from a document that begins with it."""
    misnamed = any(picture.source.is_misnamed for picture in document.pictures)
    return [MISNAMED] * misnamed + [CUT_AWAY] * (len(document.pictures) < len(sources_in(prompt)))


def _labelled_within(renderer: Renderer, limit: int, located: Located) -> BuiltItems:
    prompt, answers = labelled_of(located)
    texts = [text for text, _ in answers]
    try:
        documents, lengths, cut = answers_within(
            located.where, renderer, prompt, texts, limit, tools=tools_of(located)
        )
        marks = _picture_marks(prompt, documents[0])
    except PictureFault as fault:
        return BuiltItems((), 0, len(answers), fault.fact, marks=(fault.fact,))
    kept = [
        ((document,), float(label))
        for document, (_, label) in zip(documents, answers, strict=True)
        if any(document.mask)
    ]
    dropped = "" if len(kept) == len(answers) else ANSWER_CUT
    return BuiltItems(kept, cut * len(kept), len(answers), dropped, *lengths, marks)


def _answer_within(
    renderer: Renderer, limit: int, suffix_of: SuffixOf | None, located: Located
) -> BuiltItems:
    prompt, text = answer_of(located)
    conditioned = with_suffix(prompt, suffix_of(reward_of(located)) if suffix_of else "")
    (document,), lengths, cut = answers_within(
        located.where, renderer, conditioned, [text], limit, tools=tools_of(located)
    )
    if not any(document.mask):
        return BuiltItems((), 0, 1, ANSWER_CUT, *lengths)
    return BuiltItems([((document,), 0.0)], cut, 1, "", *lengths)


def prompts(data: Data, renderer: Renderer, prompt_max_len: int, seed: int) -> Loaded[Prompt]:
    """Builds prompts of at most `prompt_max_len` tokens. A longer prompt keeps its end
    (`Renderer.prompt_within`) and is counted; a longer prompt with images is dropped.

    Errors are as in `sft_documents`.
    """
    check_limit(prompt_max_len, renderer.frame_len)
    mixture = mixture_of(data, seed)
    surveyor = Surveyor(data, "prompt", prompt_max_len, renderer.control_tokens)
    found: list[tuple[int, int, Prompt]] = []
    for placed in placed_rows(data, seed, "prompt", mixture):
        prompt, counted = prompt_within(renderer, prompt_max_len, placed.located)
        if prompt is not None:
            found.append((placed.place, placed.source, prompt))
        surveyor.see(placed, counted)
    found.sort(key=lambda entry: entry[0])
    items = [item for _, _, item in found]
    images = sum(len(item.pictures) for item in items)
    report = surveyor.finish(mixture, sum(len(item.tokens) for item in items), images)
    if not items:
        told = ", ".join(f"{why}: {count}" for why, count in report.survey.dropped.items())
        raise ValueError(f"{names(data)}: all prompts were dropped ({told}): correct them")
    return Loaded(items, report, array("i", (source for _, source, _ in found)))


def collect(
    data: Data,
    renderer: Renderer,
    kind: Kind,
    limit: int,
    seed: int,
    make: Maker,
    shape: ItemShape,
    why: str,
    folder: Path | None,
) -> Loaded[Any]:
    """Writes the items that `make` returns for each row to disk, and returns them with their report.

    Raises ValueError, with the reason `why`, if there are no items.
    """
    check_limit(limit, renderer.frame_len)

    def build(writer: Writer) -> DataReport:
        mixture = mixture_of(data, seed)
        surveyor = Surveyor(data, kind, limit, renderer.control_tokens)
        rows = 0
        faults: Counter[str] = Counter()  # faults of images
        printed = time.monotonic()
        for placed in placed_rows(data, seed, kind, mixture):
            lacks = unusable(placed.located, kind)
            made = BuiltItems((), 0, 1, lacks) if lacks else make(placed.located)
            for documents, value in made.items:
                writer.add(placed.place, documents, value)
            surveyor.see(placed, made)
            faults.update([made.dropped] if made.dropped in PICTURE_FAULTS else [])
            rows += made.rows
            if time.monotonic() - printed > PROGRESS_SECONDS:
                printed = time.monotonic()
                progress.made()
                print(f"reading {names(data)}: {rows:,} rows, {writer.tokens:,} tokens", flush=True)
        if not writer.items and faults:
            told = ", ".join(f"{fault}: {count}" for fault, count in faults.most_common())
            raise ValueError(f"{names(data)}: all {rows} rows were dropped ({told}): correct the images")
        if not writer.items:
            raise ValueError(
                f"{names(data)}: all {rows} rows were dropped ({why}): raise the token limit or correct the"
                " data"
            )
        return surveyor.finish(mixture, writer.tokens, writer.images)

    return stored(folder, f"data-{_key(data, renderer, kind, limit, seed)}", shape, build)


def answers_within(
    where: str,
    renderer: Renderer,
    messages: list[Message],
    texts: Sequence[str | Message],
    max_len: int,
    cut: Sequence[bool] = (),
    tools: Sequence[dict[str, Any]] = (),
) -> tuple[list[Document], tuple[int, list[int]], bool]:
    """Builds documents of at most `max_len` tokens, with the same prompt tokens, from answers to one prompt.

    Returns the documents, the lengths in tokens of the prompt and the answers before truncation, and whether
    anything was truncated. Cuts the prompt first, down to half of `max_len`, and keeps its end and the images
    of its last message; then cuts the answers on the right. Raises PictureFault if an image cannot be used,
    or if the kept images do not fit. `cut` says which answers the length limit of sampling ended; they get no
    end-of-turn token. `tools` are described in the prompt.
    """
    prompt: Document = at(where, renderer.prompt_document, messages, tools)
    answers = [at(where, renderer.response_tokens, messages, text, tools) for text in texts]
    answers = [
        tokens[:-1] if unended else tokens
        for tokens, unended in zip(answers, cut or [False] * len(answers), strict=True)
    ]
    lengths = len(prompt), [len(tokens) for tokens in answers]
    longest = max(lengths[1])
    over = len(prompt) + longest > max_len
    if over:
        least = renderer.least_of(messages, tools) + 1
        kept = max(max_len - longest, max_len // 2, least)
        prompt, _ = at(where, renderer.document_within, messages, kept, tools)
    if prompt.pictures and len(prompt) >= max_len:
        raise PictureFault(
            CUT_AWAY,
            f"{where}: the prompt with its images has {len(prompt)} tokens: raise the limit {max_len}",
        )
    tokens = list(prompt.tokens)
    documents = [answered(tokens, answer, prompt.pictures).cut(max_len) for answer in answers]
    return documents, lengths, over


def at(where: str, render: Any, *values: Any) -> Any:
    """Returns the renderer's result. Adds the row's place to its ValueErrors, except to errors about an image
    that cannot be used."""
    try:
        return render(*values)
    except PictureFault:
        raise
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _key(data: Data, renderer: Renderer, kind: Kind, limit: int, seed: int) -> str:
    """Returns a digest of everything that determines the documents. Local files are represented by size and
    mtime."""
    files = [Path(source.path) for source in data.sources]
    states = [[file.stat().st_size, file.stat().st_mtime_ns] if file.is_file() else [] for file in files]
    tokenizer = renderer.tokenizer
    known = [str(tokenizer.name_or_path), len(tokenizer), str(tokenizer.chat_template)]
    return digest(
        {
            "data": data.model_dump(mode="json"),
            "files": states,
            "tokenizer": known,
            "kind": kind,
            "limit": limit,
            "seed": seed,
        }
    )


class AnswerDocuments(NamedTuple):
    """Holds documents for training. With a reward condition, `suffix_of` maps a reward to its prompt's
    suffix, and `best_suffix` is the suffix of the highest reward."""

    documents: Loaded[Document]
    best_suffix: str = ""
    suffix_of: SuffixOf | None = None


def labelled_answers(
    data: Data, renderer: Renderer, max_len: int, seed: int, folder: Path | None = None
) -> Loaded[Labelled]:
    """Builds labelled answers of at most `max_len` tokens, cut like pairs. A preference pair gives one
    desirable and one undesirable answer.

    The report counts answers, so a pair counts as two rows. Folder and errors are as in `sft_documents`.
    """

    make = maker_of("labelled", renderer, max_len)
    return collect(
        data,
        renderer,
        "labelled",
        max_len,
        seed,
        make,
        LABELLED,
        f"no answer within {max_len} tokens",
        folder,
    )


def answer_documents(
    data: Data,
    renderer: Renderer,
    max_len: int,
    seed: int,
    condition: Literal["none", "reward"],
    folder: Path | None = None,
    suffix_of: SuffixOf | None = None,
) -> AnswerDocuments:
    """Builds documents of at most `max_len` tokens from prompts and responses, cut like pairs, with the mask
    only on the response.

    With condition `reward`, each prompt ends with `suffix_of` applied to its response's reward. For held-out
    data, pass the training data's `suffix_of`. Without it, the rewards are standardised over all rows, which
    requires reading the data once more. Folder and errors are as in `sft_documents`.
    """
    kind: Literal["scored", "answer"] = "scored" if condition == "reward" else "answer"
    best_suffix = ""
    if condition == "reward" and suffix_of is None:
        rewards = array("d", (reward_of(placed.located) for placed in placed_rows(data, seed, kind)))
        suffix_of = at(names(data), reward_suffix, rewards)
        best_suffix = suffix_of(max(rewards))

    make = maker_of(kind, renderer, max_len, suffix_of)
    documents = collect(
        data, renderer, kind, max_len, seed, make, DOCUMENTS, f"no answer within {max_len} tokens", folder
    )
    return AnswerDocuments(documents, best_suffix, suffix_of)
