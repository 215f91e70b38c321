"""SFT that trains the image encoder or its projector: the checkpoint has these weights, and the others as they
were."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

import rlhf_core.stages.reward_model
from rlhf_core.config import SFT, Lora, RewardModel
from rlhf_core.config.training.optimiser_fields import ImageEncoder
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.training.engine import TorchEngine
from tests.support.pictured_models import STAGED, asked, make_pictured, write_rows
from tests.support.pictured_pairs import colour_pairs
from tests.support.stage_request import stage_request
from tests.unit.models.test_trained_encoder import PROJECTOR
from tests.unit.stages.test_sft_with_images import rows_of, train

ENCODER = {
    "gemma3": ("vision_tower.", "multi_modal_projector."),
    "gemma4": ("model.vision_tower.", "model.embed_vision."),
    "mistral3": ("vision_tower.", "multi_modal_projector."),
    **dict.fromkeys(("qwen2_5_vl", "qwen2_vl"), ("visual.",)),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_vl"), ("model.visual.",)),
}
POOLED = "vision_tower.head."  # no language model reads it
ALL_FROZEN = {"names": ("*",)}


@pytest.fixture(scope="module", params=STAGED)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def base(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictured(family, tmp_path_factory.mktemp("models") / family, initializer_range=0.05)


def changed_weights(base: Path, made: Path) -> set[str]:
    """The names of those whose bytes differ."""
    before = load_file(base / "model.safetensors")
    after = load_file(made / "model.safetensors")
    assert before.keys() == after.keys()
    return {name for name, weight in after.items() if not torch.equal(weight, before[name])}


@pytest.mark.parametrize("image_encoder", ["projector", "trained"])
@pytest.mark.parametrize("language_model", ["trained", "frozen"])
def test_what_is_trained_changes_and_nothing_else(
    family: str, base: Path, image_encoder: ImageEncoder, language_model: str, tmp_path: Path
) -> None:
    freeze = ALL_FROZEN if language_model == "frozen" else None
    train(base, tmp_path / "run", rows_of(tmp_path, 16), image_encoder=image_encoder, freeze=freeze)
    made = tmp_path / "run" / "checkpoint"
    changed = changed_weights(base, made)
    encoder = {name for name in changed if name.startswith(ENCODER[family])}
    assert bool(changed - encoder) == (language_model == "trained")
    names = load_file(made / "model.safetensors").keys()
    parts = PROJECTOR[family] if image_encoder == "projector" else ENCODER[family]
    assert encoder == {name for name in names if name.startswith(parts) and not name.startswith(POOLED)}
    assert (made / "config.json").read_bytes() == (base / "config.json").read_bytes()
    _, problems = AutoModelForImageTextToText.from_pretrained(made, output_loading_info=True)
    assert not any(problems.values())
    # another stage goes on from it
    train(made, tmp_path / "again", rows_of(tmp_path, 8))
    again = changed_weights(made, tmp_path / "again" / "checkpoint")
    assert again and not any(name.startswith(ENCODER[family]) for name in again)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_killed_stage_resumes_to_the_same_weights(
    family: str, base: Path, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16 with fp32 masters of the encoder's weights too, and with an average of them."""
    fields = {"image_encoder": "trained", "save_steps": 1, "dtype": dtype, "ema": 0.5}
    data = rows_of(tmp_path, 24)
    train(base, tmp_path / "whole", data, **fields)
    real_step = TorchEngine.step
    steps = []

    def dies_at_the_third_step(self: TorchEngine, rate: float) -> float:
        steps.append(rate)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return real_step(self, rate)

    monkeypatch.setattr(TorchEngine, "step", dies_at_the_third_step)
    with pytest.raises(KeyboardInterrupt):
        train(base, tmp_path / "killed", data, **fields)
    train(base, tmp_path / "killed", data, **fields)
    assert len(steps) == 4
    for place in ("checkpoint", "exports/ema"):
        assert not changed_weights(tmp_path / "whole" / place, tmp_path / "killed" / place)
        encoder = {
            n for n in changed_weights(base, tmp_path / "whole" / place) if n.startswith(ENCODER[family])
        }
        assert encoder
    assert changed_weights(tmp_path / "whole" / "checkpoint", tmp_path / "whole" / "exports/ema")


def test_packed_and_padded_steps_have_the_same_loss(base: Path, tmp_path: Path) -> None:
    """Every fourth row has no image, so passes without images are among them."""
    data = rows_of(tmp_path, 16)
    ways = (
        {"packing": True},
        {"packing": False, "micro_train_batch_size": 1},
        {"gradient_checkpointing": 1.0},
    )
    curves = []
    for number, way in enumerate(ways):
        train(base, tmp_path / f"{number}", data, image_encoder="trained", **way)
        lines = [row for row in read_metrics(tmp_path / f"{number}") if "loss" in row]
        curves.append([value for row in lines for value in (row["loss"], row["grad_norm"])])
    for other in curves[1:]:
        assert other == pytest.approx(curves[0], rel=1e-4)


def test_the_projector_alone_lowers_the_loss(base: Path, tmp_path: Path) -> None:
    """The language model is frozen, so only the features of images can lower the loss."""
    data = rows_of(tmp_path, 24)
    fields = {"max_epochs": 8, "learning_rate": 1e-2, "freeze": ALL_FROZEN}
    train(base, tmp_path / "run", data, image_encoder="projector", **fields)
    losses = [row["loss"] for row in read_metrics(tmp_path / "run") if "loss" in row]
    assert fmean(losses[-3:]) < fmean(losses[:3]) - 0.1


def test_the_encoder_may_have_its_own_learning_rate(family: str, base: Path, tmp_path: Path) -> None:
    """Adam's first step moves each weight by its learning rate, if its gradient is not tiny."""
    rates = {"learning_rate": 1e-3, "image_encoder_learning_rate": 1e-4, "schedule": "constant"}
    once = {"train_batch_size": 8, "weight_decay": 0.1, "max_norm": 1e6, "warmup_ratio": 0.0}
    train(base, tmp_path / "run", rows_of(tmp_path, 8), image_encoder="trained", **rates, **once)
    before = load_file(base / "model.safetensors")
    after = load_file(tmp_path / "run" / "checkpoint" / "model.safetensors")
    moved = {name: float((after[name] - weight).abs().median()) for name, weight in before.items()}
    encoder = [moved[name] for name in before if name.startswith(PROJECTOR[family])]
    language_model = [moved[name] for name in before if name.endswith("mlp.down_proj.weight")]
    assert encoder and language_model
    assert max(encoder) == pytest.approx(1e-4, rel=0.05)
    assert max(language_model) == pytest.approx(1e-3, rel=0.05)


def test_a_reward_model_exports_its_encoder(family: str, base: Path, tmp_path: Path) -> None:
    config = RewardModel.model_validate(
        {
            **dict(
                model="base", data=colour_pairs(tmp_path, 16), train_batch_size=8, micro_train_batch_size=4
            ),
            **dict(max_len=96, learning_rate=3e-3, dtype="float32", image_encoder="trained"),
        }
    )
    (tmp_path / "run").mkdir()
    rlhf_core.stages.reward_model.run(stage_request(config, base, seed=3), RunDir(tmp_path / "run"))
    before = load_file(base / "model.safetensors")
    after: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "run" / "checkpoint").glob("*.safetensors"):
        after |= load_file(file)
    encoder = {name for name in before if name.startswith(ENCODER[family]) and not name.startswith(POOLED)}
    # the first step's gradient of features is zero: the new head is one of zeros
    assert encoder and all(not torch.equal(after[name], before[name]) for name in encoder)


def test_what_does_not_fit_is_refused(base: Path, tmp_path: Path) -> None:
    texts = write_rows(tmp_path / "texts.jsonl", [asked("Say hi.", "hi")])
    with pytest.raises(
        ValueError, match=r"image_encoder: projector trains what reads images, and the data has"
    ):
        train(base, tmp_path / "run", {"sources": str(texts)}, image_encoder="projector")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"image_encoder: trained trains weights of the encoder, lora"):
        SFT.model_validate({"data": {"sources": "a"}, "image_encoder": "trained", "lora": Lora()})
    with pytest.raises(
        ValueError, match=r"image_encoder_learning_rate is that of an encoder that is trained"
    ):
        SFT.model_validate({"data": {"sources": "a"}, "image_encoder_learning_rate": 1e-4})
