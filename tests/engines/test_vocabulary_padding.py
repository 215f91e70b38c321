"""A model with more rows of embeddings than its tokenizer has tokens: the others are never sampled, and have
no probability."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_core.config import EngineConfig
from rlhf_core.data.documents import Document
from rlhf_core.models.load_model import load_policy
from rlhf_core.objectives.collate import collate
from rlhf_core.rollout.engine_contract import Sampling
from rlhf_core.rollout.vllm.vllm_engine import VllmEngine

pytestmark = pytest.mark.slow
PADDING = 57


@pytest.fixture
def padded(material: Path, tmp_path: Path) -> Path:
    """The base model with rows for 57 tokens that there are not; their embeddings are those of likely tokens,
    twice as long."""
    folder = tmp_path / "padded"
    shutil.copytree(material / "base", folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    known = len(AutoTokenizer.from_pretrained(folder))
    model.resize_token_embeddings(known + PADDING, mean_resizing=False)
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[known:] = 2 * weight[known - PADDING : known]
    model.save_pretrained(folder)
    return folder


def test_rows_without_a_token_are_not_sampled_and_log_probs_leave_them_out(
    padded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = len(AutoTokenizer.from_pretrained(padded))
    prompts = [[5, 6, 7, 8 + i] for i in range(8)]
    sampler = VllmEngine(str(padded), seed=0, max_model_len=64, config=EngineConfig(kv_cache_gib=0.5))
    try:
        assert (
            f"{PADDING} of {known + PADDING} rows of the vocabulary are no token of its tokenizer"
            in capsys.readouterr().out
        )
        groups = sampler.generate(prompts, range(8), Sampling(4, 1.0, 24, []))
    finally:
        sampler.close()
    answers = [(prompt, answer) for prompt, group in zip(prompts, groups, strict=True) for answer in group]
    assert max(max(answer.tokens) for _, answer in answers) < known
    policy = load_policy(str(padded)).eval()
    documents = [
        Document([*prompt, *answer.tokens], [False] * 4 + [True] * len(answer.tokens))
        for prompt, answer in answers
    ]
    batch = collate([[document] for document in documents], pad_token_id=0)

    def largest_gap() -> float:
        with torch.no_grad():
            ours = policy(batch.tokens, batch.positions, batch.documents).logprobs
        gaps = [
            (row[4 : 4 + len(a.tokens)] - torch.tensor(a.logprobs)).abs().max()
            for row, (_, a) in zip(ours, answers, strict=True)
        ]
        return float(max(gaps))

    assert largest_gap() > 0.05
    policy.leave_out_padding(str(padded))
    assert largest_gap() < 1e-3
