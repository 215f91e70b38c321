"""The engine of transformers: weights of families that vLLM cannot take, requests, and draws that follow the
distribution."""

from __future__ import annotations

import json
import shutil
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config import EngineConfig
from rlhf_core.data.documents import Document
from rlhf_core.models.checkpoint.checkpoint_weights import checkpoint_weights
from rlhf_core.models.load_model import load_policy
from rlhf_core.models.policy import Policy
from rlhf_core.objectives.collate import collate
from rlhf_core.rollout.engine_contract import Request, Sampling
from rlhf_core.rollout.engine_kinds import open_engine
from rlhf_core.rollout.transformers_engine import SeededDraws
from tests.support.families import make_family

pytestmark = pytest.mark.slow
DOCUMENTS = [[5, 9, 20, 33, 40, 51, 7], [8, 8, 9, 10, 77, 81]]
# gpt-oss: vLLM drops experts that are sent; qwen3_5: it has no class on CPUs; gpt-oss and mixtral fuse experts
FAMILIES = "llama gpt-oss mixtral qwen3_5 granite-hybrid nemotron-h gemma2 gemma4-wrapper".split()
TRANSFORMERS = EngineConfig(kind="transformers")


def opened(base: Path, **options: Any) -> Any:
    config = EngineConfig(kind="transformers", options=options)
    return closing(open_engine(str(base), config, seed=0, max_model_len=96))


def logprobs_of(policy: Policy, tokens: list[int]) -> torch.Tensor:
    batch = collate([[Document(tokens, [False] * len(tokens))]], pad_token_id=0)
    with torch.no_grad():
        return policy(batch.tokens, batch.positions, batch.documents).logprobs[0, : len(tokens)]


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_were_sent_sample_as_the_trainer_scores(
    family: str, material: Path, tmp_path: Path
) -> None:
    base = make_family(family, material / "base", tmp_path / "base")
    trained = load_policy(str(base)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    with opened(base) as engine:
        before = torch.tensor(engine.prompt_logprobs(DOCUMENTS)[0])
        assert float((before - logprobs_of(trained, DOCUMENTS[0])).abs().max()) > 1e-3
        engine.update(checkpoint_weights(trained.model, lambda parameters: nullcontext()))
        for found, tokens in zip(engine.prompt_logprobs(DOCUMENTS), DOCUMENTS, strict=True):
            torch.testing.assert_close(torch.tensor(found), logprobs_of(trained, tokens), atol=1e-5, rtol=0)
        answers = engine.generate(DOCUMENTS, [3, 5], Sampling(2, 1.0, 12, []))
        for prompt, group in zip(DOCUMENTS, answers, strict=True):
            for answer in group:
                expected = logprobs_of(trained, [*prompt, *answer.tokens])[len(prompt) :]
                torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-5, rtol=1e-5)


def test_weights_that_are_missing_are_told(material: Path) -> None:
    with opened(material / "base") as engine:
        trained = load_policy(str(material / "base"))
        sent = dict(checkpoint_weights(trained.model, lambda parameters: nullcontext()))
        sent.pop("model.norm.weight")
        with pytest.raises(ValueError, match=r"are not those of \w+: model\.norm\.weight"):
            engine.update(sent.items())


def test_the_size_of_a_batch_changes_no_answer(material: Path) -> None:
    prompts = [*DOCUMENTS, DOCUMENTS[0]]
    found = []
    for size in (1, 2, 64):
        with opened(material / "base", batch_size=size) as engine:
            found.append(engine.generate(prompts, [1, 2, 3], Sampling(3, 1.0, 8, [])))
    tokens = [[[list(answer.tokens) for answer in group] for group in groups] for groups in found]
    assert tokens[0] == tokens[1] == tokens[2]


def test_requests_one_by_one_are_answered_as_together_and_may_be_given_up(material: Path) -> None:
    how = Sampling(1, 1.0, 8, [])
    requests = [Request(key, DOCUMENTS[key % 2], 10 * key, how) for key in range(6)]
    with opened(material / "base") as engine:
        together = engine.generate([request.tokens for request in requests], [0, 10, 20, 30, 40, 50], how)
        found = dict(engine.advance(requests, 0.05, gone=[3]))
        assert {key % 2 for key in found} == {0}, "one batch, that of the oldest, then the caller is heard"
        assert all(answer.versions == [(0, 0)] for answer in found.values())
        found |= engine.advance([], 0.05, gone=[])
        assert engine.advance([], 0.05) == []
        assert {key: list(answer.tokens) for key, answer in found.items()} == {
            key: list(together[key][0].tokens) for key in (0, 1, 2, 4, 5)
        }


def test_the_end_tokens_of_the_checkpoint_end_answers(material: Path, tmp_path: Path) -> None:
    """As in vLLM, which adds those of generation_config.json."""
    base = tmp_path / "base"
    shutil.copytree(material / "base", base)
    how = Sampling(1, 0.0, 6, [])
    with opened(base) as engine:
        third = engine.generate(DOCUMENTS[:1], [0], how)[0][0].tokens[2]
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, third]}))
    with opened(base) as engine:
        trained = load_policy(str(base))
        engine.update(checkpoint_weights(trained.model, lambda parameters: nullcontext()))
        (answer,) = engine.generate(DOCUMENTS[:1], [0], how)[0]
    assert answer.finished and list(answer.tokens).index(third) == len(answer.tokens) - 1


def test_broken_weights_end_sampling(material: Path) -> None:
    with opened(material / "base") as engine:
        trained = load_policy(str(material / "base"))
        sent = dict(checkpoint_weights(trained.model, lambda parameters: nullcontext()))
        sent["model.norm.weight"] = torch.full_like(sent["model.norm.weight"], torch.nan)
        engine.update(sent.items())
        with pytest.raises(FloatingPointError, match="logits are not finite"):
            engine.generate(DOCUMENTS, [1, 2], Sampling(1, 1.0, 4, [], logprobs=False))


def test_draws_follow_the_distribution() -> None:
    """40,000 draws from each row of logits: frequencies within five standard errors of the probabilities, for
    the whole distribution and a truncated one."""
    count = 40_000
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf, 0.5])
    for sampling, allowed in (
        (Sampling(1, 1.0, 1, []), [True, True, True, True, False, True]),
        (Sampling(1, 0.5, 1, [], top_k=2), [True, True, False, False, False, False]),
        (Sampling(1, 1.0, 1, [], top_p=0.8), [True, True, False, False, False, True]),
    ):
        draws = SeededDraws(range(count), sampling, known=None)
        draws(torch.zeros(count, 1, dtype=torch.long), logits.repeat(count, 1))
        scaled = (logits / sampling.temperature).masked_fill(~torch.tensor(allowed), -torch.inf)
        expected = scaled.softmax(-1)
        frequency = torch.bincount(draws.tokens[0], minlength=6) / count
        error = (expected * (1 - expected) / count).sqrt()
        assert ((frequency - expected).abs() <= 5 * error).all(), frequency
        torch.testing.assert_close(draws.logprobs[0], expected.log()[draws.tokens[0]])


def test_rows_of_the_vocabulary_that_are_no_token_are_not_drawn() -> None:
    draws = SeededDraws(range(200), Sampling(1, 1.0, 1, []), known=3)
    draws(torch.zeros(200, 1, dtype=torch.long), torch.zeros(200, 9))
    assert int(draws.tokens[0].max()) == 2
    torch.testing.assert_close(draws.logprobs[0], torch.full((200,), -torch.tensor(3.0).log().item()))
