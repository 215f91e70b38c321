"""Gradients of a trained image encoder and of its projector: those of transformers' whole model, however
documents are packed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from rlhf_core.config.training.optimiser_fields import Freeze, ImageEncoder
from rlhf_core.data.documents import Document
from rlhf_core.data.pictures.picture_source import PictureSource
from rlhf_core.models.load_model import load_policy, recompute
from rlhf_core.models.picture_reading import reads_pictures
from rlhf_core.models.policy import Policy
from rlhf_core.models.weights.frozen_weights import embeddings_and_heads, freeze_weights
from rlhf_core.models.weights.trained_encoder import TrainedEncoder
from tests.support.pictured_models import FAMILIES, make_pictured
from tests.support.pictured_pairs import whole_inputs
from tests.unit.data.pictures.test_picture_rendering import talk, text
from tests.unit.models.test_picture_tower import Pictured

PROJECTOR = {
    "gemma3": ("multi_modal_projector.",),
    "gemma4": ("model.embed_vision.",),
    "mistral3": ("multi_modal_projector.",),
    **dict.fromkeys(("qwen2_5_vl", "qwen2_vl"), ("visual.merger.",)),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), ("model.visual.merger.",)),
    "qwen3_vl": ("model.visual.merger.", "model.visual.deepstack_merger_list."),
}


def noise(seed: int, width: int, height: int) -> dict[str, Any]:
    """An image of random colours: in one colour, all patches are alike, and attention has no gradient."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return {"type": "image", "picture": PictureSource("", None, content.getvalue())}


TALKS = [
    talk([noise(0, 16, 16), text("What?")], "red\n\n"),
    talk([text("One"), noise(1, 40, 16), text(" two "), noise(2, 16, 24)], "a", "And now?", "b"),
    talk("Hello.", "Hi.", [noise(3, 24, 60)], "c"),
    talk("No image here.", "None."),
]


class Trained(Pictured):
    """A model whose encoder is trained, and documents."""

    def __init__(self, family: str, folder: Path):
        super().__init__(make_pictured(family, folder))
        self.family = family
        self.documents = [self.renderer.conversation(messages) for messages in TALKS]

    def opened(self, image_encoder: ImageEncoder = "trained") -> Policy:
        policy = load_policy(str(self.folder)).train()
        tokenizer = self.renderer.tokenizer
        reads_pictures(policy, str(self.folder), tokenizer, "float32", 1, image_encoder)
        return policy

    def gradients(self, policy: Policy, split: list[list[list[Document]]]) -> dict[str, torch.Tensor]:
        """Those of the encoder's weights, by their names in the checkpoint."""
        for rows in split:
            (-sum(part.sum() for part in self.logprobs(policy, rows))).backward()
        found = {}
        for name, weight in encoder_of(policy).stored.items():
            assert weight.grad is not None, name
            found[name] = weight.grad
        return found

    def expected(self) -> dict[str, torch.Tensor]:
        """What transformers' whole model computes, one document at a time."""
        whole = AutoModelForImageTextToText.from_pretrained(self.folder, dtype=torch.float32)
        for document in self.documents:
            inputs = whole_inputs(whole, self.reader, document)
            logprobs = whole(**inputs).logits.log_softmax(-1)[0, :-1]
            own = logprobs.gather(1, inputs["input_ids"][0, 1:, None])[:, 0]
            (-own[torch.tensor(document.mask)[1:]].sum()).backward()
        parts = ("vision", "visual", "multi_modal_projector")
        return {
            name: weight.grad
            for name, weight in whole.named_parameters()
            if weight.grad is not None and any(part in name for part in parts)
        }


def encoder_of(policy: Policy) -> TrainedEncoder:
    assert policy.image_encoder is not None
    return policy.image_encoder


def require_equal(own: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """To a 100,000th of each weight's gradient, or to a 10,000,000th of that of the whole encoder: a bias of
    keys, for example, has none but rounding errors."""
    assert own.keys() == other.keys() and own
    whole = torch.stack([gradient.norm() for gradient in other.values()]).norm()
    for name, gradient in other.items():
        assert (own[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7 * whole, name


@pytest.fixture(scope="module", params=FAMILIES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(request.param, tmp_path_factory.mktemp("models") / request.param)


def test_gradients_are_those_of_the_whole_model(trained: Trained) -> None:
    packed = trained.gradients(trained.opened(), [[trained.documents]])
    # in the checkpoint, older families have no `model.` before these names
    theirs = trained.expected()
    own = {name if name in theirs else f"model.{name}": gradient for name, gradient in packed.items()}
    require_equal(own, theirs)
    # each has a gradient that is not only rounding errors, so that the comparison means something
    largest = max(float(gradient.norm()) for gradient in theirs.values())
    vanishing = [name for name, gradient in theirs.items() if gradient.norm() < 1e-6 * largest]
    assert all(name.endswith("k_proj.bias") for name in vanishing), vanishing


def test_packed_and_single_documents_have_the_same_gradients(trained: Trained) -> None:
    """One of the single documents has no image."""
    packed = trained.gradients(trained.opened(), [[trained.documents]])
    single = trained.gradients(trained.opened(), [[[document]] for document in trained.documents])
    require_equal(packed, single)


def test_of_the_projector_only_its_weights_are_trained(trained: Trained) -> None:
    policy = trained.opened("projector")
    projector = trained.gradients(policy, [[trained.documents]])
    whole = trained.gradients(trained.opened(), [[trained.documents]])
    named = {name for name in whole if name.startswith(PROJECTOR[trained.family])}
    assert projector.keys() == named and named < whole.keys()
    require_equal(projector, {name: whole[name] for name in named})
    assert policy.tower is not None
    trainable = {id(weight) for weight in policy.tower._whole.parameters() if weight.requires_grad}
    assert trainable == {id(weight) for weight in encoder_of(policy).parameters()}


def test_a_pass_without_images_gives_gradients_of_zero(trained: Trained) -> None:
    """So that all ranks sum gradients of the same weights."""
    gradients = trained.gradients(trained.opened(), [[trained.documents[3:]]])
    assert all(not gradient.any() for gradient in gradients.values())
    policy = trained.opened()
    with torch.no_grad():
        (without,) = trained.logprobs(policy, [trained.documents[3:]])
        (other,) = trained.logprobs(load_policy(str(trained.folder)), [trained.documents[3:]])
    assert torch.equal(without, other)


def test_recomputed_activations_have_the_same_gradients(trained: Trained) -> None:
    policy = trained.opened()
    assert policy.tower is not None
    calls: list[object] = []
    (part,) = policy.tower.parts
    recompute(part, 1.0)
    for name, weight in part.named_modules():
        if name.endswith(("layernorm", "norm1", "attention_norm")):
            weight.register_forward_pre_hook(lambda *_: calls.append(None))
    again = trained.gradients(policy, [[trained.documents]])
    recomputed = len(calls)
    calls.clear()
    with torch.no_grad():
        trained.logprobs(policy, [trained.documents])
    assert recomputed > len(calls), "the layers ran twice"
    require_equal(again, trained.gradients(trained.opened(), [[trained.documents]]))


def test_the_language_model_may_be_frozen(trained: Trained) -> None:
    policy = trained.opened("projector")
    everything = Freeze(names=("*",))
    with pytest.raises(ValueError, match="freeze leaves no weight"):
        freeze_weights(policy.model, everything)
    freeze_weights(policy.model, everything, trains_encoder=True)
    alone = trained.gradients(policy, [[trained.documents]])
    assert all(weight.grad is None for weight in policy.model.parameters())
    require_equal(alone, trained.gradients(trained.opened("projector"), [[trained.documents]]))


def test_embeddings_of_positions_are_embeddings(trained: Trained) -> None:
    """`decay: hidden` leaves them out."""
    policy = trained.opened()
    outer = embeddings_and_heads(policy)
    found = {name for name, weight in encoder_of(policy).stored.items() if weight in outer}
    tables = ("position_embedding.weight", "visual.pos_embed.weight")
    assert found == {name for name in encoder_of(policy).stored if name.endswith(tables)}
    assert found or trained.family in ("gemma4", "mistral3", "qwen2_5_vl", "qwen2_vl")
