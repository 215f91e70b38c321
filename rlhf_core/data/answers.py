"""Single answers, without a partner: labelled for KTO, and as documents for SFT on sampled answers. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from rlhf_core.config import Data
from rlhf_core.data.condition import reward_suffixes, with_suffix
from rlhf_core.data.documents import Document, Labelled, Loaded
from rlhf_core.data.sources import answer_of, answers_within, labelled_of, loaded, located_rows, reward_of

if TYPE_CHECKING:
    from rlhf_core.data.chat import Renderer


class AnswerDocuments(NamedTuple):
    """Documents to train on, and the suffix of the prompt whose answer has the highest reward ("" without condition)."""

    documents: Loaded[Document]
    best_suffix: str


def labelled_answers(data: Data, renderer: Renderer, max_len: int, seed: int) -> Loaded[Labelled]:
    """Answers that are desirable or not, of at most `max_len` tokens, cut as pairs are; a preference pair gives one of each.

    The report counts answers: a pair is two rows. Errors as in `sft_documents`.
    """
    renderer.check_limit(max_len)
    items: list[Labelled] = []
    rows = truncated = 0
    for located in located_rows(data, seed, "labelled"):
        prompt, answers = labelled_of(located)
        documents, cut = answers_within(located.where, renderer, prompt, [text for text, _ in answers], max_len)
        kept = [Labelled(document, label) for document, (_, label) in zip(documents, answers, strict=True) if any(document.mask)]
        items += kept
        rows += len(answers)
        truncated += cut * len(kept)
    return loaded(data, items, rows, truncated, sum(len(item.document) for item in items), f"no answer within {max_len} tokens")


def answer_documents(data: Data, renderer: Renderer, max_len: int, seed: int, condition: Literal["none", "reward"]) -> AnswerDocuments:
    """Prompts and responses, the mask on the response alone, of at most `max_len` tokens, cut as pairs are.

    condition `reward`: each prompt ends with its response's reward, standardised over all rows. Errors as in `sft_documents`.
    """
    renderer.check_limit(max_len)
    rows = located_rows(data, seed, "scored" if condition == "reward" else "answer")
    rewards = [reward_of(located) for located in rows] if condition == "reward" else []
    suffixes = reward_suffixes(rewards) if rewards else [""] * len(rows)
    items: list[Document] = []
    truncated = 0
    for located, suffix in zip(rows, suffixes, strict=True):
        prompt, text = answer_of(located)
        (document,), cut = answers_within(located.where, renderer, with_suffix(prompt, suffix), [text], max_len)
        if any(document.mask):
            items.append(document)
            truncated += cut
    documents = loaded(data, items, len(rows), truncated, sum(map(len, items)), f"no answer within {max_len} tokens")
    return AnswerDocuments(documents, suffixes[max(range(len(rewards)), key=rewards.__getitem__)] if rewards else "")
