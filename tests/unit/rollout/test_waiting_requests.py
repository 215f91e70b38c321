"""Requests with images that wait outside the engine, so that few of their tensors are held at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.data.pictures.picture_source import EncodedPicture, PictureSource
from rlhf_core.rollout.engine_contract import Pictures, Request, Sampling, answer_of
from rlhf_core.rollout.vllm import vllm_engine
from rlhf_core.rollout.vllm.pictured_prompts import WaitingRequests
from rlhf_core.rollout.vllm.vllm_engine import VllmEngine

HOW = Sampling(1, 1.0, 4, (0,))
IMAGE = (EncodedPicture(0, 1, PictureSource("", None, b"image")),)


def request(key: int, pictures: Pictures = IMAGE) -> Request:
    return Request(key, [key + 1], key, HOW, pictures)


class Counted:
    """A vLLM engine of which each step ends the oldest request, and what builds its prompts. `held`: prompts
    that are built and not ended; `most`: the most at once."""

    def __init__(self, at_once: int):
        scheduler = SimpleNamespace(max_num_seqs=at_once)
        self.vllm_config = SimpleNamespace(scheduler_config=scheduler)
        self.open: list[str] = []
        self.began: list[str] = []
        self.held = 0
        self.most = 0

    def built(
        self, prompts: Sequence[Sequence[int]], pictures: Sequence[Pictures]
    ) -> Iterator[dict[str, Any]]:
        for tokens in prompts:
            if tokens == [100]:
                raise ValueError("an image is gone")
            self.held += 1
            self.most = max(self.most, self.held)
            yield {"prompt_token_ids": tokens}

    def add_request(self, key: str, prompt: Any, params: Any, lora_request: Any) -> str:
        self.open.append(key)
        self.began.append(key)
        return key

    def abort_request(self, keys: Sequence[str]) -> None:
        self.open = [key for key in self.open if key not in keys]
        self.held -= len(keys)

    def has_unfinished_requests(self) -> bool:
        return bool(self.open)

    def step(self) -> list[Any]:
        self.held -= 1
        return [SimpleNamespace(request_id=self.open.pop(0), finished=True)]


@pytest.fixture
def counted() -> Counted:
    return Counted(4)


@pytest.fixture
def engine(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> VllmEngine:
    monkeypatch.setattr(vllm_engine, "answer_in", lambda output: answer_of([1, 0], [-1.0, -1.0], True))
    made = VllmEngine.__new__(VllmEngine)
    made.llm = SimpleNamespace(llm_engine=counted)
    made._library = SimpleNamespace(
        SamplingParams=dict,
        sampling_params=SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY=0)),
    )
    made._pictured = counted  # type: ignore[assignment]
    made._waiting = WaitingRequests()
    made._begun, made._finished = {}, []
    made._adapter, made._loads, made.version = None, 0, 0
    return made


def test_no_more_images_are_held_than_are_read_at_once(engine: VllmEngine, counted: Counted) -> None:
    found = dict(engine.advance([request(key) for key in range(60)], 0.0))
    assert counted.most == 4 and len(counted.began) == 4
    found |= dict(engine.advance([request(key) for key in range(60, 64)], 60.0))
    assert sorted(found) == list(range(64)) and counted.most == 4
    assert counted.began == [f"asked-{key}" for key in range(64)]
    assert engine.advance([], 60.0) == []


def test_calls_without_requests_leave_nothing_behind(engine: VllmEngine, counted: Counted) -> None:
    engine.advance([request(key) for key in range(8)], 0.0)
    for _ in range(100):
        assert engine.advance([], 0.0) == []
    assert len(engine._waiting._batches) == 1
    assert sorted(dict(engine.advance([], 60.0))) == list(range(8))


def test_requests_that_wait_can_be_given_up(engine: VllmEngine, counted: Counted) -> None:
    engine.advance([request(key) for key in range(8)], 0.0)
    found = dict(engine.advance([], 60.0, gone=[1, 5, 6]))
    assert sorted(found) == [0, 2, 3, 4, 7]
    assert "asked-5" not in counted.began
    engine.advance([request(key) for key in range(8)], 0.0)
    assert engine.advance([], 60.0, gone=list(range(8))) == []
    assert not counted.open


def test_new_weights_count_for_requests_that_waited(engine: VllmEngine) -> None:
    engine.advance([request(key) for key in range(5)], 0.0)
    engine.version = 3
    found = dict(engine.advance([], 60.0))
    assert found[0].versions == [(0, 0)] and found[4].versions == [(0, 3)]


def test_an_image_that_is_gone_is_told_and_the_rest_goes_on(engine: VllmEngine) -> None:
    with pytest.raises(ValueError, match="an image is gone"):
        engine.advance([request(0), request(99), request(2)], 60.0)
    assert sorted(dict(engine.advance([request(3)], 60.0))) == [0, 3]


def test_requests_of_an_engine_without_images_do_not_wait(engine: VllmEngine, counted: Counted) -> None:
    engine._pictured = None
    engine.advance([request(key, ()) for key in range(9)], 0.0)
    assert len(counted.open) == 9
