"""Options of vLLM's engine that change its numbers or how it samples, on a GPU: FP8 and truncated
distributions.

The model is a small Qwen2 of random weights (seed 0) whose distributions are sharp enough to tell
temperatures apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_core.config import EngineConfig
from rlhf_core.data.documents import Document, compact
from rlhf_core.models.load_model import load_policy
from rlhf_core.models.logprobs.token_logprobs import WHOLE, Truncation
from rlhf_core.models.policy import masked_logprobs
from rlhf_core.objectives.collate import collate
from rlhf_core.rollout.engine_contract import Sampling
from rlhf_core.rollout.vllm.vllm_engine import VllmEngine
from rlhf_core.stages.ppo.measured.probe import MARGIN
from rlhf_core.stages.ppo.measured.rounding import noise_of, noisy
from tests.support.sharp_model import VOCABULARY, save_sharp_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
PROMPTS = [[7 + (i * j) % 11 for j in range(40)] for i in range(1, 9)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sharp_model(tmp_path_factory.mktemp("model"))


@contextmanager
def engine(model: Path, **options: Any) -> Iterator[VllmEngine]:
    vllm = EngineConfig(gpus=1, gpu_memory_utilization=0.3, options=options)
    with closing(VllmEngine(str(model), seed=0, max_model_len=256, dtype="bfloat16", config=vllm)) as made:
        yield made


def gaps(sampler: VllmEngine, model: Path, how: Sampling, temperature: float, top: Truncation) -> np.ndarray:
    """|Log-probs of vLLM - trainer's| of sampled tokens."""
    policy = load_policy(str(model), "bfloat16").eval().cuda()
    groups = sampler.generate(PROMPTS, range(0, 80, 10), how)
    said = [(prompt, answer) for prompt, group in zip(PROMPTS, groups, strict=True) for answer in group]
    documents = [compact(prompt, a.tokens) for prompt, a in said]
    batch = collate([[d] for d in documents], pad_token_id=0).to("cuda")
    with torch.no_grad():
        ours = masked_logprobs(policy, batch, temperature, top=top).logprobs[batch.mask]
    return (ours.cpu() - torch.tensor([logprob for _, a in said for logprob in a.logprobs])).abs().numpy()


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8"}, {"quantization": "fp8"}])
def test_synced_weights_are_within_the_bound_of_their_format(options: dict[str, Any], model: Path) -> None:
    """The noise that the bound follows from is of the size of the gap; weights that were not sent are beyond
    it."""
    policy = load_policy(str(model), "bfloat16").eval().cuda()
    numbers = np.random.default_rng(0)
    documents = [numbers.integers(5, VOCABULARY, 128).tolist() for _ in range(8)]
    batch = collate([[Document(d, [True] * len(d))] for d in documents], pad_token_id=0).to("cuda")
    with engine(model, **options) as sampler:
        for weight in policy.model.parameters():
            weight.data *= 1 + 0.5 * torch.rand(weight.shape[0], *[1] * (weight.dim() - 1), device="cuda").to(
                weight.dtype
            )
        with torch.no_grad():
            ours = masked_logprobs(policy, batch).logprobs[:, 1:].cpu()
            with noisy(policy, noise_of("bfloat16", options)):
                noise = (masked_logprobs(policy, batch).logprobs[:, 1:].cpu() - ours).abs()
        old = (torch.tensor(sampler.prompt_logprobs(documents))[:, 1:] - ours).abs()
        sampler.update(policy.model.state_dict().items())
        new = (torch.tensor(sampler.prompt_logprobs(documents))[:, 1:] - ours).abs()
    print(
        f"{options}: gap {new.max():.3g} mean {new.mean():.3g}, noise {noise.max():.3g} mean"
        f" {noise.mean():.3g}, not sent {old.max():.3g}"
    )
    assert new.max() < MARGIN * noise.max() < old.max()


def test_log_probs_are_those_of_the_distribution_sampled_from(model: Path) -> None:
    with engine(model) as sampler:
        for temperature, top in [(1.0, WHOLE), (0.7, Truncation(0.9, 0)), (1.0, Truncation(1.0, 20))]:
            how = Sampling(16, temperature, 64, [0], top_p=top.top_p, top_k=top.top_k)
            found, other = (
                gaps(sampler, model, how, trained, top) for trained in (temperature, temperature * 1.2)
            )
            print(
                temperature, top, f"mean gap {found.mean():.3g}, with another temperature {other.mean():.3g}"
            )
            assert found.mean() < 0.03 and np.quantile(found, 0.99) < 0.25 and 2 * found.mean() < other.mean()
