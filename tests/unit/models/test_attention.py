"""PyTorch's varlen attention in transformers' models: the same numbers as `sdpa` with a block-diagonal mask
gives.

The kernel runs on GPUs only (tests/gpu/test_attention.py); here a plain computation with its signature stands
in for it.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from rlhf_core.models import document_leak
from rlhf_core.models.kernels import attention, choose
from rlhf_core.models.policy import Policy
from rlhf_core.objectives.collate import collate
from rlhf_core.rollout.transformers_engine import TransformersEngine
from tests.unit.models.test_models import FAMILIES, SHAPE, documents, logprobs_by_document

WINDOWED = {"mistral-window": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=4))}


def plain_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`torch.nn.attention.varlen.varlen_attn`: rows (T, heads, D), documents between the bounds."""
    # sizes that the kernel takes
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and len(cu_seq_q) == len(cu_seq_k)
    assert int(cu_seq_q.diff().max()) == max_q and int(cu_seq_k.diff().max()) == max_k
    assert int(cu_seq_q[-1]) == len(query)
    assert int(cu_seq_k[-1]) == len(key) == len(value)
    assert window_size[1] == 0
    assert enable_gqa or query.shape[1] == key.shape[1]
    out = []
    for (start, end), (first, last) in zip(
        cu_seq_q.unfold(0, 2, 1).tolist(), cu_seq_k.unfold(0, 2, 1).tolist(), strict=True
    ):
        q, k, v = (part.transpose(0, 1) for part in (query[start:end], key[first:last], value[first:last]))
        # queries are the last
        back = torch.arange(last - first - (end - start), last - first)[:, None] - torch.arange(last - first)
        seen = (back >= 0) & ((back <= window_size[0]) | (window_size[0] < 0))
        out.append(
            F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=enable_gqa).transpose(0, 1)
        )
    return torch.cat(out)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replaces the kernel and counts its calls."""
    calls: list[int] = []

    def counted(*arguments: Any, **named: Any) -> torch.Tensor:
        calls.append(len(arguments[0]))
        return plain_varlen(*arguments, **named)

    monkeypatch.setattr(choose.varlen, "varlen_attn", counted)
    return calls


@pytest.mark.parametrize("family", [*FAMILIES, *WINDOWED])
def test_the_numbers_and_gradients_are_those_of_sdpa(family: str, kernel: list[int]) -> None:
    torch.manual_seed(0)
    policy = Policy({**FAMILIES, **WINDOWED}[family]().eval())
    rows = [documents()[:3], documents()[3:]]
    expected = logprobs_by_document(policy, rows)
    torch.cat(expected).sum().backward()
    gradients = [p.grad.clone() for p in policy.parameters() if p.grad is not None]
    policy.zero_grad()
    policy.model.set_attn_implementation(attention.VARLEN)
    found = logprobs_by_document(policy, rows)
    torch.cat(found).sum().backward()
    assert kernel.count(collate(rows, pad_token_id=0).tokens.numel()) == 2, "both layers, both rows in one"
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    for a, b in zip((p.grad for p in policy.parameters() if p.grad is not None), gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_a_window_changes_the_numbers(kernel: list[int]) -> None:
    """Otherwise the test above would pass without a window."""
    torch.manual_seed(0)
    policy = Policy(WINDOWED["mistral-window"]().eval())
    policy.model.set_attn_implementation(attention.VARLEN)
    windowed = logprobs_by_document(policy, [documents()])
    for layer in policy.model.model.layers:
        layer.self_attn.config.sliding_window = None
    whole = logprobs_by_document(policy, [documents()])
    assert not torch.allclose(windowed[2], whole[2]) and kernel


@pytest.mark.parametrize("built", ["with windows", "without", "without, and causal no more"])
def test_a_window_holds_whatever_flash_attn_was_built_with(
    built: str, kernel: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, int]] = []

    def flash(
        *arguments: Any,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int],
    ) -> torch.Tensor:
        calls.append(window_size)
        assert causal
        if built == "without, and causal no more":  # a left window already excludes tokens to the right
            query, key, value = (rows.transpose(0, 1) for rows in arguments[:3])
            return F.scaled_dot_product_attention(query, key, value, enable_gqa=True).transpose(0, 1)
        window = window_size if built == "with windows" else (-1, 0)
        return plain_varlen(*arguments, scale=softmax_scale, window_size=window, enable_gqa=True)

    torch.manual_seed(0)
    policy = Policy(WINDOWED["mistral-window"]().eval())
    expected = logprobs_by_document(policy, [documents()])
    monkeypatch.setattr(choose, "flash_kernel", lambda: flash)
    policy.model.set_attn_implementation(attention.VARLEN)
    for ours, theirs in zip(logprobs_by_document(policy, [documents()]), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert calls[0] == (2, 0), "tried once"
    # PyTorch's too was tried
    assert (calls[1:], len(kernel)) == (([(3, 0)] * 2, 0) if built == "with windows" else ([], 3))


def test_heads_of_other_sizes_are_padded(kernel: list[int]) -> None:
    torch.manual_seed(0)
    odd = Policy(LlamaForCausalLM(LlamaConfig(**SHAPE, head_dim=10)).eval())
    config = DeepseekV3Config(
        **{**SHAPE, "num_key_value_heads": 4}, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=12,
        first_k_dense_replace=2,
    )  # fmt: skip
    for policy in (odd, Policy(DeepseekV3ForCausalLM(config).eval())):
        expected = logprobs_by_document(policy, [documents()])
        policy.model.set_attn_implementation(attention.VARLEN)
        kernel.clear()
        for ours, theirs in zip(logprobs_by_document(policy, [documents()]), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
        assert kernel


def implementation(model: PreTrainedModel) -> str:
    return attention.set_attention(model).config._attn_implementation


def test_the_kernel_is_used_in_bf16_on_a_gpu_that_supports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bf16 = FAMILIES["llama"]().to(torch.bfloat16)
    assert isinstance(bf16, LlamaForCausalLM) and implementation(bf16) == "sdpa", "no GPU here"
    monkeypatch.setattr(attention, "_has_kernel", lambda: True)
    assert implementation(FAMILIES["llama"]()) == "sdpa", "fp32"
    assert implementation(bf16) == attention.VARLEN


@pytest.mark.parametrize(
    "change",
    [{"_supports_flash_attn": False}, {"_supports_attention_backend": False}, {"_is_stateful": True}],
)
def test_models_that_need_more_than_borders_use_sdpa(
    change: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FAMILIES["llama"]().to(torch.bfloat16)
    monkeypatch.setattr(attention, "_has_kernel", lambda: True)
    for name, value in change.items():
        monkeypatch.setattr(type(model), name, value)
    assert implementation(model) == "sdpa"


def test_large_heads_and_dropout_use_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_has_kernel", lambda: True)
    for fields in ({"head_dim": 264}, {"attention_dropout": 0.1}):
        assert implementation(LlamaForCausalLM(LlamaConfig(**SHAPE, **fields)).to(torch.bfloat16)) == "sdpa"


def test_sinks_are_refused(kernel: list[int]) -> None:
    some = torch.zeros(1, 4, 3, 8)
    with pytest.raises(ValueError, match="sinks"):
        attention.varlen_attention(torch.nn.Identity(), some, some, some, None, s_aux=some)


def test_attention_in_parts_does_not_leave_out_a_cap() -> None:
    some = torch.zeros(1, 4, 3, 8)
    edges = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match="does not cap scores"):
        attention.varlen_attention(
            in_float32(), some, some, some, None,
            cu_seq_lens_q=edges, cu_seq_lens_k=edges, max_length_q=3, max_length_k=3, softcap=30.0,
            kernel=choose.attend_each,
        )  # fmt: skip


def in_float32() -> Any:
    return SimpleNamespace(config=SimpleNamespace(dtype=torch.float32))


def capped_model() -> Gemma2ForCausalLM:
    """A model whose cap on the scores changes its log-probs."""
    torch.manual_seed(0)
    config = Gemma2Config(
        **SHAPE,
        head_dim=8,
        attn_logit_softcapping=0.5,
        final_logit_softcapping=None,
        sliding_window=3,
        attn_implementation="sdpa",
    )
    capped = Gemma2ForCausalLM(config).eval()
    for layer in capped.model.layers:
        torch.nn.init.normal_(layer.self_attn.q_proj.weight, std=2)
    return capped


@pytest.mark.parametrize("built", ["with caps", "without"])
def test_a_kernel_that_caps_scores_is_used_if_it_passes_its_self_test(
    built: str, kernel: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """flash-attn can be built without caps, and then ignores them."""

    def flash(
        *rows: Any,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float = 0.0,
    ) -> torch.Tensor:
        cap = softcap if built == "with caps" else 0.0
        return plain_capped(*rows, scale=softmax_scale, window=window_size[0], cap=cap)

    model = capped_model()
    expected = logprobs_by_document(Policy(attention.set_attention(model)), [documents()])
    assert model.config._attn_implementation == "eager", "no GPU here"
    monkeypatch.setattr(choose, "flash_kernel", lambda: flash)
    monkeypatch.setattr(attention, "_has_kernel", lambda: True)
    monkeypatch.setattr(attention, "_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(attention, "HALF", (torch.float32,))
    again = capped_model()
    assert implementation(again) == (attention.VARLEN if built == "with caps" else "eager")
    found = logprobs_by_document(Policy(again), [documents()])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def plain_capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    key_starts: torch.Tensor,
    *longest: int,
    scale: float,
    window: int,
    cap: float,
) -> torch.Tensor:
    """Causal attention of (T, heads, D) within documents."""
    group = query.shape[1] // key.shape[1]
    out = []
    for (start, end), (first, last) in zip(
        pairwise(starts.tolist()), pairwise(key_starts.tolist()), strict=True
    ):
        keys = key[first:last].repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query[start:end], keys).float() * scale
        if cap:
            scores = cap * torch.tanh(scores / cap)
        places = torch.arange(last - first)
        back = places[len(places) - (end - start) :, None] - places
        seen = (back >= 0) & ((back <= window) | (window < 0))
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).to(value.dtype)
        out.append(torch.einsum("hqk,khd->qhd", weights, value[first:last].repeat_interleave(group, 1)))
    return torch.cat(out)


@pytest.mark.parametrize("right", [True, False])
def test_transformers_own_flash_attention_runs_only_if_its_kernel_is_right(
    right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build without 16-bit floats, windows or large heads returns wrong values without an error."""

    def flash(*rows: Any, softmax_scale: float, causal: bool, window_size: tuple[int, int]) -> torch.Tensor:
        found = plain_varlen(*rows, scale=softmax_scale, window_size=window_size, enable_gqa=True)
        return found if right else found.roll(1, 0)

    model = LlamaForCausalLM(LlamaConfig(**SHAPE, attention_dropout=0.1)).to(torch.bfloat16)
    model.config._attn_implementation_internal = attention.FLASH
    monkeypatch.setattr(choose, "flash_kernel", lambda: flash)
    monkeypatch.setattr(attention, "_has_kernel", lambda: True)
    monkeypatch.setattr(attention, "_gpu", lambda: torch.device("cpu"))
    assert implementation(model) == (attention.FLASH if right else "sdpa")


def test_flash_attention_that_cannot_be_tested_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of its own code may name its heads otherwise."""
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, attention_dropout=0.1)).to(torch.bfloat16)
    model.config._attn_implementation_internal = attention.FLASH
    named = SimpleNamespace(num_query_heads=[4, 4], num_kv_heads=[2, 2], model_type="openelm")
    monkeypatch.setattr(LlamaConfig, "get_text_config", lambda _: named)
    monkeypatch.setattr(attention, "_has_kernel", lambda: True)
    assert implementation(model) == "sdpa"


@pytest.mark.parametrize("why", ["the engine samples", "documents leak"])
def test_a_cap_is_kept_where_the_kernel_is_left(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes neither a cache of keys and values nor several rows; `sdpa` would ignore the cap."""
    policy = Policy(capped_model())
    policy.model.set_attn_implementation("eager")
    expected = logprobs_by_document(policy, [documents()])
    policy.model.set_attn_implementation(attention.VARLEN)
    if why == "documents leak":
        monkeypatch.setattr(document_leak, "leaks", lambda *_: True)
        document_leak.detect_document_leak(policy, policy, torch.device("cpu"), packed=True)
    else:
        engine = TransformersEngine.__new__(TransformersEngine)
        engine._fp32_head = False
        engine._device = torch.device("cpu")
        engine._use(policy)
    assert policy.model.config._attn_implementation == "eager"
    for ours, theirs in zip(logprobs_by_document(policy, [documents()]), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_cap_on_the_scores_is_applied() -> None:
    """`sdpa` would silently ignore it."""
    capped = capped_model()
    left_out = logprobs_by_document(Policy(capped), [documents()])
    assert implementation(capped) == "eager"
    alone = [logprobs_by_document(Policy(capped), [[document]])[0] for document in documents()]
    for ours, theirs in zip(logprobs_by_document(Policy(capped), [documents()]), alone, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not torch.allclose(left_out[2], alone[2])
