"""A prompt shared by several answers is stored once in a packed row: the same numbers from fewer tokens."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from rlhf_core.data.documents import Document, Pair
from rlhf_core.data.packing import Passes
from rlhf_core.models.kernels import attention, choose
from rlhf_core.models.policy import Policy, Scorer
from rlhf_core.objectives.collate import collate
from rlhf_core.stages.dpo import pair_logprobs
from rlhf_core.stages.ppo.roles.actor import Actor
from rlhf_core.stages.ppo.roles.read_only import ReferenceModel, Reward
from rlhf_core.stages.ppo.roles.role_passes import ModelSpec, passes_of
from rlhf_core.stages.ppo.roles.trained import Critic, Update
from rlhf_core.stages.ppo.rollout_records import Experience
from rlhf_core.stages.reference_logprobs import answer_logprobs_and_balance
from rlhf_core.stages.reward_model import pair_scores
from tests.support.tiny_roles import models, plain_engine, ppo
from tests.unit.models.test_attention import WINDOWED, kernel, plain_varlen
from tests.unit.models.test_models import FAMILIES, SHAPE

APART = Passes(1, 4096)
TOGETHER = Passes(1, 4096, share=True)
__all__ = ["kernel", "models", "plain_engine"]


def pairs() -> list[Pair]:
    """Prompts of 1 to 9 tokens; one pair whose answers have a common start, one whose chosen answer is a
    single token."""
    rng = random.Random(0)

    def words(count: int) -> list[int]:
        return [rng.randrange(3, 97) for _ in range(count)]

    found = []
    for prompt, chosen, rejected in ((9, 4, 6), (1, 5, 2), (6, 1, 7), (4, 3, 3)):
        asked = words(prompt)
        answers = [words(chosen), words(rejected)]
        if prompt == 4:
            answers[1][:2] = answers[0][:2]
        better, worse = (Document(asked + said, [False] * prompt + [True] * len(said)) for said in answers)
        found.append(Pair(better, worse, 0.0))
    return found


def test_only_the_prompt_is_shared() -> None:
    first, second, third, fourth = pairs()
    assert [pair.rejected.after(pair.chosen).shared for pair in pairs()] == [
        9,
        1,
        6,
        4,
    ], "not the beginning of an answer"
    assert first.rejected.after(second.chosen).shared == 0
    assert Document([5, 6, 7], [True] * 3).after(Document([5, 6, 7], [True] * 3)).shared == 0
    assert Document([5, 6], [False, False]).after(Document([5, 6, 7], [False, False, True])).shared == 0, (
        "nothing would be left"
    )
    row = TOGETHER.rows_of([third.chosen, third.rejected, fourth.rejected, fourth.chosen, first.chosen])
    assert [[document.shared for document in row] for row in row] == [[0, 6, 0, 4, 0]]
    assert APART.rows_of([third.chosen, third.rejected]) == [[third.chosen, third.rejected]]
    assert [TOGETHER.row_tokens(pair) for pair in pairs()] == [19, 8, 14, 10]
    assert APART.row_tokens(first) == 28


def test_a_prompt_that_begins_like_another_is_not_shared() -> None:
    """Otherwise it could not be distinguished from a continuation of the answer before it."""
    longer, short, middle = (
        Document([*range(1, n + 1), 60, 61], [False] * n + [True] * 2) for n in (6, 2, 4)
    )
    assert [
        document.shared for document in TOGETHER.branched([longer, longer, short, short, middle, middle])
    ] == [0, 6, 0, 2, 0, 4]


def test_documents_see_the_prompt_and_themselves() -> None:
    """Beside a search through the row for what each token may see."""
    documents = [document for pair in pairs() for document in (pair.chosen, pair.rejected)]
    batch = collate(TOGETHER.rows_of(documents), 0)
    found = attention.document_bounds(batch.positions, torch.device("cpu"))
    queries = found["cu_seq_lens_q"].tolist()
    keys = found["cu_seq_lens_k"].tolist()
    tokens = batch.tokens.flatten().tolist()
    seen = [[tokens[i] for i in found["keys"][start:end].tolist()] for start, end in pairwise(keys)]
    packed = [tokens[start:end] for start, end in pairwise(queries)]
    assert seen[: len(documents)] == [document.tokens for document in documents]
    for whole, own in zip(seen, packed, strict=True):
        assert whole[-len(own) :] == own, "queries are the last"
    assert found["max_length_q"] == max(map(len, packed)) and found["max_length_k"] == max(map(len, seen))
    assert sum(map(len, packed)) == batch.tokens.numel() and len(found["keys"]) == keys[-1]


class Plain:
    """An engine that is the model."""

    def __init__(self, module: torch.nn.Module):
        self.module = module
        self.device = torch.device("cpu")
        self.tokens = 0

    def __call__(self, tokens: torch.Tensor, *rest: Any) -> Any:
        self.tokens = tokens.numel()
        return self.module(tokens, *rest)


@pytest.mark.parametrize("family", [*FAMILIES, *WINDOWED])
def test_policies_say_the_same_of_pairs(family: str, kernel: list[int]) -> None:
    torch.manual_seed(0)
    policy = Policy({**FAMILIES, **WINDOWED}[family]().eval())
    policy.model.set_attn_implementation(attention.VARLEN)
    numbers = []
    packed = []
    for passes in (APART, TOGETHER):
        policy.zero_grad()
        plain: Any = Plain(policy)
        found = pair_logprobs(plain, pairs(), 0, False, passes)
        (
            found.responses[0].sum()
            - 2 * found.responses[1].sum()
            + found.tokens[found.chosen_mask].square().sum()
        ).backward()
        numbers.append(
            [found.responses.detach(), *(p.grad.clone() for p in policy.parameters() if p.grad is not None)]
        )
        packed.append(plain.tokens)
    assert packed == [72, 56], "of 71 and 51 tokens"
    for apart, together in zip(*numbers, strict=True):
        torch.testing.assert_close(together, apart, atol=2e-5, rtol=2e-5)


def test_attention_that_knows_nothing_of_shared_prompts_refuses() -> None:
    policy: Any = Plain(Policy(FAMILIES[next(iter(FAMILIES))]().eval()))
    assert not attention.can_share(policy.module.model, policy.device)
    policy.module.model.config._attn_implementation = attention.FLASH
    with pytest.raises(ValueError, match="flash_attention_2 cannot go on from another document's prompt"):
        pair_logprobs(policy, pairs(), 0, False, TOGETHER)


@pytest.mark.parametrize("aligned", [True, False])
def test_prompts_are_shared_where_the_kernel_puts_queries_behind_their_keys(
    aligned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(
        *arguments: Any, softmax_scale: float, causal: bool, window_size: tuple[int, int]
    ) -> torch.Tensor:
        query, key, value, queries, keys, longest, longest_key = arguments
        if not aligned:  # causal from the first key on
            first = torch.cat(
                [
                    torch.arange(n) + start
                    for n, start in zip(queries.diff().tolist(), keys.tolist(), strict=False)
                ]
            )
            key = key[first]
            value = value[first]
            keys = queries
            longest_key = longest
        rows = (query, key, value, queries, keys, longest, longest_key)
        return plain_varlen(*rows, scale=softmax_scale, window_size=window_size, enable_gqa=True)

    policy = Policy(FAMILIES[next(iter(FAMILIES))]().eval())
    policy.model.set_attn_implementation(attention.VARLEN)
    monkeypatch.setattr(choose, "flash_kernel", lambda: kernel)
    assert attention.can_share(policy.model, torch.device("cpu")) == aligned


def test_reward_models_say_the_same_of_pairs(kernel: list[int]) -> None:
    torch.manual_seed(0)
    model = Qwen2ForSequenceClassification(Qwen2Config(**SHAPE, num_labels=1)).eval()
    model.set_attn_implementation(attention.VARLEN)
    numbers = []
    for passes in (APART, TOGETHER):
        model.zero_grad()
        plain: Any = Plain(Scorer(model))
        scores = pair_scores(plain, pairs(), 0, passes)
        (scores[0] - 2 * scores[1]).square().sum().backward()
        numbers.append([scores.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert numbers[0][0].std() > 0.01
    for apart, together in zip(*numbers, strict=True):
        torch.testing.assert_close(together, apart, atol=2e-5, rtol=2e-5)


def test_a_reference_scores_documents_equally(kernel: list[int]) -> None:
    torch.manual_seed(0)
    policy = Policy(FAMILIES[next(iter(FAMILIES))]().eval())
    policy.model.set_attn_implementation(attention.VARLEN)
    documents = [document for pair in pairs() for document in (pair.chosen, pair.rejected)]
    apart, together = (
        answer_logprobs_and_balance(policy, documents, 0, False, torch.device("cpu"), passes)[0]
        for passes in (APART, TOGETHER)
    )
    torch.testing.assert_close(together, apart, atol=2e-5, rtol=2e-5)


# PPO: several answers to a prompt.


def answers() -> list[Document]:
    """Three prompts with three answers each, mixed up."""
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 31) for _ in range(length)] for length in (12, 5, 9)]
    found = []
    for prompt in prompts:
        for length in (4, 9, 1):
            said = [rng.randrange(3, 31) for _ in range(length)]
            found.append(Document(prompt + said, [False] * len(prompt) + [True] * length))
    rng.shuffle(found)
    return found


def test_answers_to_a_prompt_come_together_as_far_as_they_fit() -> None:
    documents = answers()
    groups = TOGETHER.together(documents)
    assert sorted(i for group in groups for i in group) == list(range(9))
    assert [len(group) for group in groups] == [3, 3, 3]
    for group in groups:
        assert len({tuple(documents[i].tokens[: documents[i].answer_start]) for i in group}) == 1
    narrow = Passes(1, 20, share=True)
    # ranks get equal parts
    assert [len(group) for group in Passes(1, 4096, ranks=4, share=True).together(documents)] == [1] * 9
    long = [Document([1] * 50 + [i], [False] * 50 + [True]) for i in range(9)]
    assert [len(group) for group in TOGETHER.together(long)] == [3, 3, 3], "153 keys of 53 tokens"
    probe = [Document([1, 2, 3], [True] * 3)] * 2
    assert TOGETHER.together(probe) == [[0], [1]]
    for part in narrow.split(
        narrow.together(documents),
        lambda group: sum(map(len, narrow.branched([documents[i] for i in group]))),
    ):
        for group in part:
            packed = narrow.branched([documents[i] for i in group])
            assert sum(len(document) - document.shared for document in packed) <= max(20, len(packed[0]))
    assert APART.together(documents) == [[i] for i in sorted(range(9), key=lambda i: -len(documents[i]))]


@pytest.mark.parametrize("tokens", [40, 4096])
def test_roles_say_and_learn_the_same_of_answers(
    tokens: int, models: Path, plain_engine: None, kernel: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = answers()
    numbers = np.random.default_rng(0)
    arrays = [[numbers.normal(size=len(d)).astype(np.float32) for d in documents] for _ in range(4)]
    found = []
    for share in (False, True):
        monkeypatch.setattr(
            "rlhf_core.stages.ppo.roles.role_passes.can_share", lambda model, device, share=share: share
        )
        place = lambda name: ModelSpec(str(models / name), "float32", 0, 8, False, tokens)  # noqa: E731
        config = ppo(entropy_coef=0.01, kl_in="loss", reference="other", teacher_top_k=4)
        actor = Actor(place("sft"), config, 0)
        critic = Critic(place("rm"), ppo(), 0)
        reference = ReferenceModel(place("other"), 1.0)
        reward = Reward(place("rm"))
        for role in (actor, critic, reference, reward):
            role.module.model.set_attn_implementation(attention.VARLEN)
        for trained in (actor, critic):
            trained.passes = passes_of(trained.engine, 8, tokens)
        read = {
            "logprobs": dict(actor.logprobs(documents)), "values": dict(critic.values(documents)),
            "reference": dict(reference.logprobs(documents)), "reward": dict(reward.scores(documents)),
        }  # fmt: skip
        teachers = dict(reference.top_tokens(documents, 4))
        old = [read["logprobs"][i] for i in range(9)]
        before = [old[i] + 0.1 * arrays[0][i] for i in range(9)]
        items = [
            Experience(
                document, before[i], before[i], None, arrays[1][i], arrays[2][i], arrays[3][i], teachers[i]
            )
            for i, document in enumerate(documents)
        ]
        kernel.clear()
        step = Update(list(range(len(items))), 1e-2, 0.1)
        metrics = {**actor.update(items, step, []), **critic.update(items, step, [])}
        found.append(
            (read, metrics, sum(kernel), dict(actor.logprobs(documents)), dict(critic.values(documents)))
        )
    (apart, other, many, *after), (together, metrics, few, *later) = found
    for name, by_document in apart.items():
        for i, document in enumerate(documents):
            counted = slice(-1, None) if name == "reward" else slice(document.answer_start, None)
            np.testing.assert_allclose(
                together[name][i][counted], by_document[i][counted], atol=2e-5, err_msg=name
            )
            assert len(together[name][i]) == len(by_document[i])
    assert metrics == pytest.approx(other, rel=2e-4, abs=1e-6)
    assert metrics["policy/grad_norm"] > 0 < metrics["value/grad_norm"] and metrics["policy/teacher_kl"] > 0
    assert few < 0.75 * many, "tokens of the rows"
    for changed, expected in zip(later, after, strict=True):
        for i, document in enumerate(documents):
            np.testing.assert_allclose(
                changed[i][document.answer_start :], expected[i][document.answer_start :], atol=2e-3
            )
