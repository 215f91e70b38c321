"""Answers and documents between processes: their arrays are read where they are stored, without a copy, and
mean the same there."""

from __future__ import annotations

import json
import pickle
import warnings
from typing import Any

import numpy as np
import pytest

from rlhf_core.data.documents import Document, Prompt, answered, compact
from rlhf_core.objectives.collate import collate
from rlhf_core.rollout.engine_contract import answer_of
from rlhf_core.stages.ppo.sampling.rollout_group import rollout

PROMPT = [7, 8]
TOKENS = [3, 4, 5]
LOGPROBS = [-1.0, -0.5, 0.0]


def travelled(value: Any) -> tuple[Any, list[bytes]]:
    """The value as another process of the node has it, and the buffers that Ray stores, which nobody may
    write to."""
    buffers: list[pickle.PickleBuffer] = []
    rest = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    stored = [buffer.raw().tobytes() for buffer in buffers]
    return pickle.loads(rest, buffers=stored), stored


def test_arrays_are_not_copied() -> None:
    answer, of_answer = travelled(answer_of(TOKENS, LOGPROBS, True))
    document, of_document = travelled(compact(PROMPT, TOKENS))
    assert [len(buffer) for buffer in of_answer] == [12, 12] and [len(buffer) for buffer in of_document] == [
        20,
        5,
    ]
    for values, buffer in zip(
        (answer.tokens, answer.logprobs, document.tokens, document.mask), of_answer + of_document, strict=True
    ):
        assert np.shares_memory(np.asarray(values), np.frombuffer(buffer, np.uint8))
    assert np.shares_memory(document.mask_array, np.frombuffer(of_document[1], np.uint8)), "nor is the mask"


def test_an_answer_means_the_same_where_it_arrives() -> None:
    before = answer_of(TOKENS, LOGPROBS, False)
    answer, _ = travelled(before)
    assert json.dumps([list(answer.tokens), list(answer.logprobs), answer.finished]) == json.dumps(
        [TOKENS, LOGPROBS, False]
    )
    prompt = Prompt((), PROMPT, {}, False)
    here = rollout(prompt, before)
    there = rollout(prompt, answer)
    assert here.document == there.document == answered(PROMPT, TOKENS) and there.answer == TOKENS
    assert here.sampler_logprobs.tolist() == there.sampler_logprobs.tolist() == [0, 0, *LOGPROBS]
    there.sampler_logprobs[0] = 1.0  # its own array: the stored one is free
    assert rollout(prompt, travelled(answer_of(TOKENS, [], True))[0]).sampler_logprobs.tolist() == [0] * 5


@pytest.mark.parametrize("of", [answered, compact])
def test_a_document_means_the_same_where_it_arrives(of: Any) -> None:
    plain = answered(PROMPT, TOKENS)
    other = answered(PROMPT, [9])
    found, second = (travelled(of(PROMPT, d.tokens[2:]))[0] for d in (plain, other))
    assert found == plain and plain == found and found.answer_start == 2 and found.cut(3) == plain.cut(3)
    assert second.after(found) == other.after(plain) and second.after(found).shared == 2
    assert travelled(Document([1], [False]))[0].answer_start == 1
    assert found.mask_array.dtype == bool and found.mask_array.tolist() == plain.mask_array.tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch warns of arrays that cannot be written to
        here, there = (collate([[d, e]], 0) for d, e in ((plain, other), (found, second)))
    for name in ("tokens", "positions", "documents", "mask"):
        assert getattr(here, name).equal(getattr(there, name))
        assert getattr(here, name).dtype == getattr(there, name).dtype
