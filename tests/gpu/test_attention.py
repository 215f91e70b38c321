"""Varlen attention on a GPU, with either kernel, beside transformers' own and a mask; and passes in which the
host never waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from rlhf_core.data.documents import Document
from rlhf_core.data.packing import Passes
from rlhf_core.models.kernels import attention, choose
from rlhf_core.models.kernels.liger import fuse
from rlhf_core.models.kernels.self_test import CLOSE, NEAR, AttentionKind, Heads, difference
from rlhf_core.models.policy import Policy, Scorer, masked_logprobs
from rlhf_core.objectives.collate import collate
from rlhf_core.objectives.losses import dpo_loss, reward_loss, sft_loss
from rlhf_core.stages.dpo import pair_logprobs
from rlhf_core.stages.reward_model import pair_scores
from rlhf_core.training.engine import AdamW, TorchEngine
from tests.unit.models.test_models import SHAPE, documents
from tests.unit.models.test_shared_prompts import pairs as shared_pairs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
WIDE = SHAPE | {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


KERNELS = ["the first that is right", "flash-attn's", "PyTorch's"]


def only(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel != KERNELS[0]:
        monkeypatch.setattr(choose, "flash4_kernel", lambda: None)
    if kernel == "flash-attn's" and choose.flash_kernel() is None:
        pytest.skip("flash-attn is not installed")
    if kernel == "PyTorch's":
        monkeypatch.setattr(choose, "flash_kernel", lambda: None)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("window", [-1, 100])
@pytest.mark.parametrize(
    "heads", [Heads(1, 64), Heads(1, 80), Heads(4, 96), Heads(6, 128), Heads(7, 128), Heads(2, 256)]
)
def test_what_was_found_right_in_short_documents_is_in_long_ones(
    heads: Heads, window: int, shared: bool
) -> None:
    documents = ((700, 1500), (1, 2), (129, 1029)) if shared else ((1500, 1500), (1, 1), (1029, 1029))
    device = torch.device("cuda", 0)
    kernel = choose.kernel_for(AttentionKind(heads, window >= 0, shared), device)
    mean, largest = difference(kernel, heads, window, documents, device)
    assert mean < CLOSE and largest < NEAR
    if heads.size == 128 and choose._at_least_hopper(device) and choose.flash4_kernel():
        assert kernel.func is choose._flash4, "what is installed is taken where it is known to be right"


def test_what_is_trained_first_says_to_the_last_bit_what_was_scored() -> None:
    """PPO starts with ratios of 1: no kernel may depend on whether there are gradients, nor on the rows
    beside. Rows are long, as usual."""
    shape = {
        "hidden_size": 1536,
        "intermediate_size": 2048,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
    }
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**shape, vocab_size=1024, pad_token_id=0)).to("cuda", torch.bfloat16)
    policy = Policy(fuse(attention.set_attention(model)))
    dice = torch.Generator().manual_seed(0)
    answers = [
        torch.randint(2, 1024, (length,), generator=dice).tolist() for length in [768] * 14 + [301, 1235]
    ]

    def logprobs(order: list[int]) -> list[torch.Tensor]:
        batch = collate([[Document(answers[i], [True] * len(answers[i])) for i in order]], pad_token_id=0).to(
            "cuda"
        )
        found = policy(batch.tokens, batch.positions, batch.documents).logprobs[batch.documents >= 0]
        parts = found.detach().split([len(answers[i]) for i in order])
        return [part for _, part in sorted(zip(order, parts, strict=True), key=lambda pair: pair[0])]

    with torch.no_grad():
        scored = logprobs(list(range(16)))
    trained = logprobs(torch.randperm(16, generator=dice).tolist())
    # above this Liger has another kernel for rows that have gradients
    assert sum(map(len, answers)) * 12 > 131072
    assert all(torch.equal(a, b) for a, b in zip(trained, scored, strict=True))


@pytest.mark.parametrize("window", [None, 4])
def test_all_implementations_agree(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    policy = Policy(
        MistralForCausalLM(MistralConfig(**WIDE, sliding_window=window)).to("cuda", torch.bfloat16).eval()
    )
    assert attention.set_attention(policy.model).config._attn_implementation == attention.VARLEN
    batch = collate([documents()[:3], documents()[3:]], pad_token_id=0).to("cuda")
    found = {}

    def read(name: str) -> None:
        policy.zero_grad()
        logprobs = policy(batch.tokens, batch.positions, batch.documents).logprobs
        logprobs.sum().backward()
        found[name] = (
            logprobs.detach(),
            torch.cat([p.grad.float().flatten() for p in policy.parameters() if p.grad is not None]),
        )

    # Transformers' own way to flash-attn does not notice a build without windows.
    plain = [attention.FLASH] if choose.flash_kernel() and window is None else []
    for name in ("eager", "sdpa", *plain, attention.VARLEN):
        policy.model.set_attn_implementation(name)
        read(name)
    for way in KERNELS[1:]:
        only(way, monkeypatch)
        read(way)
    logprobs, gradient = found["eager"]
    for name, (ours, our_gradient) in found.items():
        assert (ours - logprobs).abs().max() < 0.05, name
        assert torch.nn.functional.cosine_similarity(our_gradient, gradient, dim=0) > 0.999, name


@pytest.mark.parametrize("kernel", KERNELS)
def test_prompts_that_are_laid_once_give_the_same_numbers(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(kernel, monkeypatch)
    torch.manual_seed(0)
    policy = attention.set_attention(Qwen2ForCausalLM(Qwen2Config(**WIDE)).to("cuda", torch.bfloat16))
    engine = TorchEngine(Policy(policy), AdamW((0.9, 0.95), 0.0, 1.0))
    assert attention.can_share(policy, engine.device)
    found = []
    for share in (False, True):
        engine.module.zero_grad()
        logprobs = pair_logprobs(engine, shared_pairs(), 0, False, Passes(1, 4096, share=share)).responses
        (logprobs[0] - logprobs[1]).sum().backward()
        found.append(
            (
                logprobs.detach(),
                torch.cat([p.grad.float().flatten() for p in policy.parameters() if p.grad is not None]),
            )
        )
    (apart, gradient), (together, other) = found
    assert (apart - together).abs().max() < 0.2 and apart.std() > 1  # sums over answers
    assert torch.nn.functional.cosine_similarity(gradient, other, dim=0) > 0.999


@contextmanager
def without_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the GPU raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def of_sft(engine: TorchEngine) -> torch.Tensor:
    batch = collate([documents()], pad_token_id=0).to(engine.device)
    return sft_loss(masked_logprobs(engine, batch).logprobs, batch.mask, 7.0).loss


def of_dpo(engine: TorchEngine) -> torch.Tensor:
    chosen, rejected = pair_logprobs(engine, shared_pairs(), 0, False, Passes(1, 4096, share=True)).responses
    return dpo_loss(
        chosen, rejected, torch.zeros_like(chosen), torch.zeros_like(chosen), 0.1, 0.0, "sigmoid", 2.0
    ).loss


def of_rewards(engine: TorchEngine) -> torch.Tensor:
    scores = pair_scores(engine, shared_pairs(), 0, Passes(1, 4096, share=True))
    return reward_loss(scores[0], scores[1], 0.0, 0.0, 2.0).loss


@pytest.mark.parametrize("loss", [of_sft, of_dpo, of_rewards])
def test_the_host_waits_for_the_gpu_nowhere_in_a_pass(loss: Callable[[TorchEngine], torch.Tensor]) -> None:
    torch.manual_seed(0)
    model = Qwen2ForSequenceClassification if loss is of_rewards else Qwen2ForCausalLM
    options = {"num_labels": 1, "pad_token_id": 0} if loss is of_rewards else {}
    made = attention.set_attention(model(Qwen2Config(**(WIDE | options))).to("cuda", torch.bfloat16))
    engine = TorchEngine(Scorer(made) if loss is of_rewards else Policy(made), AdamW((0.9, 0.95), 0.0, 1.0))
    loss(engine).backward()  # kernels are compiled
    torch.cuda.synchronize()
    with without_waiting():
        for _ in range(2):
            engine.backward(loss(engine), last=True)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in engine.module.parameters())
