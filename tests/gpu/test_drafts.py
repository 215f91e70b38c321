"""Drafted tokens on a GPU: their distribution and their log-probs are those of the trainer's model.

The model is a small Qwen2 of random weights (seed 0) and few tokens, so that n-grams of prompts and answers
are drafted and some are right.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_core.config import EngineConfig
from rlhf_core.data.documents import Document, compact
from rlhf_core.models.load_model import load_policy
from rlhf_core.models.logprobs.token_logprobs import WHOLE, Truncation
from rlhf_core.models.policy import Policy, masked_logprobs
from rlhf_core.objectives.collate import collate
from rlhf_core.rollout.engine_contract import SampledAnswer, Sampling
from rlhf_core.rollout.vllm.vllm_engine import VllmEngine
from tests.support.sharp_model import save_sharp_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
ANSWERS = 8192
VOCABULARY = 64
REPEATED = [5, 6, 7, 8, 9] * 8
NUCLEUS = Truncation(0.9, 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sharp_model(tmp_path_factory.mktemp("model"), VOCABULARY)


def logprobs(
    policy: Policy, documents: list[Document], temperature: float, top: Truncation
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T) of the trainer, and the mask of answers."""
    batch = collate([[document] for document in documents], pad_token_id=0).to("cuda")
    with torch.no_grad():
        return masked_logprobs(policy, batch, temperature, top=top).logprobs.cpu(), batch.mask.cpu()


def surprise(policy: Policy, answers: list[SampledAnswer], temperature: float, top: Truncation) -> float:
    """Chi-square of the second tokens after the six most frequent first ones, in standard deviations from its
    mean."""
    firsts = np.bincount([answer.tokens[0] for answer in answers], minlength=VOCABULARY)
    chi = 0.0
    freedom = 0
    for first in np.argsort(-firsts)[:6].tolist():
        asked = [compact(REPEATED, [first, token]) for token in range(VOCABULARY)]
        p = logprobs(policy, asked, temperature, WHOLE)[0][:, len(REPEATED) + 1].double().exp().numpy()
        order = np.argsort(-p)
        inside = order[np.cumsum(p[order]) - p[order] < top.top_p]
        p = np.where(np.isin(np.arange(VOCABULARY), inside), p, 0.0) / p[inside].sum()
        seen = np.bincount(
            [answer.tokens[1] for answer in answers if answer.tokens[0] == first], minlength=VOCABULARY
        )
        often = p * seen.sum() > 8
        if often.sum() < 2:
            continue
        expected = p[often] * seen.sum()
        counted = seen[often]
        expected = np.append(expected, seen.sum() - expected.sum())
        counted = np.append(counted, seen.sum() - counted.sum())
        if expected[-1] < 8:
            expected = expected[:-1]
            counted = counted[:-1]
        chi = chi + float(((counted - expected) ** 2 / expected).sum())
        freedom = freedom + len(expected) - 1
    assert freedom > 4
    return (chi - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("method", ["", "ngram", "ngram_gpu"])
def test_drafted_tokens_have_the_distribution_and_the_log_probs_of_the_model(
    method: str, model: Path
) -> None:
    drafts: dict[str, Any] = dict(
        method=method, num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1
    )
    vllm = EngineConfig(
        gpus=1, gpu_memory_utilization=0.3, options={"speculative_config": drafts} if method else {}
    )
    policy = load_policy(str(model), "bfloat16").eval().cuda()
    prompts = [[7 + (i * j) % 11 for j in range(40)] for i in range(1, 9)]
    with closing(VllmEngine(str(model), seed=0, max_model_len=256, dtype="bfloat16", config=vllm)) as sampler:
        for temperature, top in [(1.0, WHOLE), (0.7, NUCLEUS)]:
            how = Sampling(64, temperature, 64, [0], seed_whole=True, top_p=top.top_p)
            said = [
                (p, a)
                for p, group in zip(prompts, sampler.generate(prompts, range(0, 800, 100), how), strict=True)
                for a in group
            ]
            theirs = torch.tensor([value for _, answer in said for value in answer.logprobs])
            documents = [compact(prompt, answer.tokens) for prompt, answer in said]
            gaps = {}
            for trained in (temperature, temperature * 1.2):
                ours, mask = logprobs(policy, documents, trained, top)
                gaps[trained] = float((ours[mask] - theirs).abs().mean())
            right, wrong = gaps.values()
            (group,) = sampler.generate(
                [REPEATED], [3], how._replace(n=ANSWERS, max_new_tokens=4, stop_token_ids=[])
            )
            sigma = surprise(policy, group, temperature, top)
            print(
                f"{method or 'no drafts'}, {temperature}, {top.top_p}: gap {right:.4f}, temperature off"
                f" {wrong:.3f}, {sigma:+.2f} sigma"
            )
            if method:
                tokens, steps = sampler.sampled()
                print(f"{tokens / steps:.3f} tokens a step")
                assert tokens / steps > 1.02
            assert right < 0.03 < wrong and sigma < 3
