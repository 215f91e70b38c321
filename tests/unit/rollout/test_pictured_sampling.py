"""The engine of transformers on prompts with images: answers have the log-probs of the trainer, and of
transformers' own model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from rlhf_core.config import EngineConfig
from rlhf_core.config.training.optimiser_fields import ImageEncoder
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import Document, compact
from rlhf_core.models.checkpoint.checkpoint_weights import checkpoint_weights
from rlhf_core.models.load_model import load_policy
from rlhf_core.models.multimodal.picture_tower import PictureTower
from rlhf_core.models.picture_reading import reads_pictures
from rlhf_core.models.policy import Policy, masked_logprobs
from rlhf_core.objectives.collate import collate
from rlhf_core.objectives.picture_reader import PictureReader
from rlhf_core.rollout.engine_contract import Pictures, Request, SampledAnswer, Sampling
from rlhf_core.rollout.engine_kinds import open_engine
from rlhf_core.rollout.transformers_engine import TransformersEngine
from tests.support.pictured_models import FAMILIES, make_pictured
from tests.support.pictured_pairs import whole_inputs
from tests.unit.data.pictures.test_picture_rendering import image, text

HOW = Sampling(3, 1.0, 12, [])
QUESTIONS = [
    [image("red"), text("What?")],
    [image("blue"), text("What?")],
    [text("One "), image("red", 40, 16), text(" two "), image("blue")],
]


class Asked:
    """A model, and prompts with images."""

    def __init__(self, folder: Path):
        self.folder = folder
        renderer = Renderer(load_tokenizer(str(folder)), "chat")
        found = [renderer.prompt_document([{"role": "user", "content": parts}]) for parts in QUESTIONS]
        self.prompts: list[list[int]] = [list(document.tokens) for document in found]
        self.pictures: list[Pictures] = [document.pictures for document in found]
        self.plain = renderer.prompt([{"role": "user", "content": "Hello."}])
        self.tokenizer = renderer.tokenizer

    def opened(self, **options: Any) -> Any:
        config = EngineConfig(kind="transformers", options=options)
        return closing(open_engine(str(self.folder), config, seed=0, max_model_len=256))

    def policy(self, image_encoder: ImageEncoder = "frozen") -> tuple[Policy, PictureReader]:
        policy = load_policy(str(self.folder)).eval()
        return policy, reads_pictures(policy, str(self.folder), self.tokenizer, "float32", 1, image_encoder)

    def answer_logprobs(
        self, policy: Policy, reader: PictureReader, i: int, answer: SampledAnswer
    ) -> torch.Tensor:
        document = compact(self.prompts[i], answer.tokens, pictures=self.pictures[i])
        batch = collate([[document]], 0, reader=reader)
        with torch.no_grad():
            return masked_logprobs(policy, batch).logprobs[batch.mask]


@pytest.fixture(scope="module", params=FAMILIES)
def asked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    yield Asked(make_pictured(request.param, tmp_path_factory.mktemp("models") / request.param))


def tokens_of(groups: list[list[SampledAnswer]]) -> list[list[list[int]]]:
    return [[list(answer.tokens) for answer in group] for group in groups]


@pytest.mark.parametrize("image_encoder", ["frozen", "trained"])
def test_answers_have_the_log_probs_of_the_trainer_after_a_sync_too(
    asked: Asked, image_encoder: ImageEncoder
) -> None:
    trained, reader = asked.policy(image_encoder)
    with asked.opened() as engine:
        before = engine.generate(asked.prompts, [3, 5, 7], HOW, asked.pictures)
        for i, group in enumerate(before):
            for answer in group:
                expected = asked.answer_logprobs(trained, reader, i, answer)
                torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-5, rtol=1e-5)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
        encoder = trained.image_encoder
        engine.update(checkpoint_weights(trained.model, lambda parameters: nullcontext(), encoder=encoder))
        after = engine.generate(asked.prompts, [3, 5, 7], HOW, asked.pictures)
        assert tokens_of(after) != tokens_of(before)
        for i, group in enumerate(after):
            for answer in group:
                expected = asked.answer_logprobs(trained, reader, i, answer)
                torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-5, rtol=1e-5)
        probed = engine.prompt_logprobs([*asked.prompts, asked.plain], [*asked.pictures, ()])
    documents = [
        Document(tokens, [True] * len(tokens), pictures=own)
        for tokens, own in zip([*asked.prompts, asked.plain], [*asked.pictures, ()], strict=True)
    ]
    for found, document in zip(probed, documents, strict=True):
        with torch.no_grad():
            expected = masked_logprobs(trained, collate([[document]], 0, reader=reader)).logprobs
        torch.testing.assert_close(torch.tensor(found), expected[0, : len(found)], atol=1e-5, rtol=0)


@torch.no_grad()
def test_an_encoder_that_is_loaded_after_a_sync_has_the_weights_that_were_sent(asked: Asked) -> None:
    """Prompts with images may come after texts. A weight that the encoder lacks is refused."""
    trained, reader = asked.policy("trained")
    assert trained.image_encoder is not None
    for parameter in trained.image_encoder.parameters():
        parameter.mul_(1.1)
    sent = dict(
        checkpoint_weights(trained.model, lambda parameters: nullcontext(), encoder=trained.image_encoder)
    )
    documents = [
        Document(tokens, [True] * len(tokens), pictures=own)
        for tokens, own in zip(asked.prompts, asked.pictures, strict=True)
    ]
    with asked.opened() as engine:
        engine.update(sent.items())
        assert engine._sampled.tower is None
        probed = engine.prompt_logprobs(asked.prompts, asked.pictures)
        for found, document in zip(probed, documents, strict=True):
            expected = masked_logprobs(trained, collate([[document]], 0, reader=reader)).logprobs
            torch.testing.assert_close(torch.tensor(found), expected[0, : len(found)], atol=1e-5, rtol=0)
        # only the language model is sent: the encoder stays
        engine.update(checkpoint_weights(trained.model, lambda parameters: nullcontext()))
        assert engine.prompt_logprobs(asked.prompts, asked.pictures) == probed
        with pytest.raises(ValueError, match=r"has no weight visual\.other, which was sent"):
            engine.update({**sent, "visual.other": torch.zeros(1)}.items())


@torch.no_grad()
def test_greedy_answers_are_those_of_the_whole_model(asked: Asked) -> None:
    whole = AutoModelForImageTextToText.from_pretrained(asked.folder, dtype=torch.float32).eval()
    _, reader = asked.policy()
    with asked.opened() as engine:
        found = engine.generate(asked.prompts, [0, 0, 0], Sampling(1, 0.0, 8, []), asked.pictures)
    for (answer,), prompt, pictures in zip(found, asked.prompts, asked.pictures, strict=True):
        inputs = whole_inputs(whole, reader, Document(prompt, [False] * len(prompt), pictures=pictures))
        theirs = whole.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert list(answer.tokens) == theirs[0, len(prompt) :].tolist()


def test_the_image_decides_the_answer(asked: Asked) -> None:
    same = asked.prompts[0] == asked.prompts[1]
    assert same, "the prompts differ only by the image"
    with asked.opened() as engine:
        answers = tokens_of(engine.generate(asked.prompts[:2], [3, 3], HOW, asked.pictures[:2]))
    assert answers[0] != answers[1]


def test_the_size_of_a_batch_changes_no_answer_and_an_image_is_read_once(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    seen = PictureTower.seen

    def counted(self: PictureTower, *inputs: Any) -> Any:
        read.append(sum(span.images for span in inputs[-1].documents))
        return seen(self, *inputs)

    monkeypatch.setattr(PictureTower, "seen", counted)
    prompts = [*asked.prompts, asked.plain]
    found = []
    for size in (1, 2, 64):
        read.clear()
        with asked.opened(batch_size=size) as engine:
            found.append(tokens_of(engine.generate(prompts, [1, 2, 3, 4], HOW, [*asked.pictures, ()])))
    assert found[0] == found[1] == found[2]
    assert sum(read) == 4, "of three answers to each prompt"


def test_requests_one_by_one_are_answered_as_together(asked: Asked) -> None:
    one = HOW._replace(n=1)
    requests = [
        Request(2 * i + j, asked.prompts[i], 10 * i + j, one, asked.pictures[i])
        for i in range(3)
        for j in range(2)
    ]
    with asked.opened() as engine:
        together = engine.generate(asked.prompts, [0, 10, 20], HOW._replace(n=2), asked.pictures)
        found: dict[int, SampledAnswer] = {}
        found |= engine.advance(requests, 0.05)
        while len(found) < 6:
            found |= engine.advance([], 0.05)
    assert [list(found[key].tokens) for key in range(6)] == [
        tokens for group in tokens_of(together) for tokens in group
    ]


def test_prompts_without_images_load_no_encoder(asked: Asked) -> None:
    with asked.opened() as engine:
        assert isinstance(engine, TransformersEngine)
        engine.generate([asked.plain], [1], HOW)
        engine.prompt_logprobs([asked.plain])
        assert engine._sampled.tower is None
