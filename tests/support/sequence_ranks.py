"""One of four gloo ranks that compute passes together, for tests/unit/models/test_sequence_ranks.py.

Each rank computes losses and gradients alone, then with others, and compares the sums over the ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from rlhf_core.config import DPO, PPO
from rlhf_core.data.documents import Document, Pair
from rlhf_core.data.packing import Passes
from rlhf_core.models.document_leak import detect_document_leak
from rlhf_core.models.kernels.attention import can_share, split_attention
from rlhf_core.models.kernels.sequence_ranks import ALONE, SequenceRanks, sequence_ranks
from rlhf_core.models.load_model import recompute
from rlhf_core.models.logprobs.token_logprobs import Truncation
from rlhf_core.models.policy import Policy, Scorer, masked_logprobs
from rlhf_core.models.sequence_split import split_sequences
from rlhf_core.objectives.actor_loss import PerToken, actor_loss, count
from rlhf_core.objectives.collate import collate
from rlhf_core.objectives.losses import (
    Loss,
    kto_loss,
    preference_loss,
    reward_loss,
    sft_loss,
    value_loss,
    with_balance,
)
from rlhf_core.objectives.masked import before
from rlhf_core.stages.dpo import pair_logprobs
from rlhf_core.stages.ppo.roles.role_passes import token_values
from rlhf_core.stages.reference_logprobs import answer_logprobs_and_balance
from rlhf_core.stages.reward_model import pair_scores
from rlhf_core.training.train_loop import accumulate
from tests.unit.models.test_attention import WINDOWED
from tests.unit.models.test_models import FAMILIES, SHAPE, SHARED_KEYS

WORLD = 4
CPU = torch.device("cpu")
LATENT = dict(
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12, head_dim=8
)
SIX = {**SHAPE, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}
MODELS: dict[str, Callable[[], Any]] = {
    **FAMILIES,
    **WINDOWED,
    **SHARED_KEYS,
    "latent": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(**SHAPE | {"num_key_value_heads": 4}, **LATENT, first_k_dense_replace=2)
    ),
    "six heads": lambda: LlamaForCausalLM(LlamaConfig(**SIX)),
}
LossOf = Callable[[Any], Tensor]


class Rank:
    """An engine that is the module: on a rank alone, or on one of `WORLD` of which `sharing` compute each
    pass together."""

    def __init__(self, module: Policy | Scorer, sharing: int = 1):
        self.module = module
        self.device = CPU
        self.sharing = sharing
        self.rank, self.world_size = (0, 1) if sharing == 1 else (dist.get_rank(), WORLD)

    def __call__(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()

    def all_reduce(self, values: Tensor) -> Tensor:
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    @property
    def passes(self) -> Passes:
        """One row, with shared prompts where the attention takes them."""
        return Passes(1, 4096, share=can_share(self.module.model, CPU))


def documents() -> list[Document]:
    """Answers after prompts, of which no loss is taken; one token alone, a mask with a hole, no answer at
    all."""
    rng = random.Random(0)
    found = []
    for prompt, answer in ((9, 14), (0, 1), (3, 21), (17, 0), (5, 6), (2, 11)):
        mask = [False] * prompt + [True] * answer
        if answer > 6:
            mask[prompt + 3] = False
        found.append(Document([rng.randrange(3, 97) for _ in mask], mask))
    return found


def late(rank: Any) -> Tensor:
    """A prompt over all parts but the last, in which the answer is: no rank but the last reads a log-prob."""
    rng = random.Random(2)
    batch = collate([[Document([rng.randrange(3, 97) for _ in range(64)], [False] * 61 + [True] * 3)]], 0)
    return sft_loss(masked_logprobs(rank, batch).logprobs, batch.mask, 3.0).loss


def routed(rank: Any) -> Tensor:
    """Tokens go to experts that a sampler chose, of two layers."""
    batch = collate([documents()], 0)
    drawn = torch.rand(*batch.tokens.shape, 2, 4, generator=torch.Generator().manual_seed(0))
    batch = replace(batch, experts=drawn.argsort(-1)[..., :2].short())
    return sft_loss(masked_logprobs(rank, batch).logprobs, batch.mask, 40.0).loss


def pairs() -> list[Pair]:
    rng = random.Random(1)
    found = []
    for prompt, *answers in ((9, 14, 6), (1, 5, 12), (21, 1, 7), (4, 3, 3)):
        asked = [rng.randrange(3, 97) for _ in range(prompt)]
        both = [
            Document(asked + [rng.randrange(3, 97) for _ in range(n)], [False] * prompt + [True] * n)
            for n in answers
        ]
        found.append(Pair(both[0], both[1], 0.5))
    return found


def sft(rank: Any) -> Tensor:
    batch = collate([documents()[:4], documents()[4:]], 0)
    out = masked_logprobs(rank, batch)
    return with_balance(sft_loss(out.logprobs, batch.mask, 40.0), out.balance, 0.1, 6.0).loss


def dpo(rank: Any) -> Tensor:
    found = pair_logprobs(rank, pairs(), 0, False, rank.passes).responses
    return preference_loss(
        DPO(policy="base", pairs="pairs", beta=0.5), found[0], found[1], *torch.zeros(2, 4), 4.0
    ).loss


def kto(rank: Any) -> Tensor:
    found, balance = answer_logprobs_and_balance(
        rank, documents()[:1] + documents()[2:3] + documents()[4:], 0, False, CPU, Passes(2)
    )
    desirable = torch.tensor([True, False, True, False])
    return with_balance(
        kto_loss(found, found.detach() - 1, desirable, 0.3, 0.1, 1.0, 1.3, 4.0), balance, 0.1, 4.0
    ).loss


def actor(rank: Any) -> Tensor:
    config = PPO(
        **{
            "reward": "reward",
            "prompts": {"sources": "none.jsonl"},
            "advantage_estimator": "grpo",
            "n_samples_per_prompt": 2,
            "ratio": "sequence",
        },
        **{"entropy_coef": 0.1, "kl_in": "loss", "kl_estimator": "k3", "temperature": 0.8, "top_k": 20},
    )
    answers = [document for pair in pairs() for document in (pair.chosen, pair.rejected)]
    rows = rank.passes.rows_of(answers)
    batch = collate(rows, 0)
    dice = np.random.default_rng(0)
    noise = [[dice.normal(mean, 0.1, len(answer)) for answer in answers] for mean in (-4.5, -4.5, 0.5)]
    old, ref, advantages = (cast(Tensor, token_values(batch, rows, arrays)) for arrays in noise)
    new = masked_logprobs(rank, batch, 0.8, "gradient", Truncation(0.9, 20))
    tokens = PerToken(
        new.logprobs, new.entropy, old, ref, advantages, batch.mask.float(), batch.mask, batch.documents
    )
    return actor_loss(
        tokens, len(answers), count([answer.mask_array for answer in answers]), config, 0.2
    ).loss


def reward(rank: Any) -> Tensor:
    scores = pair_scores(rank, pairs(), 0, rank.passes)
    return reward_loss(scores[0], scores[1], 0.5, 0.01, 4.0).loss


def critic(rank: Any) -> Tensor:
    batch = collate([documents()[:3], documents()[3:]], 0)
    values = before(rank(batch.tokens, batch.positions), batch.positions)
    old, returns = torch.randn(2, *batch.tokens.shape, generator=torch.Generator().manual_seed(0))
    return value_loss(values, old, returns, batch.mask, 0.2, 30.0).loss


def cases() -> Iterator[tuple[str, str, LossOf]]:
    """A family, a kind of head, and a loss."""
    for family in MODELS:
        yield family, "policy", sft
    yield from (("llama", "policy", loss) for loss in (dpo, kto, actor, late))
    yield "mixtral", "policy", routed
    yield from (("qwen2", "scorer", loss) for loss in (reward, critic))


def loss_and_gradients(module: Policy | Scorer, loss: LossOf) -> list[Tensor]:
    module.zero_grad(set_to_none=True)
    value = loss(Rank(module))
    value.backward()
    return [
        value.detach(),
        *(torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in module.parameters()),
    ]


def compare(family: str, head: str, loss: LossOf, ranks: SequenceRanks) -> None:
    torch.manual_seed(0)
    module: Policy | Scorer
    if head == "policy":
        model = MODELS[family]()
        module = Policy(model, balanced=loss is sft and family == "mixtral")
        if loss is routed:
            module.replay_routing()
    else:
        module = Scorer(Qwen2ForSequenceClassification(Qwen2Config(**SHAPE, num_labels=1)))
    if loss in (dpo, critic):
        recompute(module.model, 1.0)
    module.train()
    alone = loss_and_gradients(module, loss)
    split_attention(module.model, ranks.size)
    detect_document_leak(module, module, CPU, True)
    split_sequences(module, module, ranks, CPU, lambda values: values)
    assert module.sequence is ranks
    value, *gradients = loss_and_gradients(module, loss)
    torch.testing.assert_close(value, alone[0], msg=lambda m: f"{family} {loss.__name__} {ranks.size}: {m}")
    for (name, _), own, expected in zip(module.named_parameters(), gradients, alone[1:], strict=True):
        dist.all_reduce(own, group=ranks.group)
        torch.testing.assert_close(
            own, expected, atol=2e-6, rtol=2e-5, msg=lambda m, n=name: f"{family} {loss.__name__} {n}: {m}"
        )


def step_of_two_pairs(two: SequenceRanks) -> None:
    """An optimiser step of three passes: one pair has two of them, the other one and a surplus one of weight
    0."""
    torch.manual_seed(0)
    policy = Policy(FAMILIES["llama"]()).train()
    found = []
    for sharing in (1, 2):
        engine: Any = Rank(policy, sharing)
        if sharing > 1:
            split_attention(policy.model, sharing)
            split_sequences(policy, policy, two, CPU, engine.all_reduce)

        def loss(part: list[Document], engine: Any = engine) -> Loss:
            batch = collate([part], 0)
            return sft_loss(masked_logprobs(engine, batch).logprobs, batch.mask, 40.0)

        policy.zero_grad()
        metrics = accumulate(engine, [documents()[i : i + 2] for i in (0, 2, 4)], loss)
        found.append(
            [
                torch.tensor(metrics["loss"]),
                *(engine.all_reduce(cast(Tensor, p.grad).clone()) for p in policy.parameters()),
            ]
        )
    for together, alone in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(together, alone, atol=2e-6, rtol=2e-5)


class Shifted(nn.Module):
    """A layer that also reads the state before each token's."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden) + hidden.roll(1, 1).cumsum(1)


def refuse_what_reads_neighbours(ranks: SequenceRanks) -> None:
    torch.manual_seed(0)
    policy = Policy(FAMILIES["llama"]())
    policy.model.model.layers[0].mlp = Shifted(policy.model.model.layers[0].mlp)
    split_attention(policy.model, ranks.size)
    policy.document_leak = False
    try:
        split_sequences(policy, policy, ranks, CPU, ranks.summed)
    except ValueError as error:
        assert "computes other states from parts of its tokens than from all of them" in str(error)
        assert policy.sequence is ALONE
        return
    raise AssertionError("not found")


def main(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD)
    two = sequence_ranks(2)
    four = sequence_ranks(4)
    uneven = dist.new_group([0, 1, 2])
    assert (two.rank, four.rank, ALONE.size) == (rank % 2, rank, 1)
    for family, head, loss in cases():
        if family != "six heads":
            compare(family, head, loss, four)
        compare(family, head, loss, two)
    if rank < 3:  # parts with pads at the end of the pass
        compare("six heads", "policy", sft, SequenceRanks(3, rank, uneven))
    refuse_what_reads_neighbours(four)
    step_of_two_pairs(two)
    print("the same", len(list(cases())))
    dist.barrier()
    dist.destroy_process_group()
