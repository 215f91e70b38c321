"""Draws by our kernel: the inverse of the distribution function, its frequencies, and answers of an engine."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from vllm.compilation.monitor import set_cudagraph_capturing_enabled

from rlhf_core.config import Vllm
from rlhf_core.rollout.engine import Sampler, Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_draws_invert_the_distribution(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhf_core.models.kernels.draw import draw

    torch.manual_seed(0)
    logits = (3 * torch.randn(512, 151936 + 64, device="cuda")).to(dtype)[:, :151936]
    temperatures = 0.3 + torch.rand(512, device="cuda")
    uniforms = torch.rand(512, dtype=torch.float64, device="cuda")
    monkeypatch.setattr(torch, "rand", lambda *sizes, **named: uniforms)
    tokens, logprobs = draw(logits, temperatures)
    expected = (logits.double() / temperatures[:, None].double()).log_softmax(-1)
    found = expected.gather(1, tokens.long()[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), found, rtol=1e-5, atol=1e-5)
    above = expected.exp().cumsum(1).gather(1, tokens.long()[:, None])[:, 0]
    assert (above > uniforms - 1e-5).all() and (above - found.exp() < uniforms + 1e-5).all()


def test_frequencies_are_those_of_the_distribution() -> None:
    from rlhf_core.models.kernels.draw import draw

    torch.manual_seed(0)
    one = 2 * torch.randn(9000, device="cuda")
    expected = one.softmax(-1).double()
    likely = expected.topk(500).indices
    counts = torch.zeros(9000, dtype=torch.float64, device="cuda")
    for _ in range(40):
        tokens, _ = draw(one.expand(20000, -1).contiguous(), torch.ones(20000, device="cuda"))
        counts += torch.bincount(tokens, minlength=9000)
    wanted = 800_000 * expected[likely]
    chi = float(((counts[likely] - wanted) ** 2 / wanted / (1 - expected[likely])).sum())
    print(f"chi-square of 500 tokens: {chi:.0f}")
    assert 500 - 5 * 31.6 < chi < 500 + 5 * 31.6, "five standard deviations of a chi-square of 500 degrees"
    others = 800_000 - float(counts[likely].sum())
    rest = 800_000 * (1 - float(expected[likely].sum()))
    assert abs(others - rest) < 5 * rest**0.5


@pytest.mark.parametrize("second_runner", ["0", "1"])
def test_answers_of_an_engine(second_runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log-prob of each token is the engine's own for it as part of a prompt, and the same seed draws the same answers."""
    from rlhf_core.models.kernels import draw

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", second_runner)
    set_cudagraph_capturing_enabled(True)  # an engine before it in this process has ended that
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    made = Qwen2ForCausalLM(Qwen2Config(vocab_size=9000, max_position_embeddings=512, eos_token_id=0, **sizes))
    made.lm_head.weight.data *= 20
    made.save_pretrained(tmp_path)
    drawn, kernel = [], draw.draw

    def counted(logits: torch.Tensor, temperatures: torch.Tensor) -> Any:
        drawn.append(len(logits))
        return kernel(logits, temperatures)

    monkeypatch.setattr(draw, "draw", counted)
    numbers = random.Random(0)
    prompts = [[numbers.randrange(5, 9000) for _ in range(20)] for _ in range(32)]
    with closing(Sampler(str(tmp_path), seed=0, max_model_len=128, dtype="float32", vllm=Vllm(gpus=1, gpu_memory_utilization=0.3))) as one:
        how = Sampling(1, 1.0, 64, [0], True, True)
        first, again, other = ([group[0] for group in one.generate(prompts, seeds, how)] for seeds in (range(32), range(32), range(32, 64)))
        sampled = sum(len(answer.tokens) for answer in [*first, *again, *other])
        assert sampled <= sum(drawn) <= sampled + 96, "vLLM may draw once more for an answer before it knows that it has ended"
        assert [list(a.tokens) for a in first] == [list(a.tokens) for a in again] != [list(a.tokens) for a in other]
        whole = one.prompt_logprobs([[*prompt, *answer.tokens] for prompt, answer in zip(prompts, first, strict=True)])
        for prompt, answer, logprobs in zip(prompts, first, whole, strict=True):
            torch.testing.assert_close(torch.tensor(answer.logprobs), torch.tensor(logprobs[len(prompt) :]), rtol=1e-3, atol=1e-3)
        before = len(drawn)
        one.generate(prompts[:3], range(3), how._replace(top_p=0.9))
        assert len(drawn) == before, "top-p is vLLM's own"
