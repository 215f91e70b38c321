"""Floors of an iteration, against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlhf_core.data.documents import Document, Prompt
from rlhf_core.models.load_model import recompute
from rlhf_core.stages.ppo.iteration import training_passes
from rlhf_core.stages.ppo.measured.roofline import (
    Ceilings,
    ModelShape,
    RooflineInputs,
    floors,
    measure_ceilings,
    shape_of,
)
from rlhf_core.stages.ppo.roles.trained import Update
from rlhf_core.stages.ppo.rollout_records import Rollout

SCORINGS = {"actor": 1, "critic": 1, "reference": 1}
SHAPE = ModelShape(parameters=1000, weight_bytes=2000, kv_bytes=10)


def rollout(prompt: int, answer: int) -> Rollout:
    document = Document([1] * (prompt + answer), [False] * prompt + [True] * answer)
    return Rollout(Prompt([1] * prompt, (), {}, False), document, np.zeros(prompt + answer), True)


def machine(gpus: dict[str, list[str]], span: int = 1) -> RooflineInputs:
    return RooflineInputs(dict.fromkeys(gpus, SHAPE), gpus, span, Ceilings(flops=1e6, bandwidth=1e5))


def test_roles_on_one_gpu_add_up_and_roles_apart_do_not() -> None:
    apart = {"actor": ["a"], "critic": ["b"], "reference": ["c"], "sampler": ["d"]}
    found = floors([rollout(10, 30)], {"actor": 2, "critic": 2}, machine(apart), SCORINGS)
    assert found["floor/score"] == pytest.approx(2 * 1000 * 40 / 1e6)
    assert found["floor/train"] == pytest.approx(6 * 1000 * 40 * 2 / 1e6)
    shared = floors(
        [rollout(10, 30)], {"actor": 2, "critic": 2}, machine({role: ["a"] for role in apart}), SCORINGS
    )
    assert shared["floor/score"] == pytest.approx(3 * found["floor/score"])
    assert shared["floor/train"] == pytest.approx(2 * found["floor/train"])
    split = floors(
        [rollout(10, 30)], {"actor": 1}, machine({"actor": ["a", "b"], "sampler": ["c"]}), {"actor": 1}
    )
    assert split["floor/train"] == pytest.approx(6 * 1000 * 40 / 2 / 1e6)
    twice = floors([rollout(10, 30)], {"actor": 1}, machine({"actor": ["a"], "sampler": ["c"]}), {"actor": 2})
    # for the reference too, without its adapters
    assert twice["floor/score"] == pytest.approx(2 * found["floor/score"])


def test_the_actor_passes_over_less_where_steps_are_left_out() -> None:
    updates = {"actor": [Update([0], 1e-6, 0.0)] * 4, "critic": [Update([0], 1e-6, 0.0)] * 4}
    taken = {"policy/ratio": 1.0, "value/loss": 1.0}
    assert training_passes(updates, [taken] * 4, 2) == {"actor": 2.0, "critic": 2.0}
    steps = [taken, taken, taken, {"value/loss": 1.0}]
    assert training_passes(updates, steps, 2) == {"actor": 1.5, "critic": 2.0}
    assert training_passes({"critic": updates["critic"]}, steps, 2) == {"critic": 2.0}
    assert training_passes({"actor": []}, [], 2) == {"actor": 0.0}
    apart = {"actor": ["a"], "critic": ["b"], "sampler": ["c"]}
    found = floors([rollout(10, 30)], {"actor": 1.5, "critic": 1}, machine(apart), {})
    assert found["floor/train"] == pytest.approx(6 * 1000 * 40 * 1.5 / 1e6)


def test_a_prompt_of_several_answers_counts_once() -> None:
    gpus = {"actor": ["a"], "sampler": ["b"]}
    found = floors(
        [rollout(10, 30), rollout(10, 20), rollout(5, 5)], {"actor": 1}, machine(gpus), {"actor": 1}
    )
    assert found["floor/score"] == pytest.approx(2 * 1000 * (15 + 55) / 1e6)
    assert found["floor/train"] == pytest.approx(6 * 1000 * (15 + 55) / 1e6)


def test_generation_reads_weights_for_the_longest_answer_and_keys_for_all() -> None:
    gpus = {"actor": ["a"], "sampler": ["b"]}
    found = floors([rollout(10, 30), rollout(20, 10)], {"actor": 1}, machine(gpus), {"actor": 1})
    read = 10 * (30 * (10 + 15) + 10 * (20 + 5))
    assert found["floor/generate"] == pytest.approx(2 * 1000 * 30 / 1e6 + (30 * 2000 + read) / 1e5)
    halved = floors(
        [rollout(10, 30), rollout(20, 10)],
        {"actor": 1},
        machine({"actor": ["a"], "sampler": ["b", "c"]}, span=2),
        {"actor": 1},
    )
    assert halved["floor/generate"] == pytest.approx(found["floor/generate"] / 2)


def tiny() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return Qwen2ForCausalLM(config)


def test_shapes_are_read_from_the_model() -> None:
    model = tiny()
    count = sum(parameter.numel() for parameter in model.parameters())
    assert shape_of(model) == ModelShape(count, 4 * count, 2 * 4 * 2 * 8 * 4)


def test_of_experts_those_count_that_a_token_is_sent_to() -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    experts = 3 * 8 * 3 * 32 * 24
    assert shape_of(model) == ModelShape(count - experts * 6 // 8, 4 * count, 2 * 3 * 2 * 8 * 4, experts=True)


def test_ceilings_are_measured() -> None:
    found = measure_ceilings(torch.device("cpu"), torch.float32)
    assert 1e8 < found.flops < 1e15 and 1e7 < found.bandwidth < 1e13


@pytest.mark.parametrize(("share", "layers"), [(0.0, 0), (0.5, 2), (1.0, 4)])
def test_a_share_of_the_layers_is_recomputed_and_the_gradient_stays(share: float, layers: int) -> None:
    def gradient(model: nn.Module) -> Tensor:
        tokens = torch.arange(12)[None]
        model.train()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        return model.get_parameter("model.embed_tokens.weight").grad

    model = tiny()
    plain = tiny()
    recompute(model, share)
    assert sum(getattr(layer, "gradient_checkpointing", False) for layer in model.model.layers) == layers
    torch.testing.assert_close(gradient(model), gradient(plain))
