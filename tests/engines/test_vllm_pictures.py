"""vLLM's engine on prompts with images, where torchvision is: answers have the log-probs of the trainer, before
and after a sync, and the image decides them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config import EngineConfig
from rlhf_core.data.documents import Document
from rlhf_core.data.pictures.picture_source import PictureSource
from rlhf_core.models.checkpoint.checkpoint_weights import checkpoint_weights
from rlhf_core.models.policy import Policy, masked_logprobs
from rlhf_core.objectives.collate import collate
from rlhf_core.objectives.picture_reader import PictureReader
from rlhf_core.rollout.engine_contract import Pictures, Request, SampledAnswer
from rlhf_core.rollout.engine_kinds import open_engine
from tests.support.pictured_models import make_pictured, square
from tests.unit.rollout.test_pictured_sampling import HOW, Asked, tokens_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM reads images with torchvision"),
]
CLOSE = {"atol": 1e-4, "rtol": 0.0}  # nats, in float32


@dataclass(frozen=True)
class Opened:
    """A model, the trainer's copy of it, and an engine with two requests at once."""

    asked: Asked
    policy: Policy
    reader: PictureReader
    engine: Any

    def check(self, groups: list[list[SampledAnswer]]) -> None:
        """Compares the log-probs of answers with those of the trainer."""
        for i, group in enumerate(groups):
            assert len(group) == HOW.n
            for answer in group:
                expected = self.asked.answer_logprobs(self.policy, self.reader, i, answer)
                torch.testing.assert_close(torch.tensor(answer.logprobs), expected, **CLOSE)

    def answers(self) -> list[list[SampledAnswer]]:
        found: list[list[SampledAnswer]] = self.engine.generate(
            self.asked.prompts, [3, 5, 7], HOW, self.asked.pictures
        )
        return found


def opened_vllm(folder: Path, **options: Any) -> Any:
    config = EngineConfig(kind="vllm", kv_cache_gib=0.5, options={"max_num_seqs": 2, **options})
    return open_engine(str(folder), config, seed=0, max_model_len=256, pictures=True)


LATER = ("gemma4", "mistral3", "qwen2_5_vl", "qwen2_vl")
VARIANTS = {
    "gemma4": {"use_bidirectional_attention": None},  # as in E2B and E4B
    "qwen2_5_vl": {"tie_word_embeddings": True},  # as in 3B
}


# Gemma 4 and the small Qwen2.5-VL have one weight for embeddings and head
@pytest.fixture(
    scope="module",
    params=["qwen3_vl", *(pytest.param(family, marks=pytest.mark.long) for family in LATER)],
)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    folder = tmp_path_factory.mktemp("models") / request.param
    asked = Asked(make_pictured(request.param, folder, **VARIANTS.get(request.param, {})))
    with closing(opened_vllm(asked.folder)) as engine:
        yield Opened(asked, *asked.policy("trained"), engine)


def with_images(asked: Asked, i: int, *sources: PictureSource) -> Pictures:
    """The images of prompt i, with other contents."""
    pairs = zip(asked.pictures[i], sources, strict=True)
    return tuple(picture._replace(source=source) for picture, source in pairs)


def test_answers_have_the_log_probs_of_the_trainer_after_a_sync_too(opened: Opened) -> None:
    before = opened.answers()
    opened.check(before)
    kept = {name: weight.clone() for name, weight in opened.policy.state_dict().items()}
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in opened.policy.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    encoder = opened.policy.image_encoder
    assert encoder is not None
    opened.engine.update(
        checkpoint_weights(opened.policy.model, lambda parameters: nullcontext(), encoder=encoder)
    )
    after = opened.answers()
    assert tokens_of(after) != tokens_of(before)
    opened.check(after)
    opened.policy.load_state_dict(kept)
    opened.engine.load(str(opened.asked.folder))
    assert tokens_of(opened.answers()) == tokens_of(before)


def test_prompts_with_and_without_images_have_the_log_probs_of_the_trainer(opened: Opened) -> None:
    asked = opened.asked
    prompts = [asked.prompts[0], asked.plain, asked.prompts[2]]
    pictures = [asked.pictures[0], (), asked.pictures[2]]
    probed = opened.engine.prompt_logprobs(prompts, pictures)
    for found, tokens, own in zip(probed, prompts, pictures, strict=True):
        document = Document(tokens, [True] * len(tokens), pictures=own)
        with torch.no_grad():
            expected = masked_logprobs(opened.policy, collate([[document]], 0, reader=opened.reader)).logprobs
        torch.testing.assert_close(torch.tensor(found), expected[0, : len(found)], **CLOSE)


def test_cached_prefixes_belong_to_the_content_of_their_images(opened: Opened, tmp_path: Path) -> None:
    asked = opened.asked
    file = tmp_path / "image.png"
    source = PictureSource("image.png", str(tmp_path))
    found = []
    for colour in ("red", "blue", "red", "blue"):
        file.write_bytes(square(colour))
        file.touch()
        for own in (source, PictureSource(data=square(colour))):  # the same content, stored twice
            pictures = [with_images(asked, 0, own)]
            found.append(opened.engine.generate([asked.prompts[0]], [3], HOW, pictures))
    red, *_ = logprobs = [[list(answer.logprobs) for answer in group] for (group,) in found]
    assert logprobs[0] == logprobs[1] == logprobs[4] == logprobs[5]
    assert logprobs[2] == logprobs[3] == logprobs[6] == logprobs[7]
    assert red != logprobs[2]


def test_requests_one_by_one_are_answered_as_together(opened: Opened) -> None:
    asked = opened.asked
    one = HOW._replace(n=1)
    requests = [
        Request(2 * i + j, asked.prompts[i], 10 * i + j, one, asked.pictures[i])
        for i in range(3)
        for j in range(2)
    ]
    together = opened.engine.generate(asked.prompts, [0, 10, 20], HOW._replace(n=2), asked.pictures)
    found = dict(opened.engine.advance(requests, 0.0))
    while len(found) < 6:
        found |= dict(opened.engine.advance([], 0.05))
    assert [list(found[key].tokens) for key in range(6)] == [
        tokens for group in tokens_of(together) for tokens in group
    ]


def test_an_image_of_another_size_than_its_tokens_is_refused(opened: Opened) -> None:
    asked = opened.asked
    other = with_images(asked, 0, PictureSource(data=square("red", 40, 16)))
    with pytest.raises(ValueError, match="the file has changed since the data was read"):
        opened.engine.generate([asked.prompts[0]], [3], HOW, [other])
    gone = with_images(asked, 0, PictureSource("gone.png", "/nowhere"))
    with pytest.raises(ValueError, match="it could be read when the stage began: restore it"):
        opened.engine.generate([asked.prompts[0]], [3], HOW, [gone])
    opened.check(opened.answers())


@pytest.mark.long
def test_an_engine_for_text_has_the_log_probs_of_the_trainer_and_refuses_images(tmp_path: Path) -> None:
    asked = Asked(make_pictured("qwen3_vl", tmp_path / "qwen3_vl"))
    policy, _ = asked.policy()
    config = EngineConfig(kind="vllm", kv_cache_gib=0.5, options={"max_num_seqs": 2})
    document = Document(asked.plain, [True] * len(asked.plain))
    with torch.no_grad():
        expected = masked_logprobs(policy, collate([[document]], 0)).logprobs[0, : len(document)]
    with closing(open_engine(str(asked.folder), config, seed=0, max_model_len=256)) as engine:
        (found,) = engine.prompt_logprobs([asked.plain])
        torch.testing.assert_close(torch.tensor(found), expected, **CLOSE)
        with pytest.raises(ValueError, match="this engine was started without"):
            engine.generate(asked.prompts[:1], [3], HOW, asked.pictures[:1])


def test_families_whose_images_are_seen_in_both_directions_are_refused_on_a_cpu(tmp_path: Path) -> None:
    folder = make_pictured("gemma3", tmp_path / "gemma3")
    with pytest.raises(ValueError, match=r"vLLM does not do on CPUs: set engine\.kind to transformers"):
        opened_vllm(folder)
