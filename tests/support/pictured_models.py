"""Small random models that read images, of real families (seed 0), with a tokenizer of bytes and a processor."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from PIL import Image

from rlhf_core.hub.model_config import FLAT
from rlhf_core.models.multimodal.picture_tower import THREE_AXES
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.families import DELTA, GEMMA4, SHAPE, SHARED_EXPERT

COLOURS = {"red": (220, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 220)}
PARTS = (
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
)
QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    + PARTS.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA_TEMPLATE = (
    "{% for message in messages %}<start_of_turn>{{ message.role }}\n"
    + PARTS.replace("IMAGE", "<start_of_image>")
    + "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
)
GEMMA4_TEMPLATE = (
    "{% for message in messages %}<|turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    + PARTS.replace("IMAGE", "<|image|>")
    + "<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
MISTRAL_TEMPLATE = (
    "<s>{% for message in messages %}{% if message.role == 'assistant' %}{{ message.content }}</s>"
    "{% else %}[INST]" + PARTS.replace("IMAGE", "[IMG]") + "[/INST]{% endif %}{% endfor %}"
)
QWEN_TOKENS = (
    *("<pad>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
GEMMA_TOKENS = (
    *("<pad>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
)
GEMMA4_TOKENS = (
    *(
        "<pad>",
        "<turn|>",
        "<bos>",
        "<|turn>",
        "<|image>",
        "<image|>",
        "<|image|>",
    ),  # pad is 0, as in releases
    *("<|audio>", "<audio|>", "<|audio|>", "<|video|>"),
)
MISTRAL_TOKENS = (*("<pad>", "</s>", "<s>", "[INST]", "[/INST]"), *("[IMG]", "[IMG_BREAK]", "[IMG_END]"))
HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}

QWEN_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "size": {"shortest_edge": 64, "longest_edge": 1024},
    **{"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, **HALVES},
}


class PicturedFamily(NamedTuple):
    """What a family's folder has beside its weights. `tokens`: control tokens, the second ends a text.
    `named`: the tokenizer's names for some. `processor`, `whole_processor`: the contents of
    preprocessor_config.json and processor_config.json, which may hold the former. `make`: the model, from the language model's config and
    the numbers of the tokens."""

    tokens: tuple[str, ...]
    template: str
    processor: dict[str, Any]
    make: Callable[[dict[str, Any], dict[str, int]], Any]
    named: dict[str, Any] = {}  # noqa: RUF012
    whole_processor: dict[str, Any] = {}  # noqa: RUF012


def make_pictured(family: str, folder: Path, **larger: Any) -> Path:
    """Saves a model of the family to `folder`. `larger`: sizes in place of the small ones of its language
    part."""
    about = PICTURED[family]
    number = {token: index for index, token in enumerate(about.tokens)}
    tokenizer = byte_tokenizer(about.tokens, pad_token="<pad>", eos_token=about.tokens[1], **about.named)
    tokenizer.chat_template = about.template
    ids = {"pad_token_id": number["<pad>"], "eos_token_id": 1, "bos_token_id": None}
    text = {"vocab_size": len(tokenizer), "initializer_range": 0.2, **SHAPE, **ids}
    text |= {"max_position_embeddings": 512, **larger}
    torch.manual_seed(0)
    about.make(text, number).save_pretrained(folder)
    if family in FLAT:
        write_as_released(folder / "config.json")
    tokenizer.save_pretrained(folder)
    if about.processor:
        (folder / "preprocessor_config.json").write_text(json.dumps(about.processor))
    if about.whole_processor:
        (folder / "processor_config.json").write_text(json.dumps(about.whole_processor))
    return folder


def write_as_released(file: Path) -> None:
    """Changes config.json to the form of the releases of Qwen2-VL and Qwen2.5-VL."""
    config = json.loads(file.read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    del text["model_type"], text["layer_types"]
    theirs = {"rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    theirs |= {"rope_theta": rope["rope_theta"]}
    config["vision_config"]["model_type"] = config["model_type"]
    file.write_text(json.dumps({**text, **config, **theirs}, indent=2))


def _qwen(text: dict[str, Any], number: dict[str, int]) -> Any:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [8, 4, 4]}
    vision = dict(
        depth=2,
        hidden_size=32,
        intermediate_size=32,
        num_heads=2,
        out_hidden_size=text["hidden_size"],
        num_position_embeddings=16,
        patch_size=4,
        deepstack_visual_indexes=[0],
        initializer_range=0.2,
    )
    config = transformers.Qwen3VLConfig(
        text_config=text | {"rope_parameters": rope, "tie_word_embeddings": False},
        vision_config=vision,
        image_token_id=number["<|image_pad|>"],
        video_token_id=number["<|video_pad|>"],
        vision_start_token_id=number["<|vision_start|>"],
        vision_end_token_id=number["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


def _qwen_windows(text: dict[str, Any], number: dict[str, int]) -> Any:
    """Qwen2.5-VL: an encoder layer with windows of two by two tokens, and one without."""
    vision = dict(
        **{"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2},
        **{"out_hidden_size": text["hidden_size"], "patch_size": 4, "spatial_merge_size": 2},
        **{"window_size": 16, "fullatt_block_indexes": [1], "initializer_range": 0.2},
    )
    return _qwen_2(transformers.Qwen2_5_VLConfig, text, number, vision)


def _qwen_early(text: dict[str, Any], number: dict[str, int]) -> Any:
    """Qwen2-VL."""
    vision = dict(
        **{"depth": 2, "embed_dim": 32, "mlp_ratio": 1, "num_heads": 2, "hidden_size": text["hidden_size"]},
        **{"patch_size": 4, "spatial_merge_size": 2, "initializer_range": 0.2},
    )
    return _qwen_2(transformers.Qwen2VLConfig, text, number, vision)


def _qwen_2(kind: Any, text: dict[str, Any], number: dict[str, int], vision: dict[str, Any]) -> Any:
    tied = text.pop("tie_word_embeddings", False)
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [8, 4, 4]}
    config = kind(
        text_config=text | {"rope_parameters": rope},
        vision_config=vision,
        image_token_id=number["<|image_pad|>"],
        video_token_id=number["<|video_pad|>"],
        vision_start_token_id=number["<|vision_start|>"],
        vision_end_token_id=number["<|vision_end|>"],
        tie_word_embeddings=tied,
    )
    whole = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind]
    return whole(config)


def _qwen_states(text: dict[str, Any], number: dict[str, int], kind: str = "Qwen3_5", **more: Any) -> Any:
    """Qwen3.5: a layer with a state and one with attention."""
    rope = {
        **{"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        **{"mrope_section": [4, 2, 2], "mrope_interleaved": True},
    }
    vision = dict(
        depth=2,
        hidden_size=32,
        intermediate_size=32,
        num_heads=2,
        out_hidden_size=text["hidden_size"],
        num_position_embeddings=16,
        patch_size=4,
        initializer_range=0.2,
    )
    config = getattr(transformers, f"{kind}Config")(
        text_config=text | DELTA | more | {"rope_parameters": rope, "tie_word_embeddings": False},
        vision_config=vision,
        image_token_id=number["<|image_pad|>"],
        video_token_id=number["<|video_pad|>"],
        vision_start_token_id=number["<|vision_start|>"],
        vision_end_token_id=number["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


def _qwen_experts(text: dict[str, Any], number: dict[str, int]) -> Any:
    return _qwen_states(text, number, "Qwen3_5Moe", **SHARED_EXPERT)


def _gemma(text: dict[str, Any], number: dict[str, int]) -> Any:
    window = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
    vision = dict(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28
    )
    config = transformers.Gemma3Config(
        text_config=text | window,
        vision_config=vision | {"patch_size": 14},
        mm_tokens_per_image=4,
        boi_token_index=number["<start_of_image>"],
        eoi_token_index=number["<end_of_image>"],
        image_token_index=number["<image_soft_token>"],
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.2)
    return model


def _gemma4(text: dict[str, Any], number: dict[str, int]) -> Any:
    """With images that are seen in both directions, as in the large releases, and embeddings for each layer, as
    in the small ones."""
    vision = dict(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        patch_size=4,
        position_embedding_size=256,
        initializer_range=0.2,
    )
    text = {**GEMMA4, "use_bidirectional_attention": "vision", "num_kv_shared_layers": 0} | text
    text |= {"vocab_size_per_layer_input": text["vocab_size"], "num_hidden_layers": len(text["layer_types"])}
    config = transformers.Gemma4Config(
        text_config=text,
        vision_config=vision,
        boi_token_id=number["<|image>"],
        eoi_token_id=number["<image|>"],
        image_token_id=number["<|image|>"],
        boa_token_id=number["<|audio>"],
        eoa_token_index=number["<audio|>"],
        audio_token_id=number["<|audio|>"],
        video_token_id=number["<|video|>"],
    )
    return transformers.Gemma4ForConditionalGeneration(config)


def _mistral(text: dict[str, Any], number: dict[str, int]) -> Any:
    vision = dict(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=16,
        image_size=64,
        patch_size=4,
        initializer_range=0.2,
    )
    config = transformers.Mistral3Config(
        text_config={"model_type": "ministral3", **text, "tie_word_embeddings": False},
        vision_config=vision | {"model_type": "pixtral"},
        image_token_index=number["[IMG]"],
        tie_word_embeddings=False,
    )
    return transformers.Mistral3ForConditionalGeneration(config)


PICTURED = {
    "gemma3": PicturedFamily(
        GEMMA_TOKENS,
        GEMMA_TEMPLATE,
        {
            "image_processor_type": "Gemma3ImageProcessorFast",
            "processor_class": "Gemma3Processor",
            "size": {"height": 28, "width": 28},
            **HALVES,
        },
        _gemma,
        {
            "extra_special_tokens": {
                "boi_token": "<start_of_image>",
                "eoi_token": "<end_of_image>",
                "image_token": "<image_soft_token>",
            }
        },
        {"processor_class": "Gemma3Processor", "image_seq_length": 4},
    ),
    "gemma4": PicturedFamily(
        GEMMA4_TOKENS,
        GEMMA4_TEMPLATE,
        {},
        _gemma4,
        {
            "extra_special_tokens": {
                **{"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"},
                **{"boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>"},
            }
        },
        {
            "processor_class": "Gemma4Processor",
            "image_seq_length": 70,
            "image_processor": {
                "image_processor_type": "Gemma4ImageProcessor",
                **{"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70},
            },
        },
    ),
    "mistral3": PicturedFamily(
        MISTRAL_TOKENS,
        MISTRAL_TEMPLATE,
        {
            "image_processor_type": "PixtralImageProcessorFast",
            "processor_class": "PixtralProcessor",
            "size": {"longest_edge": 40},
            "patch_size": 4,
        },
        _mistral,
        {},
        {
            "processor_class": "PixtralProcessor",
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
            "patch_size": 4,
            "spatial_merge_size": 2,
        },
    ),
    "qwen2_5_vl": PicturedFamily(
        QWEN_TOKENS, QWEN_TEMPLATE, QWEN_PROCESSOR | {"processor_class": "Qwen2_5_VLProcessor"}, _qwen_windows
    ),
    "qwen2_vl": PicturedFamily(
        QWEN_TOKENS, QWEN_TEMPLATE, QWEN_PROCESSOR | {"processor_class": "Qwen2VLProcessor"}, _qwen_early
    ),
    "qwen3_5": PicturedFamily(QWEN_TOKENS, QWEN_TEMPLATE, QWEN_PROCESSOR, _qwen_states),
    "qwen3_5_moe": PicturedFamily(QWEN_TOKENS, QWEN_TEMPLATE, QWEN_PROCESSOR, _qwen_experts),
    "qwen3_vl": PicturedFamily(QWEN_TOKENS, QWEN_TEMPLATE, QWEN_PROCESSOR, _qwen),
}
FAMILIES = tuple(PICTURED)
LANGUAGE = ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")  # without a prefix for it
# the argument of transformers' whole model that marks image tokens
IMAGE_TYPES = {"gemma3": "token_type_ids", **dict.fromkeys(("gemma4", *THREE_AXES), "mm_token_type_ids")}
# Families with masks and with positions of their own, which go through every stage; the others in long tests.
STAGED = [
    family if family in ("gemma3", "qwen3_vl") else pytest.param(family, marks=pytest.mark.long)
    for family in FAMILIES
]


def is_language_weight(name: str) -> bool:
    """Whether the weight of a checkpoint belongs to its language model or the head."""
    return "language_model" in name or name.startswith(LANGUAGE)


def square(colour: str, width: int = 16, height: int = 16, kind: str = "PNG") -> bytes:
    """An image of one colour, encoded."""
    content = io.BytesIO()
    Image.new("RGB", (width, height), COLOURS[colour]).save(content, kind)
    return content.getvalue()


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def asked(content: Any, answer: str = "yes") -> dict[str, Any]:
    """A row with a message of the user and an answer."""
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}
