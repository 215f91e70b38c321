"""What `alignflow plan` counts for image encoders: their own numbers, beside measured ones."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Gemma3Config, Mistral3Config, Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from flows.cli.app import main
from rlhf_core.cluster.layout import arrange
from rlhf_core.config import DPO, KTO, PPO, SFT, Data, EngineConfig, Ranks
from rlhf_core.data.image_fields import may_hold_images
from rlhf_core.forecast.by_phase import by_phase, training_by_phase
from rlhf_core.forecast.image_data import encodes_images, seen_size, seen_sizes
from rlhf_core.forecast.memory import engine_needs, image_bytes, training_phases
from rlhf_core.forecast.rates import TYPICAL
from rlhf_core.forecast.seconds import phases
from rlhf_core.hub.image_encoder import ImageEncoder, encoder_of_config
from rlhf_core.hub.model_config import size_of
from rlhf_core.models.load_model import load_policy
from rlhf_core.models.multimodal.picture_tower import load_tower
from tests.support.measured import H200, SMALL_MODEL
from tests.support.pictured_models import FAMILIES, asked, make_pictured, write_rows

RELEASE = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16}  # Qwen3-VL-2B
ENCODER = ImageEncoder(parameters=4e8, operations=3e9, passing=3e5, features=16384)
SEES = SMALL_MODEL._replace(encoder=ENCODER)


class Peak(TorchDispatchMode):
    """Sums the bytes of tensors that exist at once."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.held:
                    self.held[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.held.pop, storage._cdata)
                    self.most = max(self.most, sum(self.held.values()))
        return out


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_encoder_that_runs(family: str, tmp_path: Path) -> None:
    folder = str(make_pictured(family, tmp_path / "base"))
    size = size_of(folder)
    tower = load_tower(load_policy(folder, "float32").model, folder, "float32")
    inside = {
        name: weight.numel()
        for name, weight in tower._whole.named_parameters()
        if not name.startswith("lm_head")
    }
    assert size.encoder is not None and size.encoder.parameters == sum(inside.values())
    # the language model's own weights alone, of those in the folder's files
    (tmp_path / "base" / "model.safetensors").unlink()
    assert size_of(folder).encoder is not None
    assert size.parameters <= size_of(folder).parameters


def test_parameters_by_config_are_those_of_releases() -> None:
    deep = {**RELEASE, "out_hidden_size": 2048, "deepstack_visual_indexes": [5, 11, 17]}
    qwen = Qwen3VLConfig(vision_config=deep)
    with torch.device("meta"):
        built = Qwen3VLVisionModel(qwen.vision_config)
    count = sum(weight.numel() for weight in built.parameters())
    found = encoder_of_config(qwen.to_dict(), 2048)
    assert found is not None
    assert found.parameters == pytest.approx(count, rel=0.01) == pytest.approx(0.406e9, rel=0.01)
    assert found.features == 2 * 4 * 2048  # the last layer's, and those of three layers before
    # 4 patches a token; each meets the blocks and its pixels' projection, and a token meets 4 mergers
    met = 24 * (4 * 1024**2 + 2 * 1024 * 4096) + 2 * 3 * 16**2 * 1024
    assert found.operations == 2 * (4 * met + 4 * (4096**2 + 4096 * 2048))
    siglip = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "patch_size": 14}
    gemma = Gemma3Config(vision_config={**siglip, "image_size": 896}, mm_tokens_per_image=256)
    found = encoder_of_config(gemma.to_dict(), 2560)
    assert found is not None and found.parameters == pytest.approx(0.417e9, rel=0.02)
    assert found.operations > 2 * 16 * 27 * (4 * 1152**2 + 2 * 1152 * 4304)  # 4,096 patches, 256 tokens
    pixtral = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "patch_size": 14}
    mistral = Mistral3Config(vision_config={"model_type": "pixtral", **pixtral}).to_dict()
    found = encoder_of_config(mistral, 5120)
    assert found is not None and found.parameters == pytest.approx(0.44e9, rel=0.02)
    # as config.json of Qwen2.5-VL 7B, in which only the whole names its family
    windows = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
    windows |= {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    released = {"model_type": "qwen2_5_vl", "vision_config": windows}
    found = encoder_of_config(released, 3584)
    assert found is not None and found.parameters == pytest.approx(0.676e9, rel=0.01)
    assert found.operations > 2 * 4 * 32 * (4 * 1280**2 + 3 * 1280 * 3420)


@pytest.mark.parametrize("width", [128, 256])
def test_the_pass_takes_what_it_is_said_to(width: int) -> None:
    vision = {"depth": 3, "hidden_size": width, "intermediate_size": 4 * width, "num_heads": width // 64}
    config = Qwen3VLConfig(vision_config={**vision, "out_hidden_size": 64, "deepstack_visual_indexes": [0]})
    torch.manual_seed(0)
    encoder = Qwen3VLVisionModel._from_config(config.vision_config, dtype=torch.bfloat16).eval()
    grid = torch.tensor([[1, 16, 16]] * 8)
    pixels = torch.randn(8 * 256, 3 * 16**2 * 2)
    with torch.no_grad(), Peak() as peak:
        encoder(pixels.clone(), grid_thw=grid)
    found = encoder_of_config(config.to_dict(), 64)
    assert found is not None
    assert peak.most <= 8 * 64 * found.passing <= 1.4 * peak.most  # 64 tokens an image


def config(**fields: Any) -> SFT:
    data = Data(sources="rows.jsonl")
    return SFT(model="base", data=data, micro_train_tokens=4096, micro_train_batch_size=1, **fields)


@pytest.mark.parametrize("stage", [0, 3])
def test_memory_grows_by_the_encoder(stage: int) -> None:
    tokens = 4096
    before = training_phases(config(), SMALL_MODEL, stage, H200.memory)
    after = training_phases(config(), SEES, stage, H200.memory)
    grown = {phase: after[phase] - held for phase, held in before.items()}
    whole = 2 * ENCODER.parameters  # not sharded
    step = whole + tokens * ENCODER.features
    assert grown == pytest.approx({**dict.fromkeys(before, whole), "step": step})
    host = training_by_phase(config(), SEES, stage, H200)["load"].host
    assert host > training_by_phase(config(), SMALL_MODEL, stage, H200)["load"].host


def test_an_encoder_larger_than_the_language_model_decides_the_peak() -> None:
    large = SMALL_MODEL._replace(encoder=ENCODER._replace(passing=1e9))
    before = training_phases(config(), SMALL_MODEL, 0, H200.memory)
    after = training_phases(config(), large, 0, H200.memory)
    assert after["step"] > 4096 * 1e9
    assert after["save"] - before["save"] == pytest.approx(2 * ENCODER.parameters)
    assert image_bytes(large, 0).passing == 0 and image_bytes(SMALL_MODEL, 4096) == (0, 0, 0)
    assert engine_needs(SEES, 2) - engine_needs(SMALL_MODEL, 2) == pytest.approx(ENCODER.parameters)


@pytest.mark.parametrize("sleeps", [True, False])
def test_engines_that_sleep_keep_what_no_sync_sends(sleeps: bool) -> None:
    grpo = PPO(
        actor="base",
        reward={"function": "reward.py:right"},
        prompts=Data(sources="asks.jsonl"),
        advantage_estimator="grpo",
        n_samples_per_prompt=4,
        init_kl_coef=0,
        zero_stage=0,
        colocate_all=True,
        actor_ranks=Ranks(gpus=1),
        engine=EngineConfig(gpus=1.0, sleep=sleeps),
    )
    layout = arrange(grpo.placed, grpo.together)

    def held(size: Any) -> float:
        return by_phase(grpo, layout, {"actor": size}, H200)["train"].host

    whole = 2 * (SMALL_MODEL.parameters + ENCODER.parameters)
    assert held(SEES) - held(SMALL_MODEL) == pytest.approx(whole if sleeps else 0)


def test_seconds_are_those_of_its_operations() -> None:
    grpo = PPO(
        actor="base",
        reward={"function": "reward.py:right"},
        prompts=Data(sources="asks.jsonl"),
        advantage_estimator="grpo",
        n_samples_per_prompt=4,
        rollout_batch_size=32,
        train_batch_size=128,
        prompt_max_len=512,
        micro_train_batch_size=1,
        micro_train_tokens=8192,
        zero_stage=0,
        init_kl_coef=0,
    )
    layout = arrange(grpo.placed, grpo.together)

    def seconds(size: Any) -> Mapping[str, float]:
        return phases(grpo, layout, {"actor": size}, H200)

    before, after = seconds(SMALL_MODEL), seconds(SEES)
    images = ENCODER.operations * 512 * 128 / H200.flops  # of all answers' prompts
    assert after["train"] - before["train"] == pytest.approx(images / TYPICAL.scoring)
    assert after["generate"] - before["generate"] == pytest.approx(images / 4)  # each prompt once
    assert after["sync"] == before["sync"]  # it is frozen


ROWS = {
    "part.jsonl": (json.dumps(asked([{"type": "image", "image": "a.png"}])), True),
    "column.json": (json.dumps([{"prompt": "a", "images": ["a.png"]}]), True),
    "text.jsonl": (json.dumps(asked("an image of a <image>")), False),
    "empty.jsonl": ("", False),
    "header.csv": ("prompt,image\nWhat?,a.png\n", True),
    "text.csv": ('prompt,"answer"\nWhat?,image\n', False),
}


@pytest.mark.parametrize("name", ROWS)
def test_files_that_may_hold_images(name: str, tmp_path: Path) -> None:
    content, has_images = ROWS[name]
    (tmp_path / name).write_text(content)
    stage = SFT(model="base", data=Data(sources=str(tmp_path / name)))
    assert may_hold_images(str(tmp_path / name)) is encodes_images(stage) is has_images
    assert seen_size(stage, SEES) == (SEES if has_images else SMALL_MODEL)
    assert seen_size(stage, SMALL_MODEL) is SMALL_MODEL


def test_fields_across_blocks_and_in_parquet(tmp_path: Path) -> None:
    place = tmp_path / "late.jsonl"
    place.write_text(" " * ((1 << 20) - 3) + '"images"')
    assert may_hold_images(str(place)) and not may_hold_images(str(place), limit=1 << 20)
    for name, column in (("a", [{"bytes": b"x", "path": "x"}]), ("b", ["x"])):
        pq.write_table(pa.table({"image" if name == "a" else "prompt": column}), tmp_path / f"{name}.parquet")
    assert may_hold_images(str(tmp_path / "a.parquet")) and not may_hold_images(str(tmp_path / "b.parquet"))
    assert may_hold_images(str(tmp_path / "gone.jsonl"))  # it may


def test_stages_that_refuse_images_have_no_encoder(tmp_path: Path) -> None:
    rows = Data(sources=str(write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "image": "a.png"}])))

    def stage(**fields: Any) -> PPO:
        return PPO(actor="base", prompts=rows, reward=["rm"], **fields)

    sizes = dict.fromkeys(("actor", "judge 0"), SEES)
    samples = stage(engine=EngineConfig(kind="transformers"))
    assert seen_sizes(samples, sizes) == {"actor": SEES, "judge 0": SMALL_MODEL}
    pair = Ranks(num_ranks_per_node=2)
    grpo = {"advantage_estimator": "grpo", "n_samples_per_prompt": 2, "actor_ranks": pair}
    split = stage(engine=EngineConfig(kind="transformers"), sequence_parallel_size=2, **grpo)
    assert set(seen_sizes(split, sizes).values()) == {SMALL_MODEL}


def test_images_that_no_file_of_the_stage_has(tmp_path: Path) -> None:
    """Those of an environment, and of the pairs and answers that another stage makes."""
    rows = Data(sources=str(write_rows(tmp_path / "rows.jsonl", [asked("no image")])))

    def talks(images: bool) -> PPO:
        grpo = {"advantage_estimator": "grpo", "n_samples_per_prompt": 2}
        environment = {"path": "guess", "images": images}
        return PPO(
            actor="base", prompts=rows, environment=environment, engine={"kind": "transformers"}, **grpo
        )

    assert encodes_images(talks(True)) and not encodes_images(talks(False))
    assert seen_sizes(talks(True), {"actor": SEES}) == {"actor": SEES}
    assert encodes_images(DPO(policy="base", pairs="asked")) and encodes_images(
        KTO(policy="base", answers="asked")
    )
    # rows of answers alone keep no images
    assert not encodes_images(SFT(model="base", answers="asked"))
    assert not encodes_images(DPO(policy="base", data=rows))


def test_the_command_names_the_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_pictured("qwen3_vl", tmp_path / "base")
    write_rows(tmp_path / "text.jsonl", [asked("Hi")])
    write_rows(tmp_path / "images.jsonl", [asked([{"type": "image", "image": "a.png"}])])
    stages = {name: {"stage": "sft", "data": {"sources": f"{name}.jsonl"}} for name in ("text", "images")}
    recipe = {"name": "tried", "base_model": "base", "stages": stages}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["plan", str(tmp_path / "recipe.yaml")]) == 0
    printed = capsys.readouterr().out
    assert printed.count("with the image encoder of 0.00 billion weights, frozen") == 1
    below = printed.split("images: ")[1].split("\n")[1]
    assert "with the image encoder" in below


def bytes_kept(depth: int, width: int = 256) -> float:
    """The bytes that an encoder of Qwen3-VL keeps per patch for its backward pass, without its weights."""
    config = Qwen3VLConfig(
        vision_config={
            **{"depth": depth, "hidden_size": width, "intermediate_size": 4 * width, "num_heads": 4},
            **{"out_hidden_size": 128, "num_position_embeddings": 256, "deepstack_visual_indexes": []},
        }
    ).vision_config
    config._attn_implementation = "sdpa"
    model = Qwen3VLVisionModel(config).to(torch.bfloat16)
    weights = {weight.untyped_storage()._cdata for weight in model.parameters()}
    held: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            held[storage._cdata] = storage
        return tensor

    side = 16
    values = 3 * config.temporal_patch_size * config.patch_size**2
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.ones(side**2, values, dtype=torch.bfloat16), grid_thw=torch.tensor([[1, side, side]]))
    return sum(storage.nbytes() for storage in held.values()) / side**2


def test_a_trained_encoder_keeps_what_qwen3_vl_keeps() -> None:
    vision = {"model_type": "qwen3_vl", "depth": 2, "hidden_size": 256, "intermediate_size": 1024}
    vision |= {"patch_size": 16, "spatial_merge_size": 2, "out_hidden_size": 128}
    encoder = encoder_of_config({"vision_config": vision}, 128)
    assert encoder is not None
    assert encoder.kept / 4 == pytest.approx(bytes_kept(3) - bytes_kept(1), rel=0.05)  # 4 patches a token
    assert encoder.inputs / 4 == 2 * 2 * 256


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_a_trained_encoder_takes_gradients_state_and_activations(zero_stage: int) -> None:
    ranks = Ranks(num_ranks_per_node=4, gpus=1) if zero_stage else Ranks(gpus=1)

    def step(**fields: Any) -> float:
        config = SFT(
            data=Data(sources="x.jsonl"),
            ranks=ranks,
            zero_stage=zero_stage,
            micro_train_tokens=8192,
            **fields,
        )
        found = training_phases(config, SEES._replace(encoder=trainable), zero_stage, H200.memory)
        return found["step"]

    trainable = ENCODER._replace(projector=2e7, kept=4e5, inputs=2e4)
    frozen, projector, trained = (step(image_encoder=part) for part in ("frozen", "projector", "trained"))
    assert projector - frozen >= 12 * 2e7 / ranks.world_size
    assert trained - frozen >= 12 * 4e8 / ranks.world_size
    assert trained > projector > frozen
    assert step(image_encoder="trained", gradient_checkpointing=True) < trained
