"""Answers read out of what vLLM's steps left; the engines' own tests compare log-probs with the trainer's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_core.rollout.patches import engine as vllm_patches
from rlhf_core.rollout.patches import models as model_patches
from rlhf_core.rollout.patches.engine import Rows, gather_sampled_alone, sampled_logprobs, wait_for_whole_answers
from rlhf_core.rollout.patches.models import forget_packed_experts
from rlhf_core.rollout.weight_receiver import WeightReceiver


@pytest.fixture(autouse=True)
def _release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_patches, "applies", lambda: True)


def step(tokens: list[int], logprobs: list[float]) -> SimpleNamespace:
    """The arrays of a step, (tokens of all requests, 1)."""
    return SimpleNamespace(logprob_token_ids=np.array(tokens)[:, None], logprobs=np.array(logprobs)[:, None])


def flat_logprobs() -> Any:
    from vllm.logprobs import FlatLogprobs  # not at the top: vLLM reads its environment when it is first imported

    return FlatLogprobs()


FIRST, SECOND = step([3, 5], [-0.25, -0.5]), step([4, 7, 9], [-4.0, -1.0, -2.0])


def test_steps_of_one_and_of_several_tokens_follow_each_other() -> None:
    kept = SimpleNamespace(rows=[Rows(FIRST, 1, 2), Rows(SECOND, 1, 3)])
    assert sampled_logprobs(kept, [5, 7, 9]) == [-0.5, -1.0, -2.0]
    assert sampled_logprobs(flat_logprobs(), []) == []


def test_log_probs_of_an_engine_without_patches_are_read() -> None:
    """vLLM puts the sampled token first, the likeliest ones after it."""
    plain = flat_logprobs()
    plain.append_fast([5, 3], [-0.5, -0.25], iter([2, 1]), [None, None])
    plain.append_fast([7], [-1.0], iter([1]), [None])
    assert sampled_logprobs(plain, [5, 7]) == [-0.5, -1.0]
    with pytest.raises(RuntimeError, match="log-probs of other tokens"):
        sampled_logprobs(plain, [3, 7])


@pytest.mark.parametrize("tokens", [[5, 8], [5], []])
def test_log_probs_of_other_tokens_are_refused(tokens: list[int]) -> None:
    with pytest.raises(RuntimeError, match="log-probs of other tokens"):
        sampled_logprobs(SimpleNamespace(rows=[Rows(FIRST, 1, 2), Rows(SECOND, 1, 2)]), tokens)
    with pytest.raises(RuntimeError, match="log-probs of other tokens"):
        sampled_logprobs(flat_logprobs(), [5])


def output(request: str, tokens: list[int], logprobs: Any = None, reason: str | None = None, experts: Any = None) -> SimpleNamespace:
    named = {"request_id": request, "new_token_ids": tokens, "new_logprobs": logprobs, "routed_experts": experts}
    return SimpleNamespace(**named, finish_reason=reason, stop_reason=reason and 1)


def test_an_answer_is_handed_on_once_when_it_is_whole() -> None:
    seen: list[Any] = []
    stopped = {"c": SimpleNamespace(detokenizer=SimpleNamespace(stop=["x"])), "a": SimpleNamespace(detokenizer=SimpleNamespace())}
    hand_on = lambda outputs, at, stats=None: seen.append((list(outputs), at, stats))  # noqa: E731
    processor = SimpleNamespace(process_outputs=hand_on, request_states=stopped)
    wait_for_whole_answers(SimpleNamespace(output_processor=processor))
    one, two = Rows(FIRST, 0, 1), Rows(SECOND, 0, 1)
    processor.process_outputs([output("a", [3], [one]), output("b", [5])], 0.1, stats="s")
    processor.process_outputs([output("a", [4], [two], "stop"), output("b", [7, 9])], 0.2)
    processor.process_outputs([output("b", [], reason="length"), output("c", [1], reason="stop")], 0.3)
    assert [(len(outputs), at, stats) for outputs, at, stats in seen] == [(0, 0.1, "s"), (1, 0.2, None), (2, 0.3, None)]
    (a,), (b, c) = seen[1][0], seen[2][0]
    assert (a.request_id, a.new_token_ids, a.new_logprobs, a.finish_reason, a.stop_reason) == ("a", [3, 4], [one, two], "stop", 1)
    assert (b.request_id, b.new_token_ids, b.new_logprobs, b.finish_reason) == ("b", [5, 7, 9], None, "length")
    assert (c.request_id, c.new_token_ids) == ("c", [1])
    processor.process_outputs([output("c", [1], [one])], 0.4)
    assert seen[-1][0][0].new_logprobs == [one], "vLLM looks for stop texts in every token"


def test_experts_of_a_prompt_and_of_each_step_are_handed_on_in_order() -> None:
    seen: list[Any] = []
    processor = SimpleNamespace(process_outputs=lambda outputs: seen.extend(outputs), request_states={})
    wait_for_whole_answers(SimpleNamespace(output_processor=processor))
    steps = [np.full((rows, 2, 2), number, np.uint8) for number, rows in enumerate((3, 1, 1))]
    for number, experts in enumerate(steps):
        processor.process_outputs([output("a", [number], reason="stop" if number == 2 else None, experts=experts)])
    (a,) = seen
    assert a.routed_experts.shape == (5, 2, 2) and a.routed_experts[:, 0, 0].tolist() == [0, 0, 0, 1, 2]


def test_other_releases_of_vllm_are_not_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_patches, "applies", lambda: False)
    processor = SimpleNamespace(process_outputs=list)
    process = processor.process_outputs
    wait_for_whole_answers(SimpleNamespace(output_processor=processor))
    assert processor.process_outputs is process, "every token as it is sampled"
    sampler = SimpleNamespace(gather_logprobs=sum)
    gather_sampled_alone(sampler)
    assert sampler.gather_logprobs is sum


def test_experts_that_vllm_packed_are_packed_anew_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)])
    model[0].quant_method, model[1].quant_method = SimpleNamespace(), SimpleNamespace(moe_kernel="packed")
    monkeypatch.setattr(model_patches, "applies", lambda: False)
    with pytest.raises(RuntimeError, match="may keep the old weights of experts"):
        forget_packed_experts(model)
    monkeypatch.setattr(model_patches, "applies", lambda: True)
    forget_packed_experts(model)
    assert model[1].quant_method.moe_kernel is None and not vars(model[0].quant_method)
    monkeypatch.setattr(model_patches, "applies", lambda: False)
    forget_packed_experts(model[:1])  # without experts every release will do


def test_a_sampler_with_ways_of_its_own_is_left_alone() -> None:
    """That of vLLM's second model runner has no such method."""
    sampler = SimpleNamespace()
    gather_sampled_alone(sampler)
    assert not vars(sampler)


def test_a_seed_is_that_of_both_of_vllms_model_runners() -> None:
    """Answers without seeds of their own draw from PyTorch in one and from numpy in the other."""
    receiver = WeightReceiver()

    def drawn(seed: int) -> tuple[float, int]:
        receiver.seed(seed)
        return float(torch.rand(())), int(np.random.randint(2**31))

    first, other, again = drawn(2**47 + 5), drawn(2**47 + 6), drawn(2**47 + 5)
    assert first == again and first[0] != other[0] and first[1] != other[1]


def test_one_release_runs_qwen2_as_it_does_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import vllm

    name, chosen = "DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES", frozenset({"LlamaForCausalLM"})
    monkeypatch.setattr(vllm, name, chosen, raising=False)
    model_patches.run_qwen2_by_the_second_runner()
    assert getattr(vllm, name) == chosen, "this release chooses for itself"
    monkeypatch.setattr(model_patches, "applies", lambda releases: releases == ("0.24.",))
    model_patches.run_qwen2_by_the_second_runner()
    assert getattr(vllm, name) == {"LlamaForCausalLM", "Qwen2ForCausalLM"}
