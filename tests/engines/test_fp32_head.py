"""Engines and trainer in bf16: with the head in fp32 their log-probs of sampled answers are closer, also after
new weights; and what vLLM 0.24 is changed to do."""

from __future__ import annotations

from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf_core.config import EngineConfig
from rlhf_core.data.documents import compact
from rlhf_core.models.checkpoint.checkpoint_weights import checkpoint_weights
from rlhf_core.models.load_model import load_policy
from rlhf_core.models.policy import Policy, masked_logprobs
from rlhf_core.objectives.collate import collate
from rlhf_core.rollout.engine_contract import Sampling
from rlhf_core.rollout.engine_kinds import open_engine
from rlhf_core.rollout.vllm.patches import fp32_heads
from tests.support.families import make_family

pytestmark = pytest.mark.slow
PROMPTS = [[5, 9, 20, 33], [8, 8, 9, 10], [40, 51, 7, 3], [77, 12, 5, 30]]


def offset(material: Path, folder: Path, family: str = "llama") -> Path:
    """A model in bf16 with one feature that all tokens have and that makes all logits large, which changes no
    probability, but is rounded with them."""
    make_family(family, material / "base", folder, torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 10.0
        model.get_output_embeddings().weight[:, 0] = 10.0
    model.save_pretrained(folder)
    return folder


def gap(policy: Policy, engine: Any) -> float:
    """Mean |difference| of log-probs of answers that the engine samples."""
    groups = engine.generate(PROMPTS, range(len(PROMPTS)), Sampling(8, 1.0, 24, []))
    pairs = [(prompt, answer) for prompt, group in zip(PROMPTS, groups, strict=True) for answer in group]
    batch = collate([[compact(prompt, answer.tokens)] for prompt, answer in pairs], pad_token_id=0)
    with torch.no_grad():
        ours = masked_logprobs(policy, batch).logprobs[batch.mask]
    theirs = torch.tensor([value for _, answer in pairs for value in answer.logprobs])
    return float((ours - theirs).abs().mean())


@pytest.mark.parametrize(
    ("kind", "family"), [("vllm", "llama"), ("vllm", "qwen2"), ("transformers", "qwen2")]
)
def test_log_probs_are_closer(kind: str, family: str, material: Path, tmp_path: Path) -> None:
    """Of an untied head and of tied ones."""
    base = offset(material, tmp_path / "base", family)
    config = EngineConfig(kind=kind, kv_cache_gib=0.5)
    policy = load_policy(str(base), "bfloat16").eval()
    found = {}
    for on in (False, True):
        policy.fp32_head = on
        options = {"seed": 0, "max_model_len": 96, "dtype": "bfloat16", "fp32_head": on}
        with closing(open_engine(str(base), config, **options)) as engine:
            found[on] = gap(policy, engine)
            if on:
                with torch.no_grad():
                    policy.model.get_output_embeddings().weight[:, 1:].mul_(-1)
                stale = gap(policy, engine)
                weights = checkpoint_weights(policy.model, lambda parameters: nullcontext())
                engine.update((name, weight.clone()) for name, weight in weights)
                after = gap(policy, engine)
    print(f"{kind}: {found[False]:.5f} nats, with fp32_head {found[True]:.5f}, after a sync {after:.5f}")
    assert found[True] < 0.75 * found[False]
    assert after < 0.75 * found[False] and stale > 0.1


def test_a_recipe_may_have_overrides_of_its_own(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlhf_core.rollout.vllm import vllm_engine

    given: dict[str, Any] = {}

    class Started(Exception):
        pass

    def start(**options: Any) -> None:
        given.update(options)
        raise Started

    library = vllm_engine.library(0.5)
    monkeypatch.setattr(library, "LLM", start)
    base = offset(material, tmp_path / "base")
    config = EngineConfig(options={"hf_overrides": {"rope_theta": 5.0}})
    for on, expected in ((True, {"head_dtype": "float32", "rope_theta": 5.0}), (False, {"rope_theta": 5.0})):
        with pytest.raises(Started):
            open_engine(str(base), config, seed=0, max_model_len=96, dtype="bfloat16", fp32_head=on)
        assert given["hf_overrides"] == expected


class Processor:
    """As in vLLM 0.24."""

    org_vocab_size = 7

    def __init__(self, scale: float = 1.0):
        self.scale = scale

    def _gather_logits(self, logits: Tensor) -> Tensor | None:
        return logits

    def _get_logits(self, hidden_states: Tensor, lm_head: Any, embedding_bias: Tensor | None) -> Tensor:
        return torch.nn.functional.linear(hidden_states, lm_head.weight, embedding_bias)[..., :7]


@pytest.mark.parametrize("on", [True, False])
def test_the_change_to_an_earlier_vllm(on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.config
    from vllm.model_executor.layers import logits_processor

    own = type("Processor", (Processor,), dict(vars(Processor)))
    monkeypatch.setattr(logits_processor, "LogitsProcessor", own)
    config = SimpleNamespace(**(fp32_heads.FP32_HEAD if on else {}))
    current = SimpleNamespace(model_config=SimpleNamespace(hf_config=config))
    monkeypatch.setattr(vllm.config, "get_current_vllm_config", lambda: current)
    fp32_heads.apply()
    made: Any = own(scale=2.0)
    hidden = torch.randn(3, 16).bfloat16()
    head = SimpleNamespace(weight=torch.randn(8, 16).bfloat16())
    logits = made._get_logits(hidden, head, None)
    exact = (hidden.double() @ head.weight.double().t())[:, :7]
    assert made.scale == 2.0 and logits.dtype == (torch.float32 if on else torch.bfloat16)
    assert bool((logits - exact).abs().max() < 1e-5) == on
