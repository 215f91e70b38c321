"""Engine and policy of every family on one GPU, without Ray: which of the two is wrong where their log-probs
differ."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from multiprocessing import get_context
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from rlhf_core.config import EngineConfig
from rlhf_core.data.documents import Document, compact
from rlhf_core.hub.model_config import num_experts
from rlhf_core.models.checkpoint.checkpoint_weights import checkpoint_weights
from rlhf_core.models.load_model import load_policy
from rlhf_core.models.policy import Policy, masked_logprobs
from rlhf_core.objectives.collate import collate
from rlhf_core.rollout.engine_contract import Sampling
from rlhf_core.rollout.vllm.vllm_engine import VllmEngine
from tests.support.families import make_family

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RNG = random.Random(0)
DOCUMENTS = [[RNG.randrange(3, 80) for _ in range(24)] for _ in range(8)]


# Of a process of its own, which holds one engine. A class of this file's could not be imported there where
# another package is called `tests`.
BaseManager.register("VllmEngine", VllmEngine)


class Setting(NamedTuple):
    """A checkpoint, its log-probs in fp32 on the host, and its engine in another process."""

    base: Path
    expected: Tensor
    sampler: VllmEngine

    def sampled(self) -> Tensor:
        return torch.tensor(self.sampler.prompt_logprobs(DOCUMENTS))


def logprobs(policy: Policy, device: str) -> Tensor:
    batch = collate([[Document(d, [False] * len(d))] for d in DOCUMENTS], pad_token_id=0).to(device)
    with torch.no_grad():
        return (
            policy.to(device)(batch.tokens, batch.positions, batch.documents)
            .logprobs[:, : len(DOCUMENTS[0])]
            .cpu()
        )


def assert_close(a: Tensor, b: Tensor) -> None:
    """bf16's noise at nine of ten tokens; at the others experts may have been chosen otherwise."""
    gaps = (a - b).abs().flatten()
    assert gaps.quantile(0.9) < 0.15 and gaps.median() < 0.05, gaps.sort().values[:: len(gaps) // 8].tolist()


@pytest.fixture(params=["llama", "qwen2", "qwen3", "mixtral", "qwen3-moe"], scope="module")
def setting(
    request: pytest.FixtureRequest, material: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Setting]:
    base = make_family(request.param, material / "base", tmp_path_factory.mktemp(request.param))
    # before kernels for GPUs take the place of the model's parts
    expected = logprobs(load_policy(str(base)).eval(), "cpu")
    yield from started(base, expected)


def started(base: Path, expected: Tensor) -> Iterator[Setting]:
    with BaseManager(ctx=get_context("spawn")) as engines:
        options = {
            "max_model_len": 96,
            "dtype": "bfloat16",
            "engine": EngineConfig(kv_cache_gib=0.5, gpu_memory_utilization=0.1),
            "routing_replay": True,
        }
        yield Setting(base, expected, engines.VllmEngine(str(base), seed=0, **options))  # type: ignore[attr-defined]


def test_the_policy_on_the_gpu_is_that_on_the_host(setting: Setting) -> None:
    assert_close(logprobs(load_policy(str(setting.base), "bfloat16").eval(), DEVICE), setting.expected)


def test_the_engine_loads_what_the_policy_loads(setting: Setting) -> None:
    assert_close(setting.sampled(), setting.expected)


def test_a_second_engine_of_the_model_loads_it_too(setting: Setting) -> None:
    """vLLM keeps what it compiled for the next start, whose experts were those of another layer."""
    for second in started(setting.base, setting.expected):
        assert_close(second.sampled(), second.expected)


def test_with_the_experts_of_the_engine_the_policy_is_closer_to_the_engine(setting: Setting) -> None:
    groups = setting.sampler.generate(DOCUMENTS, range(8), Sampling(64, 1.0, 24, []))
    sampled = [(prompt, answer) for prompt, group in zip(DOCUMENTS, groups, strict=True) for answer in group]
    policy = load_policy(str(setting.base), "bfloat16").eval().to(DEVICE)
    if not num_experts(policy.model.config):
        assert all(answer.experts is None for _, answer in sampled)
        return
    own: list[Tensor] = []
    for part in policy.modules():
        if type(part).__name__.endswith("TopKRouter"):
            part.register_forward_hook(lambda module, inputs, output: own.append(output[2]))
    policy.replay_routing()

    def gaps(telling: bool) -> Tensor:
        rows = [[compact(p, a.tokens, a.experts if telling else None)] for p, a in sampled]
        batch = collate(rows, pad_token_id=0, experts=True).to(DEVICE)
        with torch.no_grad():
            found = masked_logprobs(policy, batch).logprobs[batch.mask]
        return (found.cpu() - torch.tensor([logprob for _, a in sampled for logprob in a.logprobs])).abs()

    assert all(a.experts.shape == (len(p) + len(a.tokens) - 1, 2, 2) for p, a in sampled)
    plain = gaps(telling=False)
    chosen = torch.stack(own, 1).view(len(sampled), -1, 2, 2).sort(-1).values.cpu()
    routed = [torch.from_numpy(answer.experts.astype("int64")).sort(-1).values for _, answer in sampled]
    assert all((experts.diff(dim=-1) > 0).all() for experts in routed), "no token goes to an expert twice"
    # (tokens, layers) each
    same = [(experts == mine[: len(experts)]).all(-1) for experts, mine in zip(routed, chosen, strict=True)]
    # all but the undecided tokens would have gone there of themselves
    assert torch.cat(same).float().mean() > 0.9
    # of the answers
    moved = torch.cat(
        [~row[len(prompt) - 1 :].all(-1) for (prompt, _), row in zip(sampled, same, strict=True)]
    )
    replayed = gaps(telling=True)
    print(
        f"gap {plain.mean():.4f}, largest {plain.max():.2f} nats; with an engine's experts"
        f" {replayed.mean():.4f}, {replayed.max():.2f}"
    )
    print(
        f"of {moved.sum()} of {len(moved)} tokens that go elsewhere {plain[moved].mean():.4f}; routed"
        f" {replayed[moved].mean():.4f}"
    )
    assert replayed.quantile(0.99) < 0.2, replayed.quantile(0.99)
    assert replayed.mean() < 0.9 * plain.mean() and replayed.mean() < 0.05, (plain.mean(), replayed.mean())
    assert replayed[moved].mean() < 0.5 * plain[moved].mean(), (plain[moved].mean(), replayed[moved].mean())


def test_the_engine_takes_weights_as_they_are(setting: Setting) -> None:
    policy = load_policy(str(setting.base), "bfloat16").eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter)
    expected = logprobs(policy, DEVICE)
    before = setting.sampled()
    setting.sampler.update(
        [
            (name, weight.cpu())
            for name, weight in checkpoint_weights(policy.model, lambda parameters: nullcontext())
        ]
    )
    assert (before - expected).abs().median() > 0.3, (
        "the weights have not changed enough for the test to tell"
    )
    assert_close(setting.sampled(), expected)
