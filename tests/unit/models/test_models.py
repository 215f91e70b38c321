"""Policy and Scorer: the same numbers packed and padded, chunked and whole, as plain transformers gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from rlhf_core.data.documents import Document
from rlhf_core.models.load_model import load_policy, load_scorer, trained_scorer
from rlhf_core.models.logprobs import token_logprobs
from rlhf_core.models.policy import Policy
from rlhf_core.objectives.collate import collate
from rlhf_core.objectives.masked import gather_last
from rlhf_core.training.zero.zero_engine import _layers

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
# most logits are beyond the cap
CAPPED = {"head_dim": 8, "final_logit_softcapping": 0.2, "initializer_range": 0.1}
PER_LAYER = {
    "layer_types": ["full_attention"] * 2,
    "num_kv_shared_layers": 1,
    "hidden_size_per_layer_input": 8,
    "global_head_dim": 8,
}
FAMILIES = {
    "qwen2-tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=8.0)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SHAPE, **CAPPED, query_pre_attn_scalar=8, attn_logit_softcapping=None)
    ),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=0.0625)),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**SHAPE, num_local_experts=4, output_router_logits=True)
    ),
}
SHARED_KEYS = {"gemma4": lambda: Gemma4ForCausalLM(Gemma4TextConfig(**SHAPE, **CAPPED, **PER_LAYER))}


@pytest.fixture(params=[*FAMILIES, *SHARED_KEYS])
def policy(request: pytest.FixtureRequest) -> Policy:
    torch.manual_seed(0)
    return Policy({**FAMILIES, **SHARED_KEYS}[request.param]().eval())


def documents() -> list[Document]:
    generator = torch.Generator().manual_seed(1)
    lengths = (7, 1, 12, 5, 9)
    tokens = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in lengths]
    return [Document(t, [False, *[True] * (len(t) - 1)]) for t in tokens]


def logprobs_by_document(policy: Policy, rows: list[list[Document]]) -> list[torch.Tensor]:
    batch = collate(rows, pad_token_id=0)
    logprobs = policy(batch.tokens, batch.positions, batch.documents).logprobs
    return [logprobs[batch.documents == i] for i in range(sum(len(row) for row in rows))]


def test_logprobs_are_those_of_plain_transformers(policy: Policy) -> None:
    docs = documents()
    ours = logprobs_by_document(policy, [[d] for d in docs])
    for document, got in zip(docs, ours, strict=True):
        tokens = torch.tensor([document.tokens])
        table = policy.model(input_ids=tokens).logits.log_softmax(-1)[0]
        expected = [0.0] + [float(table[t - 1, document.tokens[t]]) for t in range(1, len(document.tokens))]
        torch.testing.assert_close(got, torch.tensor(expected))


def test_packed_rows_give_the_logprobs_of_padded_ones(policy: Policy) -> None:
    docs = documents()
    padded = logprobs_by_document(policy, [[d] for d in docs])
    packed = logprobs_by_document(policy, [docs[:3], docs[3:]])
    for a, b in zip(padded, packed, strict=True):
        torch.testing.assert_close(a, b)


def test_chunked_logits_give_the_same_loss_and_gradient(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = collate([documents()], pad_token_id=0)

    def loss_and_gradient() -> tuple[torch.Tensor, list[torch.Tensor]]:
        policy.zero_grad()
        loss = policy(batch.tokens, batch.positions, batch.documents, 0.7).logprobs.sum()
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in policy.parameters() if p.grad is not None]

    whole, gradient = loss_and_gradient()
    monkeypatch.setattr(token_logprobs, "LOGITS_CHUNK", 5)
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    chunked, chunked_gradient = loss_and_gradient()
    torch.testing.assert_close(chunked, whole)
    for a, b in zip(chunked_gradient, gradient, strict=True):
        torch.testing.assert_close(a, b)


def test_tokens_outside_the_mask_are_skipped(policy: Policy) -> None:
    batch = collate([documents()[:3], documents()[3:]], pad_token_id=0)
    mask = batch.mask & (batch.positions % 3 != 1)
    whole = policy(batch.tokens, batch.positions, batch.documents, 0.7, "value")
    masked = policy(batch.tokens, batch.positions, batch.documents, 0.7, "value", mask)
    assert mask.any() and not mask.all()
    for ours, expected in ((masked.logprobs, whole.logprobs), (masked.entropy, whole.entropy)):
        torch.testing.assert_close(ours[mask], expected[mask])
        assert not ours[~mask].any()
    gradients = []
    for out in (masked, whole):
        policy.zero_grad()
        out.logprobs[mask].sum().backward()
        gradients.append([p.grad.clone() for p in policy.parameters() if p.grad is not None])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)
    nothing = policy(batch.tokens, batch.positions, batch.documents, 1.0, "no", torch.zeros_like(mask))
    assert not nothing.logprobs.any()


@pytest.mark.parametrize("entropy", ["no", "value", "gradient"])
def test_the_gradient_through_a_cap_is_that_of_plain_pytorch(entropy: token_logprobs.Entropy) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 50, dtype=torch.float64)
    hidden = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(50, (6,))
    found = []
    for cap in (None, 0.5):
        ours = token_logprobs.token_logprobs(head, hidden, targets, 0.7, entropy, keep=True, cap=cap)
        logits = head(hidden) if cap is None else cap * torch.tanh(head(hidden) / cap)
        table = (logits / 0.7).log_softmax(-1)
        expected = table.gather(-1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)
        torch.testing.assert_close(ours[0].double(), expected[0])
        weights = torch.arange(1.0, 7.0, dtype=torch.float64)
        gradients = []
        for logprobs, entropies in (ours, expected):
            total = (weights * logprobs).sum() + (entropies.square().sum() if entropy == "gradient" else 0)
            gradients.append(torch.autograd.grad(total, [hidden, head.weight, head.bias], retain_graph=True))
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b)
        found.append(gradients[0][0])
    assert not torch.allclose(*found)


def test_a_model_that_does_more_with_its_logits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_core.models.logprobs.logit_scale.logit_cap", lambda model: None)
    with pytest.raises(
        ValueError, match=r"models of type gemma2 do more with their .* to scale and cap them"
    ):
        Policy(FAMILIES["gemma2"]())


def test_entropy_is_that_of_the_scaled_distribution(policy: Policy) -> None:
    document = documents()[2]
    batch = collate([[document]], pad_token_id=0)
    entropy = policy(batch.tokens, batch.positions, batch.documents, 0.5, "value").entropy[0, 1]
    logits = policy.model(input_ids=torch.tensor([document.tokens])).logits[0, 0] / 0.5
    p = logits.softmax(-1)
    torch.testing.assert_close(entropy, -(p * p.log()).sum())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: tests/gpu/test_one_gpu.py")
@pytest.mark.parametrize("on_host", [False, True])
def test_an_offloaded_model_is_loaded_into_host_memory(
    on_host: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a GPU that PyTorch only pretends to have: loading onto it fails."""
    Qwen2ForCausalLM(Qwen2Config(**SHAPE)).save_pretrained(tmp_path / "lm")
    Qwen2ForSequenceClassification(Qwen2Config(**SHAPE, num_labels=1)).save_pretrained(tmp_path / "rm")
    policy = str(tmp_path / "lm")
    reward = str(tmp_path / "rm")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (10**12, 10**12))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    for load in (
        lambda: load_policy(policy, on_host=on_host),
        lambda: load_scorer(reward, 0, on_host=on_host),
    ):
        if on_host:
            assert all(parameter.is_cpu for parameter in load().parameters())
        else:
            with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA|accelerator"):
                load()


def test_reward_model_scores_what_transformers_scores(tmp_path: Path) -> None:
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SHAPE)).save_pretrained(tmp_path / "lm")
    scorer = trained_scorer(str(tmp_path / "lm"), 0, "float32", False, None, seed=0).eval()
    assert scorer.model.score.weight.abs().max() == 0, "a new head starts at zero"
    torch.nn.init.normal_(scorer.model.score.weight)
    scorer.model.save_pretrained(tmp_path / "rm")

    from transformers import AutoModelForSequenceClassification

    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", num_labels=1).eval()
    docs = documents()
    batch = collate([docs], pad_token_id=0)
    ours = gather_last(
        load_scorer(str(tmp_path / "rm"), 0).eval()(batch.tokens, batch.positions), batch.documents, len(docs)
    )
    padded = torch.zeros(len(docs), 12, dtype=torch.long)
    for row, document in zip(padded, docs, strict=True):
        row[: len(document.tokens)] = torch.tensor(document.tokens)
    theirs = plain(input_ids=padded, attention_mask=(padded != 0).long()).logits[:, 0]
    torch.testing.assert_close(ours, theirs)


def test_packed_rows_are_refused_where_a_layer_carries_across_documents() -> None:
    torch.manual_seed(0)
    config = Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"], conv_L_cache=3)
    policy = Policy(Lfm2ForCausalLM(config).eval())
    alone = [logprobs_by_document(policy, [[document]])[0] for document in documents()]
    for ours, theirs in zip(
        logprobs_by_document(policy, [[document] for document in documents()]), alone, strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(
        ValueError,
        match=r"Lfm2ForCausalLM has layers that carry state along a row, which holds several documents",
    ):
        logprobs_by_document(policy, [documents()])


def test_layers_that_share_weights_are_not_fetched_as_one() -> None:
    model = FAMILIES["llama"]()
    assert _layers(model) == {type(model.model.layers[0])}
    model.model.layers[1].mlp = model.model.layers[0].mlp
    assert _layers(model) == set()
