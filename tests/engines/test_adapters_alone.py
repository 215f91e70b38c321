"""Engines that get adapters alone: what they answer is the trained model's, with adapters of any rank, and
over a change of these."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_core.config import EngineConfig, Lora
from rlhf_core.data.documents import compact
from rlhf_core.models.checkpoint.checkpoint_weights import scaled_adapters
from rlhf_core.models.load_model import trained_policy
from rlhf_core.models.lora import lora_layers, without_adapters
from rlhf_core.models.policy import Policy, masked_logprobs
from rlhf_core.objectives.collate import collate
from rlhf_core.rollout.engine_contract import Request, SampledAnswer, Sampling
from rlhf_core.rollout.vllm.vllm_engine import VllmEngine
from tests.support.families import make_family

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RANK = 3  # for which vLLM has no kernel: it pads
PROMPTS = [list(range(5, 40)), list(range(50, 70))]


@pytest.fixture
def policy(material: Path, tmp_path: Path) -> Policy:
    base = make_family("qwen3", material / "base", tmp_path / "base")
    return trained_policy(str(base), "float32", False, Lora(rank=RANK, alpha=24), 0).eval()


@pytest.fixture
def sampler(policy: Policy, tmp_path: Path) -> Iterator[VllmEngine]:
    """An engine that holds the model without adapters."""
    vllm = EngineConfig(kv_cache_gib=0.25, adapters="alone")
    with closing(
        VllmEngine(str(tmp_path / "base"), seed=0, max_model_len=128, config=vllm, adapter_rank=RANK)
    ) as started:
        yield started


def change(policy: Policy, seed: int) -> None:
    torch.manual_seed(seed)
    for layer in lora_layers(policy.model).values():
        layer.lora_B["default"].weight.data.normal_(std=0.05)


def receive(sampler: VllmEngine, named: dict[str, torch.Tensor], version: int) -> None:
    """What a sync does, without its channel."""
    engine: Any = sampler.llm.llm_engine
    worker = engine.engine_core.engine_core.model_executor.driver_worker.worker
    worker._channel = SimpleNamespace(receive=named.items)
    sampler.receive_weights(version)


def send(policy: Policy, sampler: VllmEngine, version: int) -> None:
    receive(sampler, dict(scaled_adapters(policy.model, lambda _: nullcontext())), version)


def trained(policy: Policy, documents: list[list[int]]) -> list[torch.Tensor]:
    """The trainer's log-probs of each token but the first."""
    batch = collate([[compact(tokens[:1], tokens[1:])] for tokens in documents], 0)
    with torch.no_grad():
        found = masked_logprobs(policy, batch).logprobs
    return [row[1 : len(tokens)] for row, tokens in zip(found, documents, strict=True)]


def gap(found: list[list[float]], expected: list[torch.Tensor]) -> float:
    return max(
        float((torch.tensor(got[1:]) - want).abs().max()) for got, want in zip(found, expected, strict=True)
    )


def test_log_probs_are_those_of_the_adapters_that_came_last(policy: Policy, sampler: VllmEngine) -> None:
    with without_adapters(policy.model):
        start = trained(policy, PROMPTS)
    assert gap(sampler.prompt_logprobs(PROMPTS), start) < 1e-4
    send(policy, sampler, 0)  # B is zero yet
    assert gap(sampler.prompt_logprobs(PROMPTS), start) < 1e-4
    for version in (1, 2):
        change(policy, version)
        send(policy, sampler, version)
        expected = trained(policy, PROMPTS)
        assert (
            gap(sampler.prompt_logprobs(PROMPTS), expected)
            < 1e-4
            < 0.1
            < gap([[0.0, *row.tolist()] for row in start], expected)
        )


def test_running_answers_go_on_with_the_new_adapters(policy: Policy, sampler: VllmEngine) -> None:
    """Each token after the change has the log-prob of an engine whose keys and values are partly of the
    adapters before."""
    change(policy, 1)
    send(policy, sampler, 1)
    how = Sampling(1, 1.0, 80, [])
    came: dict[int, SampledAnswer] = dict(sampler.advance([Request(0, PROMPTS[0], 7, how)], 0.02))
    assert not came, "it is not finished within 0.02 s"
    before = trained(policy, [PROMPTS[0]])
    change(policy, 2)
    send(policy, sampler, 2)
    while not came:
        came |= dict(sampler.advance([], 1.0))
    (answer,) = came.values()
    (_, first), (turn, second) = answer.versions
    assert (first, second) == (1, 2) and 0 <= turn < len(answer.tokens)
    whole = [*PROMPTS[0], *answer.tokens]
    (new,) = trained(policy, [whole])
    change(policy, 1)
    (old,) = trained(policy, [whole])
    assert torch.allclose(old[: len(before[0])], before[0], atol=1e-5)
    said = torch.tensor(answer.logprobs)
    at = len(PROMPTS[0]) - 1
    gaps = {name: (said - logprobs[at:]).abs() for name, logprobs in (("old", old), ("new", new))}
    assert (gaps["old"][:turn] < 1e-4).all()
    assert gaps["new"][turn:].mean() < gaps["old"][turn:].mean()


def test_layers_without_adapters_in_vllm_are_named(policy: Policy, sampler: VllmEngine) -> None:
    named = {
        f"base_model.model.model.layers.0.mlp.other.lora_{side}.weight": torch.zeros(RANK, RANK)
        for side in "AB"
    }
    with pytest.raises(
        Exception,
        match=r"vLLM has no adapters for model.layers.0.mlp.other: name other layers in lora.targets",
    ):
        receive(sampler, named, 1)


def started(family: str, material: Path, tmp_path: Path) -> VllmEngine:
    base = make_family(family, material / "base", tmp_path / "base")
    return VllmEngine(
        str(base),
        seed=0,
        max_model_len=128,
        config=EngineConfig(kv_cache_gib=0.25, adapters="alone"),
        adapter_rank=RANK,
    )


def test_a_layer_that_vllm_has_as_several_is_named(material: Path, tmp_path: Path) -> None:
    """Its adapter would have to be cut in two."""
    with closing(started("glm4", material, tmp_path)) as sampler:
        policy = trained_policy(str(tmp_path / "base"), "float32", False, Lora(rank=RANK), 0).eval()
        with pytest.raises(
            Exception,
            match=r"vLLM has no adapters for model.layers.0.mlp.gate_up_proj, .*: name other layers",
        ):
            send(policy, sampler, 1)
        parts = Lora(rank=RANK, targets=("q_proj", "o_proj", "down_proj"))
        policy = trained_policy(str(tmp_path / "base"), "float32", False, parts, 0).eval()
        change(policy, 1)
        send(policy, sampler, 1)
        assert gap(sampler.prompt_logprobs(PROMPTS), trained(policy, PROMPTS)) < 1e-4


def test_a_model_with_experts_is_refused_before_it_is_loaded(material: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"engine.adapters: alone is not for models with experts"):
        started("mixtral", material, tmp_path)
