"""Which batches are drawn by our kernel, and what becomes of the others; tests/gpu/test_sampling.py compares the draws."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_core.rollout.patches import sampling
from rlhf_core.rollout.patches.engine import applies
from rlhf_core.rollout.patches.sampling import draws_all, leave_out_padding, read_logits_once, samples_all, whole_distributions


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


def second_runners(**changed: Any) -> Any:
    """A sampler of vLLM's second model runner with four requests, of which the batch below has two."""
    states: dict[str, Any] = {
        "top_k": [9] * 4, "top_p": [1.0] * 4, "min_p": [0.0] * 4, "temperature": [1.0] * 4, "num_logprobs": [0] * 4,
        "seeds_set": [False] * 4,
        "use_penalty": [False] * 4, "use_logit_bias": [False] * 4, "num_bad_words": [0] * 4, "num_token_ids": [0] * 4,
        "compute_nans": False, "logprobs_mode": "processed_logprobs",
    }  # fmt: skip
    states |= changed
    at = {name: SimpleNamespace(np=np.array(value)) for name, value in states.items()}
    sampling = SimpleNamespace(
        vocab_size=9, top_k=at["top_k"], top_p=at["top_p"], min_p=at["min_p"],
        any_greedy=lambda rows: bool((at["temperature"].np[rows] == 0).any()),
        any_explicit_seed=lambda rows: bool(at["seeds_set"].np[rows].any()),
        max_num_logprobs=lambda rows: int(at["num_logprobs"].np[rows].max()),
    )  # fmt: skip
    return SimpleNamespace(
        compute_nans=states["compute_nans"], logprobs_mode=states["logprobs_mode"], sampling_states=sampling,
        penalties_state=SimpleNamespace(use_penalty=at["use_penalty"].np),
        logit_bias_state=SimpleNamespace(use_logit_bias=at["use_logit_bias"].np),
        bad_words_state=SimpleNamespace(num_bad_words=at["num_bad_words"]),
        logprob_token_ids_state=SimpleNamespace(max_num_token_ids=lambda rows: int(at["num_token_ids"].np[rows].max())),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("top_k", 5), ("top_p", 0.9), ("min_p", 0.1), ("temperature", 0.0), ("num_logprobs", 3), ("seeds_set", True)),
        *(("use_penalty", True), ("use_logit_bias", True), ("num_bad_words", 1), ("num_token_ids", 2)),
    ],
)
def test_batches_of_the_second_runner_that_want_more_are_vllms(name: str, value: Any) -> None:
    rows = np.array([2, 0])
    assert draws_all(second_runners(), 2, rows) and draws_all(second_runners(num_logprobs=[-1] * 4), 2, rows)
    before = np.array([{"top_k": 9, "top_p": 1.0, "temperature": 1.0}.get(name, 0)] * 4, dtype=type(value))
    for changed, drawn in ((0, False), (2, False), (3, True)):
        states = before.copy()
        states[changed] = value
        assert draws_all(second_runners(**{name: states}), 2, rows) is drawn


def test_drafts_and_raw_log_probs_of_the_second_runner_are_vllms() -> None:
    rows = np.array([2, 0])
    assert not draws_all(second_runners(), 5, rows), "one row of logits for each draft"
    assert not draws_all(second_runners(logprobs_mode="raw_logprobs"), 2, rows)
    assert not draws_all(second_runners(compute_nans=True), 2, rows)


def test_the_states_of_the_second_runner_have_these_names() -> None:
    """Those of the installed vLLM, as far as they can be made without a GPU."""
    from vllm.v1.worker.gpu.sample import bad_words, logit_bias, logprob, penalties, sampler, states

    for owner, name in (
        (states.SamplingStates, "any_greedy"), (states.SamplingStates, "any_explicit_seed"), (states.SamplingStates, "max_num_logprobs"),
        (logprob.LogprobTokenIdsState, "max_num_token_ids"),
    ):  # fmt: skip
        assert callable(getattr(owner, name))
    made = {
        penalties.PenaltiesState: ["use_penalty"], logit_bias.LogitBiasState: ["use_logit_bias"],
        bad_words.BadWordsState: ["num_bad_words"],
        states.SamplingStates: ["min_p", "top_p", "top_k", "vocab_size"],
    }  # fmt: skip
    if applies(sampling.SECOND_RUNNER_OF):
        own = ("sampling_states", "penalties_state", "logit_bias_state", "bad_words_state", "logprob_token_ids_state")
        made[sampler.Sampler] = [*own, "compute_nans", "logprobs_mode"]
    for kind, names in made.items():
        source = inspect.getsource(kind.__init__)
        assert [name for name in names if not re.search(rf"self\.{name}\b[^\n]* = ", source)] == [], kind
    assert sampler.Sampler.__module__ == sampling.OF_SECOND_RUNNER


def test_the_second_runner_of_another_release_is_left_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    kind = type("Second", (), {"__module__": sampling.OF_SECOND_RUNNER})
    for release, left in (("0.32.", True), ("0.24.", False)):
        monkeypatch.setattr(sampling, "applies", lambda releases=("0.24.", "0.32."), release=release: release in releases)
        sampler = kind()
        read_logits_once(SimpleNamespace(sampler=sampler))
        assert (type(sampler) is kind) is left


def test_a_workers_process_chooses_the_runner_that_the_scheduler_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is spawned with the worker's module alone, which patches before vLLM's worker chooses."""
    from rlhf_core.rollout.patches import worker

    said: list[str] = []
    monkeypatch.setattr(worker, "run_qwen2_by_the_second_runner", lambda: said.append("patched"))
    monkeypatch.setattr(worker.BASE, "__init__", lambda self, *arguments: said.append("chosen"))
    worker.Worker("config")
    assert said == ["patched", "chosen"]


@pytest.mark.parametrize("release", ["0.24.0", "0.32.0"])
def test_the_second_runner_of_one_release_asks_nothing_at_its_start(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhf_core.rollout.patches import worker

    asked: list[object] = []
    monkeypatch.setattr(worker, "applies", lambda releases: release.startswith(releases))
    monkeypatch.setattr(worker.gpu_worker, "warmup_kernels", asked.append)
    with pytest.raises(ZeroDivisionError), worker.without_requests_of_its_own():
        worker.gpu_worker.warmup_kernels("start")
        1 / 0  # noqa: B018
    worker.gpu_worker.warmup_kernels("after")
    assert asked == (["after"] if release.startswith("0.24.") else ["start", "after"])


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


def test_a_plain_batch_does_not_reach_the_second_runners_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from vllm.v1.worker.gpu import input_batch

    from rlhf_core.models.kernels import draw

    class Second(SimpleNamespace):
        def __call__(self, logits: Any, batch: Any) -> str:
            return "vLLM's"

    Second.__module__ = sampling.OF_SECOND_RUNNER
    monkeypatch.setattr(sampling, "applies", lambda releases=(): True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(draw, "draw", lambda logits, temperatures: (logits.argmax(-1).int(), logits.max(-1).values / temperatures))
    monkeypatch.setattr(input_batch, "get_num_sampled_and_rejected", lambda sampled, *places: (sampled, torch.zeros_like(sampled)))
    sampler = Second(**vars(second_runners()), req_states=SimpleNamespace(prefill_len=SimpleNamespace(gpu=None)))
    sampler.sampling_states.temperature = SimpleNamespace(gpu=torch.tensor([2.0, 9.0, 1.0, 9.0]))
    read_logits_once(SimpleNamespace(sampler=sampler))
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]])
    places = {"seq_lens": torch.tensor([7, 8], dtype=torch.int32), "cu_num_logits": None, "idx_mapping": torch.tensor([2, 0])}
    batch = SimpleNamespace(idx_mapping_np=np.array([2, 0]), **places)
    found = sampler(logits, batch)
    assert found.sampled_token_ids.tolist() == [[1], [0]] and found.sampled_token_ids.dtype == torch.int64
    assert found.logprobs_tensors.logprobs.tolist() == [[2.0], [1.5]]
    assert found.num_sampled.tolist() == [1, 1] and found.num_rejected.tolist() == [0, 0]
    assert sampler(torch.zeros(5, 3), batch) == "vLLM's"


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
