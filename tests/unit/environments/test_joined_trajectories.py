"""Several conversations of an episode as one document: each attends to itself alone, only what was sampled is
trained on, and limits hold for all together."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import Document, Prompt
from rlhf_core.data.packing import Passes
from rlhf_core.environments.episode_contract import Episode
from rlhf_core.environments.trajectories.calls import call_format
from rlhf_core.environments.trajectories.joined_trajectories import JoinedTrajectories, joined_experts
from rlhf_core.environments.trajectories.trajectory import Full, Limits
from rlhf_core.models.policy import Policy
from rlhf_core.objectives.collate import collate
from rlhf_core.rollout.engine_contract import SampledAnswer
from rlhf_core.stages.ppo.rollout_records import restored, stored
from rlhf_core.stages.ppo.sampling.rollout_group import of_episode
from tests.support.templates import save_tokenizer
from tests.unit.models.test_models import FAMILIES, logprobs_by_document

LIMITS = Limits(turns=6, prompt_tokens=100, tokens=300, answer_tokens=50)
VERSION = 7


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer(load_tokenizer(str(save_tokenizer("hermes", tmp_path_factory.mktemp("hermes")))), "chat")


def joined(renderer: Renderer, limits: Limits = LIMITS) -> JoinedTrajectories:
    messages = ({"role": "user", "content": "Go"},)
    prompt = Prompt(messages, renderer.prompt(messages), {"n": 1}, False)
    return JoinedTrajectories(prompt, renderer, limits, [], lambda: call_format(renderer))


def begins(number: int, text: str, **more: Any) -> dict[str, Any]:
    return {"conversation": number, "ask": [{"role": "user", "content": text}], "tools": [], **more}


def answer(renderer: Renderer, text: str, value: float = -1.0) -> SampledAnswer:
    tokens = [*renderer.tokenizer(text, add_special_tokens=False).input_ids, renderer.end_token_id]
    return SampledAnswer(tokens, [value] * len(tokens), True, versions=((0, VERSION),))


def asked(
    paths: JoinedTrajectories, renderer: Renderer, call: int, request: dict[str, Any], text: str
) -> None:
    paths.ask(call, request)
    paths.take(call, answer(renderer, text, -1.0 - call))


def episode(renderer: Renderer) -> JoinedTrajectories:
    """Conversation 1 with two answers, conversation 2 with one between them, and a fork of 1."""
    paths = joined(renderer)
    asked(paths, renderer, 0, begins(1, "first"), "one")
    asked(paths, renderer, 1, begins(2, "other"), "two")
    asked(paths, renderer, 2, begins(1, "more"), "three")
    asked(paths, renderer, 3, begins(3, "else", fork=[1, 1]), "four")
    return paths


def test_the_document_has_every_answer_once(renderer: Renderer) -> None:
    paths = episode(renderer)
    document = paths.document
    assert paths.turns == 4 and paths.conversations == 3 and len(document.starts) == 2
    edges = [0, *document.starts, len(document)]
    parts = [slice(start, end) for start, end in pairwise(edges)]
    texts = [renderer.decoded(list(document.token_array[part]), True) for part in parts]
    assert ["two" in text for text in texts] == [True, False, False], "in the order of their last answers"
    assert "three" in texts[1] and "four" in texts[2] and "one" in texts[1] and "one" in texts[2]
    sampled = [renderer.decoded(list(document.token_array[p][document.mask_array[p]]), True) for p in parts]
    assert sampled == ["two", "onethree", "four"], "the fork does not train on what it has from the first"
    assert [list(document.positions[part]) for part in parts] == [
        list(range(p.stop - p.start)) for p in parts
    ]
    logprobs = paths.logprobs
    assert sorted(set(logprobs[document.mask_array].tolist())) == [-4.0, -3.0, -2.0, -1.0]
    assert not logprobs[~document.mask_array].any()
    starts = [first for first, _ in paths.versions]
    assert all(document.mask_array[first] and not document.mask_array[first - 1] for first in starts)


def test_a_fork_has_the_tokens_of_its_origin(renderer: Renderer) -> None:
    paths = joined(renderer)
    asked(paths, renderer, 0, begins(1, "first"), "o n  e")
    before = list(paths.document.tokens)
    tokens, _ = paths.ask(1, begins(2, "else", fork=[1, 1]))
    assert tokens[: len(before)] == before


def test_rewards_stand_at_the_ends_of_their_answers(renderer: Renderer) -> None:
    paths = episode(renderer)
    rewards = paths.rewarded({0: 0.5, 1: 0.25, 2: 0.0, 3: 2.0})
    assert rewards == [0.5, 0.25, 0.0, 2.0]
    placed = paths.early(rewards)
    assert placed is not None and placed.sum() == 0.75
    document = paths.document
    for reward, text in ((0.25, "two"), (0.5, "one")):
        end = int(np.flatnonzero(placed == reward)[0])
        size = len(answer(renderer, text).tokens)
        said = renderer.decoded(list(document.token_array[end + 1 - size : end + 1]), True)
        assert said == text and document.mask_array[end + 1 - size : end + 1].all()
    assert paths.early([0.0, 0.0, 0.0, 1.0]) is None


def test_an_answer_that_nobody_got_is_not_there(renderer: Renderer) -> None:
    paths = episode(renderer)
    paths.ask(4, begins(3, "on"))
    paths.take(4, SampledAnswer([5, 6], [-9.0, -9.0], False, versions=((0, VERSION),)))
    asked(paths, renderer, 5, begins(4, "alone"), "five")
    assert paths.turns == 6 and paths.conversations == 4
    expected = episode(renderer)
    assert paths.rewarded({0: 0.0, 1: 0.0, 2: 0.0, 3: 1.0}) == [0.0, 0.0, 0.0, 1.0]
    assert paths.document == expected.document and (paths.logprobs == expected.logprobs).all()
    assert paths.versions == expected.versions and paths.messages == expected.messages
    assert (paths.turns, paths.conversations, paths.finished, paths.ended) == (4, 3, True, True)
    one = joined(renderer)
    asked(one, renderer, 0, {"conversation": 0, "ask": []}, "lost")
    with pytest.raises(LookupError):
        one.rewarded({})


def test_an_answer_that_nobody_got_does_not_follow_a_refusal(renderer: Renderer) -> None:
    paths = joined(renderer, LIMITS._replace(turns=2))
    asked(paths, renderer, 0, begins(1, "a"), "one")
    paths.ask(1, begins(2, "b"))
    paths.cut("turns")
    paths.take(1, answer(renderer, "two"))
    assert paths.finished
    paths.rewarded({0: 1.0})
    assert not paths.finished


def test_limits_hold_for_all_conversations(renderer: Renderer) -> None:
    few = joined(renderer, LIMITS._replace(turns=2))
    asked(few, renderer, 0, begins(1, "a"), "one")
    few.ask(1, begins(2, "b"))
    with pytest.raises(Full, match="max_turns"):  # the second waits
        few.ask(2, begins(3, "c"))
    few.cut("turns")
    assert not few.finished and few.ended_by == "turns"
    few.take(1, answer(renderer, "two"))
    assert few.finished and few.ended_by is None, "an answer came after the refusal"
    size = len(renderer.prompt(begins(1, "a")["ask"]))
    small = joined(renderer, Limits(turns=9, prompt_tokens=size, tokens=size + 10, answer_tokens=None))
    assert small.ask(0, begins(1, "a"))[1] == size + 10
    with pytest.raises(Full, match="prompt_max_len"):  # the first may take all that it needs
        small.ask(1, begins(2, "b"))
    small.take(0, answer(renderer, "x"))
    assert not small.ask(1, begins(2, "b"))[1] > 10
    with pytest.raises(Full, match="prompt_max_len"):
        joined(renderer).ask(0, begins(1, "long " * 200))
    assert joined(renderer).ask(0, begins(1, "a", most=3))[1] == 3


def test_a_request_that_is_given_up_leaves_nothing(renderer: Renderer) -> None:
    paths = joined(renderer)
    asked(paths, renderer, 0, begins(1, "a"), "one")
    size = paths._paths[1].size
    paths.ask(1, begins(1, "more"))
    paths.ask(2, begins(2, "other"))
    assert paths._paths[1].size > size
    paths.give_up(1)
    paths.give_up(2)
    assert paths._paths[1].size == size and list(paths._paths) == [0, 1]


def test_an_episode_with_several_conversations_is_restored(renderer: Renderer) -> None:
    rollout = of_episode(Episode(episode(renderer), [0.5, 0.0, 0.0, 2.0], "", 1, 0.0))
    again = restored(stored(rollout), rollout.prompt, None)
    assert again.document == rollout.document and again.document.starts == rollout.document.starts
    assert (again.sampler_logprobs == rollout.sampler_logprobs).all()
    assert again.own is not None and rollout.own is not None and rollout.own.early is not None
    assert (again.own.early == rollout.own.early).all() and again.own.turns == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_each_sequence_sees_itself_alone(family: str) -> None:
    torch.manual_seed(0)
    policy = Policy(FAMILIES[family]().eval())
    first = Document([5, 6, 7, 8, 9], [False, False, True, True, False])
    second = Document([11, 12, 13], [False, True, True])
    other = Document([21, 22, 23, 24], [False, False, True, True])
    tokens = [*first.tokens, *second.tokens]
    whole = Document(tokens, [*first.mask, *second.mask], starts=(len(first),))
    alone = logprobs_by_document(policy, [[first], [second], [other]])
    found = logprobs_by_document(policy, [[whole, other]])
    torch.testing.assert_close(found[0], torch.cat(alone[:2]), atol=1e-6, rtol=0)
    torch.testing.assert_close(found[1], alone[2], atol=1e-6, rtol=0)


def test_sequences_share_no_prompt_and_are_not_cut_wrongly() -> None:
    plain = Document([1, 2, 3, 4], [False, False, True, True])
    whole = Document([1, 2, 3, 1, 2, 5], [False, False, True, False, False, True], starts=(3,))
    assert plain.after(whole) is plain and whole.after(plain) is whole
    passes = Passes(1, 64, share=True)
    row = passes.branched([plain, whole, plain, plain])
    assert [document.shared for document in row] == [0, 0, 0, 2]
    assert passes.together([whole, plain, plain]) == [[0], [1, 2]]
    positions = collate([row], pad_token_id=0).positions[0].tolist()
    assert positions == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 2, 3]
    assert whole.cut(4).starts == (3,) and whole.cut(3).starts == ()
    with pytest.raises(ValueError, match="several conversations"):
        Passes(1, 64, apart=True).rows_of([whole])


def test_experts_of_sequences_are_joined() -> None:
    one = np.zeros((2, 3, 2), np.uint8)
    found = joined_experts([one, one + 1])
    assert found is not None and found[:, 0, 0].tolist() == [0, 0, -1, 1, 1]
    assert joined_experts([one, None]) is None
