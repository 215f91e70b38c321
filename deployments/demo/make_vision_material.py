"""Creates the material of the recipe tiny-vision-cpu:
`python deployments/demo/make_vision_material.py --out DIR [--seed 0]`.

    base/             a random Qwen3-VL of about 900,000 parameters, its tokenizer, chat template, processor
    images/           PNG files: coloured squares in some of the four quarters
    sft.jsonl         messages with one image; half of the answers are right, the others are drawn at random
    prompts.jsonl     prompt, image, answer, category: for GRPO
    heldout.jsonl     the same, for the evaluation: no image of it occurs in another file

Two kinds of questions have one right answer each, which the image alone decides: the colour of a quarter, and
the number of squares. A model that does not see the image answers a quarter of them. The same seed gives the
same bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

COLOURS = {"red": (220, 30, 30), "green": (30, 180, 60), "blue": (40, 70, 220), "yellow": (225, 210, 40)}
QUARTERS = {"top left": (0, 0), "top right": (1, 0), "bottom left": (0, 1), "bottom right": (1, 1)}
NUMBERS = ("one", "two", "three", "four")
SIZE = 16  # pixels of a side: a quarter is one image token
MARKER = "manifest.json"
SHADES = 25  # by which colours differ, of 255
RIGHT = 0.5  # share of right answers in sft.jsonl
SIZES = {"heldout": 256, "sft": 8000, "prompts": 2000}  # rows
IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *IMAGE_TOKENS)
VIDEO = "<|video_pad|>"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n"
    "{%- if message.content is string -%}{{ message.content }}{%- else -%}"
    "{%- for part in message.content -%}{%- if part.type == 'image' -%}"
    "<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}{%- endfor -%}"
    "{%- endif -%}<|im_end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)


Squares = tuple[tuple[str, str], ...]  # colours by quarter


class Exercise(NamedTuple):
    """A question about an image, its right answer, and all answers to such questions."""

    squares: Squares
    question: str
    answer: str
    choices: tuple[str, ...]


def held_out_squares(seed: int) -> set[Squares]:
    """Returns a quarter of all images with one square, and of those with two, three and four."""
    cells = [("", *COLOURS)] * len(QUARTERS)
    whole = [
        tuple((quarter, colour) for quarter, colour in zip(QUARTERS, colours, strict=True) if colour)
        for colours in itertools.product(*cells)
    ]
    chosen: set[Squares] = set()
    for count in range(1, 1 + len(QUARTERS)):
        images = [squares for squares in whole if len(squares) == count]
        chosen.update(random.Random(f"{seed}/{count}").sample(images, len(images) // 4))
    return chosen


def draw(dice: random.Random, held_out: set[Squares], wanted: bool) -> Exercise:
    """Returns a random exercise about an image that is held out, if `wanted`, or not. Both kinds of questions
    are equally frequent; the answers to each nearly so."""
    counts = dice.random() < 0.5
    number = dice.randint(1, 4) if counts else dice.randint(2, 4)
    while True:
        taken = set(dice.sample(list(QUARTERS), number))
        squares = tuple((quarter, dice.choice(list(COLOURS))) for quarter in QUARTERS if quarter in taken)
        if (squares in held_out) == wanted:
            break
    if counts:
        return Exercise(squares, "How many squares?", NUMBERS[number - 1], NUMBERS)
    asked, colour = dice.choice(squares)
    return Exercise(squares, f"Which colour is {asked}?", colour, tuple(COLOURS))


def paint(squares: Squares, dice: random.Random) -> Image.Image:
    """Returns the image of the squares on a white ground, each a little darker or lighter than others."""
    half = SIZE // 2
    image = Image.new("RGB", (SIZE, SIZE), (255, 255, 255))
    for quarter, colour in squares:
        column, row = QUARTERS[quarter]
        place = (column * half + 1, row * half + 1, (column + 1) * half - 1, (row + 1) * half - 1)
        red, green, blue = (part + dice.randint(-SHADES, SHADES) for part in COLOURS[colour])
        image.paste((red, green, blue), place)
    return image


def row_of(name: str, image: str, exercise: Exercise, dice: random.Random) -> dict[str, Any]:
    """Returns a row of a file."""
    if name != "sft":
        category = "count" if exercise.choices == NUMBERS else "colour"
        asked = {"prompt": exercise.question, "image": image}
        return {**asked, "answer": exercise.answer, "category": category}
    answer = exercise.answer if dice.random() < RIGHT else dice.choice(exercise.choices)
    parts = [{"type": "image", "image": image}, {"type": "text", "text": exercise.question}]
    return {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]}


def write_base(folder: Path, seed: int) -> None:
    """Writes the random base model with its tokenizer and processor."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed warns that it finds no GPU
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*TOKENS, VIDEO],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    words = [*COLOURS, *NUMBERS, *QUARTERS, "How many squares?", "Which colour is", "user", "assistant"]
    bpe.train_from_iterator(words * 2, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=TOKENS[0],
        eos_token=TOKENS[2],
        additional_special_tokens=[TOKENS[1], *TOKENS[3:], VIDEO],
        chat_template=CHAT_TEMPLATE,
        model_max_length=256,
    )
    number = {token: int(tokenizer.convert_tokens_to_ids(token)) for token in (*TOKENS, VIDEO)}
    ids = {"pad_token_id": number[TOKENS[0]], "eos_token_id": number[TOKENS[2]], "bos_token_id": None}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [8, 4, 4]},
        "tie_word_embeddings": False,
        "initializer_range": 0.05,
        **ids,
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": 128,
        "num_position_embeddings": 16,
        "patch_size": 4,
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.1,
    }
    torch.manual_seed(seed)
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=number["<|image_pad|>"],
        video_token_id=number[VIDEO],
        vision_start_token_id=number["<|vision_start|>"],
        vision_end_token_id=number["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": 64, "longest_edge": 1024},
        "patch_size": 4,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")


def make(out: Path, seed: int = 0) -> bool:
    """Creates the material in `out`, which appears complete or not at all. Returns False if it is there.
    Raises ValueError if something else is."""
    marker = out / MARKER
    if marker.is_file() and json.loads(marker.read_text()) == {"seed": seed}:
        return False
    if out.exists():
        raise ValueError(
            f"{out} exists and is not this material with seed {seed}: remove it, or name another"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
        made = Path(temporary) / "new"
        (made / "images").mkdir(parents=True)
        held_out = held_out_squares(seed)
        for name, size in SIZES.items():
            dice = random.Random(f"{seed}/{name}")
            rows = []
            for number in range(size):
                exercise = draw(dice, held_out, name == "heldout")
                image = f"images/{name}-{number:04d}.png"
                paint(exercise.squares, dice).save(made / image)
                rows.append(row_of(name, image, exercise, dice))
            (made / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        write_base(made / "base", seed)
        (made / MARKER).write_text(json.dumps({"seed": seed}))
        os.rename(made, out)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the base model and data of the demo with images.")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        made = make(arguments.out, arguments.seed)
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    print(f"{arguments.out}: {'made' if made else 'already there'}")


if __name__ == "__main__":
    main()
