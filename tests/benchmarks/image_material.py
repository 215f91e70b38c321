"""A model of Qwen3-VL-2B-Instruct's shape with random weights (seed 0), its processor, a tokenizer of one
token a letter, and rows with drawn images, for `images.py`.

The sizes are those of the release's config.json and preprocessor_config.json.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *(f"<|object_ref_{part}|>" for part in ("start", "end")),
    *(f"<|box_{part}|>" for part in ("start", "end")),
    *(f"<|quad_{part}|>" for part in ("start", "end")),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PATCH = 16  # pixels of a patch's side; 2 x 2 patches are one token
SIDES = ((448, 448), (512, 384), (480, 320), (576, 448), (640, 480))  # 196, 192, 150, 252 and 300 tokens
QUESTION = 40  # letters
ANSWERS = (128, 256)  # letters of the shortest and of the longest answer
FRAME = 23  # tokens of the template around a question and an answer: role names are letters
TEXT = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
VISION = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "deepstack_visual_indexes": [5, 11, 17],
}
TINY_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
TINY_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "deepstack_visual_indexes": [0],
}
WORDS = (151643, 300)  # tokens before the special ones: of the release, and of the tiny model
VOCABULARY = (151936, 320)


class ImageRow(NamedTuple):
    """A question about one image. `tokens`: of the whole conversation, with the image's."""

    image: str
    question: str
    answer: str
    tokens: int


def write_model(folder: Path, tiny: bool) -> int:
    """Writes checkpoint, tokenizer and processors. Returns the number of parameters."""
    number = {token: WORDS[tiny] + index for index, token in enumerate(SPECIAL)}
    text = (TINY_TEXT if tiny else TEXT) | {
        "vocab_size": VOCABULARY[tiny],
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5_000_000.0,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "pad_token_id": number["<|endoftext|>"],
        "eos_token_id": number["<|im_end|>"],
    }
    vision = (TINY_VISION if tiny else VISION) | {
        "out_hidden_size": text["hidden_size"],
        "patch_size": PATCH,
        "num_position_embeddings": 2304,
    }
    config = transformers.Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=number["<|image_pad|>"],
        video_token_id=number["<|video_pad|>"],
        vision_start_token_id=number["<|vision_start|>"],
        vision_end_token_id=number["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if tiny else torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.Qwen3VLForConditionalGeneration(config)
    torch.set_default_dtype(default)
    model.generation_config.eos_token_id = number["<|im_end|>"]
    model.generation_config.pad_token_id = number["<|endoftext|>"]
    model.save_pretrained(folder)
    _tokenizer(tiny).save_pretrained(folder)
    processor = {
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        **{"patch_size": PATCH, "temporal_patch_size": 2, "merge_size": 2},
        **{"image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        "processor_class": "Qwen3VLProcessor",
    }
    kinds = {
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessorFast"},
        "video_preprocessor_config.json": {"video_processor_type": "Qwen3VLVideoProcessor"},
    }
    for file, kind in kinds.items():
        (folder / file).write_text(json.dumps(processor | kind))
    return int(model.num_parameters())


def _tokenizer(tiny: bool) -> transformers.PreTrainedTokenizerFast:
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    words += [f"w{index}" for index in range(len(words), WORDS[tiny])]
    vocabulary = {token: index for index, token in enumerate([*words, *SPECIAL])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=list(SPECIAL[1:2] + SPECIAL[3:]),
        chat_template=TEMPLATE,
    )


def draw_rows(folder: Path, count: int) -> list[ImageRow]:
    """Draws a JPEG for each row into `folder`: a coarse pattern with noise, so that decoding takes as long as
    for a photo. Sizes are equally frequent. Images that exist are kept."""
    folder.mkdir(exist_ok=True)
    dice = random.Random(0)
    rows = []
    for index in range(count):
        width, height = SIDES[index % len(SIDES)]
        name = f"{folder.name}/{index:05d}.jpg"
        if not (folder.parent / name).exists():
            _draw(folder.parent / name, width, height, np.random.default_rng(index))
        answer = _letters(dice, dice.randint(*ANSWERS))
        tokens = FRAME + width * height // (2 * PATCH) ** 2 + QUESTION + len(answer)
        rows.append(ImageRow(name, _letters(dice, QUESTION), answer, tokens))
    return rows


def _draw(file: Path, width: int, height: int, noise: np.random.Generator) -> None:
    coarse = noise.integers(0, 256, (height // 32, width // 32, 3), dtype=np.uint8)
    pixels = np.asarray(Image.fromarray(coarse).resize((width, height)), dtype=np.int16)
    pixels = pixels + noise.integers(-12, 13, pixels.shape, dtype=np.int16)
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, quality=90)


def _letters(dice: random.Random, length: int) -> str:
    return "".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=length))


def question_of(row: ImageRow) -> list[dict[str, Any]]:
    """The messages of a prompt."""
    parts = [{"type": "image", "image": row.image}, {"type": "text", "text": row.question}]
    return [{"role": "user", "content": parts}]
