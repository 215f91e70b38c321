"""Single answers, without a partner: labelled for KTO, and as documents for SFT on sampled answers. Torch-free."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from rlhf_core.config import Data
from rlhf_core.data.columns import Located, answer_of, labelled_of, reward_of
from rlhf_core.data.condition import reward_suffix, with_suffix
from rlhf_core.data.documents import Document, Labelled, Loaded
from rlhf_core.data.rows import placed_rows
from rlhf_core.data.sources import DOCUMENTS, answers_within, collect
from rlhf_core.data.store import Shape
from rlhf_core.data.survey import ANSWER_CUT, Made

if TYPE_CHECKING:
    from rlhf_core.data.chat import Renderer

LABELLED = Shape(1, lambda documents, label: Labelled(documents[0], bool(label)))


SuffixOf = Callable[[float], str]


class AnswerDocuments(NamedTuple):
    """Documents to train on; with a condition also what prompts end with by reward, and what the one with the highest reward does."""

    documents: Loaded[Document]
    best_suffix: str = ""
    suffix_of: SuffixOf | None = None


def labelled_answers(data: Data, renderer: Renderer, max_len: int, seed: int, folder: Path | None = None) -> Loaded[Labelled]:
    """Answers that are desirable or not, of at most `max_len` tokens, cut as pairs are; a preference pair gives one of each.

    The report counts answers: a pair is two rows. Folder and errors as in `sft_documents`.
    """

    def make(located: Located) -> Made:
        prompt, answers = labelled_of(located)
        documents, lengths, cut = answers_within(located.where, renderer, prompt, [text for text, _ in answers], max_len)
        kept = [((document,), float(label)) for document, (_, label) in zip(documents, answers, strict=True) if any(document.mask)]
        return Made(kept, cut * len(kept), len(answers), "" if len(kept) == len(answers) else ANSWER_CUT, *lengths)

    return collect(data, renderer, "labelled", max_len, seed, make, LABELLED, f"no answer within {max_len} tokens", folder)


def answer_documents(
    data: Data,
    renderer: Renderer,
    max_len: int,
    seed: int,
    condition: Literal["none", "reward"],
    folder: Path | None = None,
    suffix_of: SuffixOf | None = None,
) -> AnswerDocuments:
    """Prompts and responses, the mask on the response alone, of at most `max_len` tokens, cut as pairs are.

    condition `reward`: each prompt ends with its response's reward, standardised over all rows, which takes a pass of its own, or as
    `suffix_of` says: held-out prompts end as those trained on do. Folder and errors as in `sft_documents`.
    """
    kind: Literal["scored", "answer"] = "scored" if condition == "reward" else "answer"
    best_suffix = ""
    if condition == "reward" and suffix_of is None:
        rewards = array("d", (reward_of(placed.located) for placed in placed_rows(data, seed, kind)))
        suffix_of = reward_suffix(rewards)
        best_suffix = suffix_of(max(rewards))

    def make(located: Located) -> Made:
        prompt, text = answer_of(located)
        asked = with_suffix(prompt, suffix_of(reward_of(located)) if suffix_of else "")
        (document,), lengths, cut = answers_within(located.where, renderer, asked, [text], max_len)
        if not any(document.mask):
            return Made((), 0, 1, ANSWER_CUT, *lengths)
        return Made([((document,), 0.0)], cut, 1, "", *lengths)

    documents = collect(data, renderer, kind, max_len, seed, make, DOCUMENTS, f"no answer within {max_len} tokens", folder)
    return AnswerDocuments(documents, best_suffix, suffix_of)
