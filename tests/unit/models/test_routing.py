"""Rollout routing replay: tokens go to the experts of the sampler, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import (
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from rlhf_core.config import PPO, Data
from rlhf_core.data.documents import Document, Prompt
from rlhf_core.models.experts import REPLAYED, replayed
from rlhf_core.models.kernels.attention import is_stateful
from rlhf_core.models.load_model import load_policy, recompute
from rlhf_core.models.policy import Policy, masked_logprobs
from rlhf_core.objectives.collate import collate
from rlhf_core.rollout.engine_contract import SampledAnswer
from rlhf_core.rollout.vllm.environment import returns_routing
from rlhf_core.rollout.vllm.vllm_answers import answer_in
from rlhf_core.stages.ppo import start_fleet as start
from rlhf_core.stages.ppo.roles.actor import Actor
from rlhf_core.stages.ppo.roles.read_only import ReferenceModel
from rlhf_core.stages.ppo.roles.role_passes import ModelSpec
from rlhf_core.stages.ppo.roles.trained import Update
from rlhf_core.stages.ppo.rollout_records import Experience
from rlhf_core.stages.ppo.sampling.rollout_group import RolloutGroup, rollout
from rlhf_core.stages.ppo.sampling.sampled_answers import PromptOrder, Sampled
from rlhf_core.stages.ppo.sampling.stored import read_ahead, write_ahead
from tests.support.families import FAMILIES, QWEN_MOE, SHAPE, config_class, make_family, model_class

SPARSE = {**SHAPE, "vocab_size": 96, "initializer_range": 0.2}
OTHERS = {
    "olmoe": lambda: OlmoeForCausalLM(
        OlmoeConfig(**SPARSE, num_experts=4, num_experts_per_tok=2, norm_topk_prob=False)
    ),
    "qwen2_moe": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**SPARSE, **{**QWEN_MOE, "norm_topk_prob": False}, shared_expert_intermediate_size=32)
    ),
}
LAYERS = 2
CHOSEN = 2
EXPERTS = 4


def policy_of(family: str) -> Policy:
    torch.manual_seed(0)
    if family in OTHERS:
        return Policy(OTHERS[family]().eval())
    name = {"qwen3_5_moe_text": "qwen3_5-moe"}.get(family, family.replace("_", "-"))
    in_each_layer = (
        {"first_k_dense_replace": 0, "mlp_layer_types": ["sparse"] * LAYERS}
        if "n_routed_experts" in FAMILIES[name][1]
        else {}
    )
    return Policy(model_class(name)(config_class(name)(**SPARSE | FAMILIES[name][1] | in_each_layer)).eval())


def routing_of(length: int, seed: int) -> np.ndarray:
    """Experts of all tokens but the last, another two of four for each token and layer."""
    generator = np.random.default_rng(seed)
    return np.stack(
        [[generator.permutation(EXPERTS)[:CHOSEN] for _ in range(LAYERS)] for _ in range(length - 1)]
    ).astype(np.uint8)


def documents(lengths: tuple[int, ...] = (9, 5, 7), with_experts: bool = True) -> list[Document]:
    generator = np.random.default_rng(7)
    return [
        Document(
            generator.integers(3, 90, n).tolist(),
            [False] * 2 + [True] * (n - 2),
            experts=routing_of(n, seed) if with_experts and seed != 1 else None,
        )
        for seed, n in enumerate(lengths)
    ]


class Forced(TorchFunctionMode):
    """Routers of the families, with top-k replaced by a table's experts, layer by layer."""

    def __init__(self, table: Tensor):
        super().__init__()
        self.table = table.flatten(0, 1).long()
        self.layer = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is not torch.topk or found.indices.shape[-1] != CHOSEN:  # of groups of experts
            return found
        chosen = torch.where(self.table[:, self.layer] >= 0, self.table[:, self.layer], found.indices)
        self.layer += 1
        return args[0].gather(-1, chosen), chosen


@pytest.mark.parametrize("family", REPLAYED)
def test_every_family_weights_replayed_experts_like_its_own(family: str) -> None:
    policy = policy_of(family)
    rows = (
        [[document] for document in documents()]
        if is_stateful(policy.model)
        else [documents()[:2], documents()[2:]]
    )
    batch = collate(rows, 0, experts=True)
    assert batch.experts is not None
    with torch.no_grad():
        plain = masked_logprobs(policy, batch).logprobs
        with Forced(batch.experts) as forced:
            expected = policy(batch.tokens, batch.positions, batch.documents, mask=batch.mask).logprobs
        policy.replay_routing()
        replayed = masked_logprobs(policy, batch).logprobs
        again = policy(batch.tokens, batch.positions, batch.documents, mask=batch.mask).logprobs
    assert forced.layer == LAYERS
    torch.testing.assert_close(replayed, expected)
    assert (replayed - plain).abs().max() > 0.05, "the replayed experts must differ"
    torch.testing.assert_close(again, plain)  # without a table nothing is replayed


def test_rows_of_a_batch_have_the_experts_of_their_tokens() -> None:
    one, two, three = documents()
    shared = Document([*one.tokens[:4], 3, 4], [False] * 4 + [True] * 2, shared=4, experts=routing_of(6, 5))
    batch = collate([[one, shared], [two, three]], 0, experts=True)
    assert batch.experts is not None and batch.experts.dtype == torch.int16
    assert batch.experts.shape == (*batch.tokens.shape, LAYERS, CHOSEN)
    expected = torch.full_like(batch.experts, -1)
    expected[0, :8] = torch.from_numpy(one.experts.astype(np.int16))
    expected[0, 9] = torch.from_numpy(shared.experts[4].astype(np.int16))
    expected[1, 5:11] = torch.from_numpy(three.experts.astype(np.int16))
    assert torch.equal(batch.experts, expected), "-1: last tokens, documents that tell nothing, padding"
    assert collate([documents(with_experts=False)], 0, experts=True).experts is None
    assert collate([documents()], 0).experts is None, "critic and reward models have no use for them"
    with pytest.raises(AssertionError, match="experts of 4"):
        Document([1, 2, 3, 4], [True] * 4, experts=routing_of(5, 0))
    there = batch.to("cpu")
    assert there.experts is not None and torch.equal(there.experts, expected)


def test_recomputed_layers_use_the_same_experts() -> None:
    gradients = []
    for checkpointing in (0.0, 1.0):
        policy = policy_of("mixtral").train()
        policy.replay_routing()
        recompute(policy.model, checkpointing)
        batch = collate([documents()], 0, experts=True)
        masked_logprobs(policy, batch).logprobs.sum().backward()
        gradients.append(
            {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
        )
    # routers are trained
    assert gradients[0].keys() == gradients[1].keys() and any("gate" in name for name in gradients[0])
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], msg=name)


def test_replay_removes_the_effect_of_rounding_on_routing(material: Path, tmp_path: Path) -> None:
    """bf16 against fp32: with the experts that fp32 chose the difference is smaller, as a dense model's
    is."""
    base = make_family("mixtral", material / "base", tmp_path / "base")
    whole = load_policy(str(base)).eval()
    rounded = load_policy(str(base), "bfloat16").eval()
    chosen: list[Tensor] = []
    for part in whole.modules():
        if type(part).__name__ == "MixtralTopKRouter":
            part.register_forward_hook(lambda module, inputs, output: chosen.append(output[2]))
    generator = np.random.default_rng(0)
    plain = [Document(generator.integers(3, 80, 24).tolist(), [False] + [True] * 23) for _ in range(64)]
    batch = collate([[document] for document in plain], 0)
    with torch.no_grad():
        expected = masked_logprobs(whole, batch).logprobs
        before = masked_logprobs(rounded, batch).logprobs
        ids = torch.stack(chosen, 1).view(*batch.tokens.shape, LAYERS, CHOSEN).numpy()
        rounded.replay_routing()
        with_experts = [
            [Document(d.tokens, d.mask, experts=ids[i, : len(d) - 1])] for i, d in enumerate(plain)
        ]
        after = masked_logprobs(rounded, collate(with_experts, 0, experts=True)).logprobs
    gaps = [(found - expected).abs().mean() for found in (before, after)]
    assert gaps[1] < 0.9 * gaps[0], gaps


def test_the_actor_scores_and_trains_with_the_samplers_experts(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    base = make_family("qwen3-moe", material / "base", tmp_path / "base")
    model = ModelSpec(str(base), "float32", 0, 4, False)
    config = PPO(prompts=Data(sources="none"), zero_stage=0)
    replaying, plain = (
        Actor(model, config.model_copy(update={"routing_replay": replay}), 0) for replay in (True, False)
    )
    routed = documents()
    without_experts = documents(with_experts=False)
    theirs = dict(replaying.logprobs(routed))
    own = dict(plain.logprobs(without_experts))
    begun, other = (
        dict(ReferenceModel(model, 1.0, routing_replay=replay).logprobs(routed)) for replay in (True, False)
    )
    np.testing.assert_allclose(begun[0], theirs[0], atol=1e-5, err_msg="the KL to where the actor began is 0")
    np.testing.assert_allclose(other[0], own[0], atol=1e-5)
    assert np.abs(theirs[0] - own[0]).max() > 0.05
    np.testing.assert_allclose(dict(replaying.logprobs(without_experts))[0], own[0], atol=1e-5)
    np.testing.assert_allclose(dict(plain.logprobs(routed))[0], own[0], atol=1e-5)

    def first_ratio(actor: Actor) -> float:
        ones = [np.ones(len(d), np.float32) for d in routed]
        items = [
            Experience(d, theirs[i], theirs[i], theirs[i], 0 * one, one, one)
            for i, (d, one) in enumerate(zip(routed, ones, strict=True))
        ]
        return actor.train(items, [Update([0, 1, 2], 1e-6, 0.0)]).metrics[0]["policy/ratio"]

    assert first_ratio(replaying) == pytest.approx(1, abs=1e-5)
    assert abs(first_ratio(plain) - 1) > 1e-3


def test_an_unsupported_family_is_not_replayed() -> None:
    torch.manual_seed(0)
    policy = Policy(
        GraniteMoeForCausalLM(GraniteMoeConfig(**SPARSE, num_local_experts=4, num_experts_per_tok=2)).eval()
    )
    with_experts, without_experts = (
        collate([documents()], 0, experts=True),
        collate([documents(with_experts=False)], 0, experts=True),
    )
    policy.replay_routing()
    with torch.no_grad():
        torch.testing.assert_close(
            masked_logprobs(policy, with_experts).logprobs, masked_logprobs(policy, without_experts).logprobs
        )


@pytest.mark.parametrize(
    ("config", "version", "capability", "expected"),
    [
        ({"model_type": "mixtral", "sliding_window": None}, "0.24.0", (9, 0), True),
        ({"model_type": "mixtral", "sliding_window": 4096}, "0.24.0", (9, 0), False),
        (
            {"model_type": "qwen3_moe", "sliding_window": 4096, "use_sliding_window": False},
            "0.24.0",
            (9, 0),
            True,
        ),
        (
            dict(
                model_type="gpt_oss", sliding_window=128, layer_types=["sliding_attention", "full_attention"]
            ),
            "0.24.0",
            (9, 0),
            True,
        ),
        (
            {"model_type": "gpt_oss", "sliding_window": 128, "layer_types": ["sliding_attention"]},
            "0.24.0",
            (9, 0),
            False,
        ),
        ({"model_type": "qwen3_moe"}, "0.24.0", (10, 0), False),
        ({"model_type": "qwen3_moe"}, "0.32.0", (9, 0), False),
        ({"model_type": "qwen3_moe"}, "0.24.0", None, False),
        ({"model_type": "qwen3"}, "0.24.0", (9, 0), False),
        ({}, "0.24.0", (9, 0), False),
    ],
)
def test_routing_is_requested_from_supported_releases(
    config: dict[str, Any],
    version: str,
    capability: tuple[int, int] | None,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr("rlhf_core.rollout.vllm.patches.table.installed_release", lambda: version)
    assert (replayed(config) and returns_routing()) is expected


def request(experts: np.ndarray | None) -> SimpleNamespace:
    """What vLLM returns: a prompt of two tokens and an answer of three."""
    answer = SimpleNamespace(token_ids=[5, 6, 1], logprobs=None, finish_reason="stop", routed_experts=experts)
    return SimpleNamespace(prompt_token_ids=[3, 4], outputs=[answer])


def test_experts_that_vllm_returns_reach_the_forward_pass() -> None:
    answer = answer_in(request(routing_of(5, 3)))
    document = rollout(Prompt((), [3, 4], {}, False), answer).document
    batch = collate([[document]], 0, experts=True)
    assert batch.experts is not None and np.array_equal(batch.experts[0, :4].numpy(), routing_of(5, 3))
    assert answer_in(request(None)).experts is None
    for wrong in (
        routing_of(4, 3),
        routing_of(6, 3),
        routing_of(2, 3),
        np.zeros((4, LAYERS, CHOSEN), np.uint8),
    ):
        with pytest.raises(RuntimeError, match="returned no routed experts"):
            answer_in(request(wrong))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"sampler": True, "actor": True, "reference": True}),
        ({"reference": "other"}, {"sampler": True, "actor": True, "reference": False}),
        ({"routing_replay": False}, {"sampler": False, "actor": False, "reference": False}),
    ],
)
def test_roles_replay_as_configured(
    fields: dict[str, Any], expected: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: dict[str, bool] = {}

    class Group:
        def __init__(self, name: str):
            self.name = name

        def build(self, factory: Any, **options: Any) -> SimpleNamespace:
            replays = (
                options["config"].routing_replay if self.name == "actor" else options.get("routing_replay")
            )
            if replays is not None:
                built[self.name] = replays
            up = SimpleNamespace(imports=0.0, loading=0.0, process=1)
            return SimpleNamespace(role=self.name, wait=lambda timeout: [up])

    monkeypatch.setattr(RolloutGroup, "open_channel", lambda self: None)
    monkeypatch.setattr(start, "survey", lambda *_: None)
    config = PPO(prompts=Data(sources="none"), zero_stage=1, **fields)
    names = (
        "sampler",
        "actor",
        "critic",
        "reference",
        *(f"reward:{source.title}" for source in config.reward_models),
    )
    paths = dict.fromkeys(names, "base") | ({"reference": "another"} if config.reference else {})
    groups: Any = {name: Group(name) for name in names}
    engines = RolloutGroup(config, groups["sampler"], groups["actor"])
    start.start_fleet(config, paths, SimpleNamespace(pad_token_id=0), 0, groups, engines, False)  # type: ignore[arg-type]
    assert built == expected


def test_answers_stored_on_disk_keep_their_experts(tmp_path: Path) -> None:
    order = PromptOrder([Prompt((), [i, 7], {}, False) for i in range(4)], 2, seed=3)
    prompts = [prompt for prompt, _ in order.take(0, 2)]
    found = [
        rollout(p, SampledAnswer([5, 6], [-1.0, -2.0], True, routing_of(4, i) if i else None))
        for i, p in enumerate(prompts)
    ]
    write_ahead(tmp_path, Sampled(found, None, 2, {}, age=1))
    back = read_ahead(tmp_path, order, 1)
    assert back is not None and back.rollouts[0].document.experts is None
    kept = back.rollouts[1].document.experts
    assert kept is not None and kept.dtype == np.uint8 and np.array_equal(kept, routing_of(4, 1))
