"""What vLLM samples from: rows that are no token, and the distributions of its warm-up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhf_core.rollout.vllm.patches.vocabulary_rows import leave_out_padding
from rlhf_core.rollout.vllm.patches.warm_up import whole_distributions


def asked(**changed: Any) -> Any:
    # not at the top: vLLM reads its environment when it is first imported
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    nothing = torch.zeros(2)
    plain: dict[str, Any] = dict(
        temperature=torch.ones(2), all_greedy=False, all_random=True, top_p=None, top_k=None, generators={}, max_num_logprobs=0,
        no_penalties=True, prompt_token_ids=None, frequency_penalties=nothing, presence_penalties=nothing, repetition_penalties=nothing,
        output_token_ids=[[], []], allowed_token_ids_mask=None, bad_words_token_ids={}, logitsprocs=LogitsProcessors(),
    )  # fmt: skip
    return SamplingMetadata(**plain | changed)


def test_a_workers_process_chooses_the_runner_that_the_scheduler_chose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is spawned with the worker's module alone, which patches before vLLM's worker chooses."""
    from rlhf_core.rollout.vllm import gpu_worker

    said: list[str] = []
    monkeypatch.setattr(gpu_worker, "is_release", lambda release: True)
    monkeypatch.setattr(gpu_worker.qwen2_runner, "apply", lambda: said.append("patched"))
    monkeypatch.setattr(gpu_worker.BASE, "__init__", lambda self, *arguments: said.append("chosen"))
    gpu_worker.GpuWorker("config")
    assert said == ["patched", "chosen"]


@pytest.mark.parametrize("release", ["0.24.0", "0.32.0"])
def test_the_second_runner_of_one_release_asks_nothing_at_its_start(
    release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlhf_core.rollout.vllm.patches import warm_up

    asked: list[object] = []
    monkeypatch.setattr(warm_up, "is_release", release.startswith)
    monkeypatch.setattr(warm_up.gpu_worker, "warmup_kernels", asked.append)
    with pytest.raises(ZeroDivisionError), warm_up.without_requests_of_its_own():
        warm_up.gpu_worker.warmup_kernels("start")
        1 / 0  # noqa: B018
    warm_up.gpu_worker.warmup_kernels("after")
    assert asked == (["after"] if release.startswith("0.24.") else ["start", "after"])


class Recorder:
    """A sampler that keeps what it was given."""

    topk_topp_sampler = None

    def __init__(self) -> None:
        self.given: list[Any] = []

    def forward(self, logits: Any, sampling_metadata: Any, **named: Any) -> None:
        self.given.append((logits, sampling_metadata, named))


def test_largest_batches_ask_for_whole_distributions() -> None:
    sampler = Recorder()
    cut = asked(top_p=torch.full((2,), 0.9), top_k=torch.full((2,), 5))
    with pytest.raises(ZeroDivisionError), whole_distributions(sampler):
        sampler.forward(logits="logits", sampling_metadata=cut, predict_bonus_token=True)
        1 / 0  # noqa: B018
    ((logits, given, named),) = sampler.given
    assert (logits, given.top_p, given.top_k, named) == ("logits", None, None, {"predict_bonus_token": True})
    assert given.temperature is cut.temperature
    sampler.forward("logits", cut)
    assert sampler.given[-1][1] is cut
    with whole_distributions(None):
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_that_are_no_token_have_no_probability(dtype: torch.dtype) -> None:
    model = torch.nn.Module()
    logits = torch.randn(3, 10).to(dtype)
    model.compute_logits = lambda states: None if states is None else logits.clone()  # type: ignore[assignment]
    leave_out_padding(model, 7)
    found = model.compute_logits(0)  # type: ignore[operator]
    assert torch.equal(found[:, :7], logits[:, :7]) and found.isfinite().all()
    assert not (found.float() / 0.01).softmax(-1)[:, 7:].any()
    assert model.compute_logits(None) is None  # type: ignore[operator]
