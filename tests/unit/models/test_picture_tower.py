"""Log-probs of documents with images: as transformers computes them for each alone, in every way to pack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import Document
from rlhf_core.models.kernels.attention import PLAIN, VARLEN, is_stateful, takes_varlen
from rlhf_core.models.load_model import load_policy, recompute, trained_scorer
from rlhf_core.models.multimodal.picture_tower import load_tower
from rlhf_core.models.policy import Policy, masked_logprobs, token_scores
from rlhf_core.objectives.collate import collate
from rlhf_core.objectives.picture_reader import PictureReader
from tests.support.pictured_models import FAMILIES, IMAGE_TYPES, make_pictured
from tests.support.state_kernels import take_edges
from tests.unit.data.pictures.test_picture_rendering import TALKS, image, own_tokens, talk, text
from tests.unit.models.test_attention import kernel  # noqa: F401

ALL = [
    *TALKS,
    talk("No image here.", "None."),
    talk([image("blue"), text("What?")], "red\n\n"),  # as the first, but for the image
]
# other releases of a family
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "small gemma4": ("gemma4", {"use_bidirectional_attention": None, "num_kv_shared_layers": 2}),
    "tied qwen2_5_vl": ("qwen2_5_vl", {"tie_word_embeddings": True}),
    "mistral3 around mistral": ("mistral3", {"model_type": "mistral", "sliding_window": None}),
}


class Pictured:
    """A model, its reader of images, and documents."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.renderer = Renderer(load_tokenizer(str(folder)), "chat")
        self.documents: list[Document] = [self.renderer.conversation(messages) for messages in ALL]
        images = self.renderer.pictures
        self.reader = PictureReader(images.token_id, images.tensors)

    def policy(self) -> Policy:
        policy = load_policy(str(self.folder))
        policy.tower = load_tower(policy.model, str(self.folder), "float32")
        return policy

    def logprobs(self, policy: Policy, rows: list[list[Document]]) -> list[torch.Tensor]:
        """Of the answers' tokens of each document, in the order of the rows. Each document has its own row
        where state would leak, as in stages."""
        if is_stateful(policy.model) and not takes_varlen(policy.model):
            rows = [[document] for row in rows for document in row]
        batch = collate(rows, 0, reader=self.reader)
        found = masked_logprobs(policy, batch).logprobs
        count = sum(map(len, rows))
        return [found[(batch.documents == index) & batch.mask] for index in range(count)]


@pytest.fixture(scope="module", params=[*FAMILIES, *VARIANTS])
def pictured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pictured:
    family, larger = VARIANTS.get(request.param, (request.param, {}))
    return Pictured(make_pictured(family, tmp_path_factory.mktemp("models") / "base", **larger))


@torch.no_grad()
def expected(pictured: Pictured) -> list[torch.Tensor]:
    """What the whole model computes from the inputs of the model's own processor."""
    whole = AutoModelForImageTextToText.from_pretrained(pictured.folder, dtype=torch.float32).eval()
    found = []
    for messages, document in zip(ALL, pictured.documents, strict=True):
        tokens = torch.tensor(document.tokens)[None]
        types = (tokens == pictured.reader.token_id).int()
        _, sent = own_tokens(pictured.renderer, messages)
        inputs = {name: torch.from_numpy(values.copy()) for name, values in sent.items()}
        if whole.config.model_type in IMAGE_TYPES:
            inputs[IMAGE_TYPES[whole.config.model_type]] = types
        logits = whole(input_ids=tokens, **inputs).logits.float().log_softmax(-1)[0, :-1]
        values = logits.gather(1, tokens[0, 1:, None])[:, 0]
        found.append(values[torch.tensor(document.mask)[1:]])
    return found


@torch.no_grad()
def test_packed_padded_and_single_documents_are_as_transformers_computes_them(pictured: Pictured) -> None:
    policy = pictured.policy().eval()
    documents = pictured.documents
    theirs = expected(pictured)
    for rows in ([documents], [[document] for document in documents], [documents[:2], documents[2:]]):
        for own, other in zip(pictured.logprobs(policy, rows), theirs, strict=True):
            torch.testing.assert_close(own, other, atol=2e-5, rtol=1e-5)
    # and the image is needed
    assert (theirs[0] - theirs[-1]).abs().max() > 1e-3


@torch.no_grad()
def test_attention_by_bounds_gives_the_same(
    pictured: Pictured,
    kernel: list[int],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As varlen kernels compute on GPUs, with state layers that restart. Masks stay where an image's tokens
    attend to each other in both directions."""
    theirs = expected(pictured)
    policy = load_policy(str(pictured.folder)).eval()
    if is_stateful(policy.model):
        take_edges(policy.model, monkeypatch)
    policy.model.set_attn_implementation(VARLEN if is_stateful(policy.model) else PLAIN)
    policy.tower = load_tower(policy.model, str(pictured.folder), "float32")
    config = policy.model.config
    both_ways = getattr(config, "use_bidirectional_attention", None) == "vision"
    assert takes_varlen(policy.model) != (both_ways or config.model_type == "gemma3_text")
    rows = [pictured.documents[:2], pictured.documents[2:]]
    for own, other in zip(pictured.logprobs(policy, rows), theirs, strict=True):
        torch.testing.assert_close(own, other, atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_features_reach_only_their_own_document(pictured: Pictured) -> None:
    policy = pictured.policy().eval()
    first, *others = pictured.documents
    changed = pictured.documents[-1]
    before = pictured.logprobs(policy, [[first, *others]])
    after = pictured.logprobs(policy, [[changed, *others]])
    assert (before[0] - after[0]).abs().max() > 1e-3
    for one, other in zip(before[1:], after[1:], strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


def test_gradients_of_a_packed_step_are_those_of_single_ones(pictured: Pictured) -> None:
    def gradients(split: list[list[list[Document]]]) -> dict[str, torch.Tensor]:
        policy = pictured.policy()
        for rows in split:
            (-sum(part.sum() for part in pictured.logprobs(policy, rows))).backward()
        assert all(not name.startswith("tower") for name, _ in policy.named_parameters())
        return {name: weight.grad for name, weight in policy.named_parameters() if weight.grad is not None}

    packed = gradients([[pictured.documents]])
    single = gradients([[[document]] for document in pictured.documents])
    assert packed.keys() == single.keys() and packed
    for name, gradient in single.items():
        assert (packed[name] - gradient).norm() <= 1e-4 * max(1.0, float(gradient.norm())), name


def test_checkpointing_changes_nothing(pictured: Pictured) -> None:
    found = []
    for share in (0.0, 1.0):
        policy = pictured.policy().train()
        recompute(policy.model, share)
        loss = -sum(part.sum() for part in pictured.logprobs(policy, [pictured.documents]))
        loss.backward()
        found.append(
            [float(loss.detach()), float(next(policy.model.model.layers[0].parameters()).grad.norm())]
        )
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_changed_file_and_a_missing_reader_are_told(pictured: Pictured) -> None:
    document = pictured.documents[0]
    with pytest.raises(ValueError, match="the model has no image encoder loaded"):
        collate([[document]], 0)
    wrong = PictureReader(
        pictured.reader.token_id,
        lambda source: {
            name: values.repeat(2, 0) for name, values in pictured.reader.tensors(source).items()
        },
    )
    batch = collate([[document]], 0, reader=wrong)
    with pytest.raises(ValueError, match="a file has changed since the data was read"):
        masked_logprobs(pictured.policy(), batch)


@torch.no_grad()
def test_texts_of_a_row_are_apart_without_an_encoder_too(pictured: Pictured) -> None:
    """Of policies and reward models: some families separate documents only by positions on axes."""
    texts = [pictured.renderer.conversation(talk(f"Say {word}.", word)) for word in ("one", "three")]
    batch = collate([texts], 0)
    policy = load_policy(str(pictured.folder)).eval()
    scorer = trained_scorer(str(pictured.folder), 0, "float32", False, None, 0).eval()
    torch.nn.init.normal_(scorer.model.score.weight)
    if is_stateful(policy.model):
        pytest.skip("its documents have their own rows")
    packed = token_scores(scorer, batch)
    for index, document in enumerate(texts):
        alone = collate([[document]], 0)
        places = batch.documents == index
        expected = masked_logprobs(policy, alone).logprobs[alone.mask]
        found = masked_logprobs(policy, batch).logprobs[places & batch.mask]
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
        single = token_scores(scorer, alone)[0, : len(document)]
        torch.testing.assert_close(packed[places][: len(document)], single, atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_an_image_of_one_token_is_read(tmp_path: Path) -> None:
    """transformers drops a dimension of such an image of Mistral 3."""
    pictured = Pictured(make_pictured("mistral3", tmp_path / "base"))
    small = [image("red", 5, 7), text("What?")]
    document, other = (
        pictured.renderer.conversation(talk(content, "red"))
        for content in (small, [image("blue", 5, 7), text("What?")])
    )
    assert list(document.tokens).count(pictured.reader.token_id) == 1
    policy = pictured.policy().eval()
    alone, different = pictured.logprobs(policy, [[document], [other]])
    packed = pictured.logprobs(policy, [[pictured.documents[0], document]])[1]
    torch.testing.assert_close(packed, alone, atol=2e-5, rtol=1e-5)
    assert (alone - different).abs().max() > 1e-4
