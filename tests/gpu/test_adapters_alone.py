"""Engines that get adapters alone, on a GPU: vLLM's kernels and CUDA graphs answer with the adapters that
came last."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from rlhf_core.config import EngineConfig, Lora
from rlhf_core.data.documents import compact
from rlhf_core.models.load_model import trained_policy
from rlhf_core.models.lora import without_adapters
from rlhf_core.models.policy import Policy, masked_logprobs
from rlhf_core.objectives.collate import collate
from rlhf_core.rollout.engine_contract import SampledAnswer, Sampling
from rlhf_core.rollout.vllm.vllm_engine import VllmEngine
from tests.engines.test_adapters_alone import RANK, change, send
from tests.support.sharp_model import save_sharp_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
PROMPTS = [[7 + (i * j) % 300 for j in range(40)] for i in range(1, 17)]


def gap(policy: Policy, said: list[tuple[list[int], SampledAnswer]]) -> float:
    """The mean |difference| of the log-probs of answers."""
    batch = collate([[compact(prompt, answer.tokens)] for prompt, answer in said], 0).to("cuda")
    with torch.no_grad():
        ours = masked_logprobs(policy, batch).logprobs[batch.mask].cpu()
    return float(
        (ours - torch.tensor([value for _, answer in said for value in answer.logprobs])).abs().mean()
    )


@pytest.mark.parametrize("sleeps", [False, True])
def test_answers_have_the_log_probs_of_the_adapters_that_came_last(sleeps: bool, tmp_path: Path) -> None:
    save_sharp_model(tmp_path)
    policy = trained_policy(str(tmp_path), "bfloat16", False, Lora(rank=RANK), 0).eval().cuda()
    vllm = EngineConfig(gpus=1, gpu_memory_utilization=0.3, adapters="alone")
    how = Sampling(4, 1.0, 64, [0], seed_whole=True)
    with closing(
        VllmEngine(
            str(tmp_path),
            seed=0,
            max_model_len=256,
            dtype="bfloat16",
            config=vllm,
            adapter_rank=RANK,
            can_sleep=sleeps,
        )
    ) as sampler:
        for version in (1, 2):
            change(policy, version)
            if sleeps:
                sampler.sleep(keep_weights=True)
                sampler.wake()
            send(policy, sampler, version)
            groups = sampler.generate(PROMPTS, range(0, 1600, 100), how)
            said = [
                (prompt, answer) for prompt, group in zip(PROMPTS, groups, strict=True) for answer in group
            ]
            right = gap(policy, said)
            with without_adapters(policy.model):
                wrong = gap(policy, said)
            print(f"adapters {version}: gap {right:.4f}, without adapters {wrong:.3f}")
            assert right < 0.03 < wrong
