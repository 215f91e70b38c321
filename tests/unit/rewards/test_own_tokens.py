"""Reward models with another tokenizer than the policy's score the same text in tokens of their own."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from rlhf_core.config.rewards import ModelReward
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.rewards.batch import reward_batch
from rlhf_core.rewards.own_tokens import document, writers
from rlhf_core.rewards.reward_contract import Sample
from tests.unit.hub.test_vocabulary import swap


def save_reward_model(base: Path, folder: Path) -> Path:
    """A reward model with a random head."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    load_tokenizer(str(base)).save_pretrained(folder)
    return folder


def save_twin(of: Path, folder: Path) -> Path:
    """The same function of text: the tokens of two letters and their embeddings have changed places."""
    swap(folder, of)
    vocabulary = json.loads((of / "tokenizer.json").read_text())["model"]["vocab"]
    weights = load_file(folder / "model.safetensors")
    (name,) = [name for name in weights if name.endswith("embed_tokens.weight")]
    a = vocabulary["a"]
    b = vocabulary["b"]
    weights[name][[a, b]] = weights[name][[b, a]].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def models(material: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("own")
    own = save_reward_model(material / "base", root / "own")
    return {"base": str(material / "base"), "own": str(own), "twin": str(save_twin(own, root / "twin"))}


def samples() -> list[Sample]:
    dice = random.Random(0)
    texts = ["".join(dice.choices("abcdef ", k=dice.randrange(1, 20))) for _ in range(12)]
    return [
        Sample([{"role": "user", "content": texts[i]}], texts[i + 1], {}, bool(i % 3), "") for i in range(11)
    ]


def test_the_scores_are_those_of_the_same_model_with_the_policys_tokenizer(models: dict[str, str]) -> None:
    sources = [ModelReward(model="own"), ModelReward(model="twin")]
    own_tokens = writers(models["base"], {source.title: models[source.model] for source in sources})
    assert list(own_tokens) == ["twin"]
    renderer = Renderer(load_tokenizer(models["base"]), "chat")
    documents = [document(renderer, sample) for sample in samples()]
    for given, alike in ((own_tokens, True), ({}, False)):
        combined = reward_batch(sources, models, documents, samples(), 0.0, 4, own_tokens=given)
        own, twin = (combined.metrics[f"reward/{name}/mean"] for name in ("own", "twin"))
        assert (own == pytest.approx(twin, abs=1e-6)) is alike
        own, twin = (combined.metrics[f"reward/{name}/std"] for name in ("own", "twin"))
        assert (own == pytest.approx(twin, abs=1e-6)) is alike


def test_an_answer_cut_by_length_has_no_end_and_long_ones_lose_their_first_tokens(
    models: dict[str, str],
) -> None:
    (writer,) = writers(models["base"], {"twin": models["twin"]}).values()
    whole, cut = (
        Sample([{"role": "user", "content": "ab"}], "bab", {}, finished, "") for finished in (True, False)
    )
    found = writer.documents([whole, cut])
    assert found[0].tokens[:-1] == found[1].tokens and found[0].tokens[-1] == writer.renderer.end_token_id
    assert writer.renderer.tokenizer.decode(found[1].tokens).endswith("bab")
    (short,) = writer._replace(longest=5).documents([whole])
    assert short.tokens == found[0].tokens[-5:] and short.mask == found[0].mask[-5:]
    assert writer.longest and writer.pad_token_id == writer.renderer.tokenizer.pad_token_id


def test_a_reward_model_without_a_chat_template_is_refused(models: dict[str, str], tmp_path: Path) -> None:
    plain = swap(tmp_path / "plain", Path(models["own"]))
    (plain / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((plain / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (plain / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError,
        match=f"{plain} has another tokenizer than .*, and answers cannot be written for it: .*chat template",
    ):
        writers(models["base"], {"plain": str(plain)})
