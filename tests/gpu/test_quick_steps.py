"""Steps that we schedule beside those of vLLM's scheduler that runs ahead of the GPU: the same answers."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlhf_core.config import Vllm
from rlhf_core.rollout.engine import Request, Sampler, Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


def test_answers_of_quick_steps_are_vllms(tmp_path: Path) -> None:
    """Greedy in float32: what a batch holds moves rounding errors alone. Some answers end early; a small cache preempts some."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    made = Qwen2ForCausalLM(Qwen2Config(vocab_size=512, max_position_embeddings=512, eos_token_id=0, **sizes))
    made.lm_head.weight.data *= 20
    made.save_pretrained(tmp_path)
    numbers = random.Random(0)
    prompts = [[numbers.randrange(5, 512) for _ in range(numbers.randrange(3, 90))] for _ in range(48)]
    vllm = Vllm(gpus=1, gpu_memory_utilization=0.3, engine={"num_gpu_blocks_override": 300})
    with closing(Sampler(str(tmp_path), seed=0, max_model_len=320, dtype="float32", vllm=vllm)) as sampler:
        engine: Any = sampler.llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        preempted = []
        own = scheduler._preempt_request
        scheduler._preempt_request = lambda *a, **named: (preempted.append(1), own(*a, **named))[1]
        how = Sampling(1, 0.0, 200, list(range(40)))
        found = {}
        for quick in (True, False):
            scheduler._plain, before = quick, scheduler.quick_steps
            answers = [group[0] for group in sampler.generate(prompts, range(48), how)]
            found[quick] = [(list(a.tokens), [round(v, 2) for v in a.logprobs], a.finished) for a in answers]
            assert (scheduler.quick_steps - before > 50) == quick
        assert preempted and len({finished for *_, finished in found[True]}) == 2
        same = sum(a == b for a, b in zip(found[True], found[False], strict=True))
        print(f"{same} of 48 answers are the same, {len(preempted)} preemptions")
        assert same >= 44, "rounding may turn the choice between two tokens that are as likely"
        scheduler._plain = True
        asked = [Request(i, prompt, i, how) for i, prompt in enumerate(prompts)]
        came = dict(sampler.advance(asked[:24], 0.05))
        came |= dict(sampler.advance(asked[24:], 0.05))
        while len(came) < 48:
            came |= dict(sampler.advance([], 0.05))
        assert sum(list(came[i].tokens) == found[True][i][0] for i in range(48)) >= 44
