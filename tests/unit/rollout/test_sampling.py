"""Which batches are drawn by our kernel, and what becomes of the others; tests/gpu/test_sampling.py compares the draws."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_core.rollout.patches import sampling
from rlhf_core.rollout.patches.sampling import read_logits_once, samples_all, whole_distributions


def asked(**changed: Any) -> Any:
    from vllm.v1.sample.logits_processor import LogitsProcessors  # not at the top: vLLM reads its environment when it is first imported
    from vllm.v1.sample.metadata import SamplingMetadata

    nothing = torch.zeros(2)
    plain: dict[str, Any] = dict(
        temperature=torch.ones(2), all_greedy=False, all_random=True, top_p=None, top_k=None, generators={}, max_num_logprobs=0,
        no_penalties=True, prompt_token_ids=None, frequency_penalties=nothing, presence_penalties=nothing, repetition_penalties=nothing,
        output_token_ids=[[], []], allowed_token_ids_mask=None, bad_words_token_ids={}, logitsprocs=LogitsProcessors(),
    )  # fmt: skip
    return SamplingMetadata(**plain | changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"all_random": False},
        {"generators": {0: torch.Generator()}},
        {"top_p": torch.full((2,), 0.9)},
        {"top_k": torch.full((2,), 5)},
        {"max_num_logprobs": 3},
        {"no_penalties": False},
        {"bad_words_token_ids": {0: [[5]]}},
        {"allowed_token_ids_mask": torch.ones(2, 9, dtype=torch.bool)},
        {"logprob_token_ids": {0: [5]}},
        {"thinking_budget_state_holder": SimpleNamespace(has_tracked_requests=lambda: True)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_batches_that_want_more_are_vllms(changed: dict[str, Any]) -> None:
    assert samples_all(asked()) and samples_all(asked(max_num_logprobs=None))
    assert samples_all(asked(thinking_budget_state_holder=SimpleNamespace(has_tracked_requests=lambda: False)))
    assert not samples_all(asked(**changed))


class Recorder:
    """A sampler that keeps what it was given."""

    topk_topp_sampler = None

    def __init__(self) -> None:
        self.given: list[Any] = []

    def forward(self, logits: Any, sampling_metadata: Any, **named: Any) -> None:
        self.given.append((logits, sampling_metadata, named))


def test_largest_batches_ask_for_whole_distributions() -> None:
    sampler, cut = Recorder(), asked(top_p=torch.full((2,), 0.9), top_k=torch.full((2,), 5))
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


@pytest.mark.parametrize("case", ["a user's processor", "another sampler", "no GPU", "another release"])
def test_samplers_that_are_left_unchanged(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "applies", lambda: case != "another release")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: case != "no GPU")
    sampler: Any = SimpleNamespace(forward=print) if case == "another sampler" else Recorder()
    before = sampler.forward
    own = type("Own", (), {"__module__": "vllm.v1.sample.logits_processor.builtin"})()
    processors = [own, SimpleNamespace()] if case == "a user's processor" else [own]
    read_logits_once(SimpleNamespace(sampler=sampler, input_batch=SimpleNamespace(logitsprocs=SimpleNamespace(all=processors))))
    assert sampler.forward == before


def test_a_plain_batch_does_not_reach_vllms_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from rlhf_core.models.kernels import draw

    monkeypatch.setattr(sampling, "applies", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(draw, "draw", lambda logits, temperatures: (logits.argmax(-1).int(), logits.max(-1).values / temperatures))
    sampler: Any = Recorder()
    read_logits_once(SimpleNamespace(sampler=sampler, input_batch=SimpleNamespace(logitsprocs=SimpleNamespace(all=[]))))
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]])
    found = sampler.forward(logits=logits, sampling_metadata=asked(temperature=torch.tensor([1.0, 2.0])))
    assert found.sampled_token_ids.tolist() == [[1], [0]] and found.sampled_token_ids.dtype == torch.int32
    assert found.logprobs_tensors.logprob_token_ids.tolist() == [[1], [0]]
    assert found.logprobs_tensors.logprobs.tolist() == [[2.0], [1.5]]
    assert sampler.forward(logits, asked(max_num_logprobs=None)).logprobs_tensors is None
    assert not sampler.given
    sampler.forward(logits, asked(), predict_bonus_token=True)
    sampler.forward(logits, asked(max_num_logprobs=2))
    assert len(sampler.given) == 2
