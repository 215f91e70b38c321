"""Pairs of answers about the colour of a square, which only the image decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel

from rlhf_core.config import Data
from rlhf_core.data.documents import Document
from rlhf_core.objectives.picture_reader import PictureReader
from tests.support.pictured_models import IMAGE_TYPES, square, write_rows

PAIR = ("red", "green")


def colour_row(colour: str, file: str) -> dict[str, Any]:
    """The answer of the square's colour is preferred to the other's."""
    content = [{"type": "image", "image": file}, {"type": "text", "text": "Colour?"}]
    other = PAIR[1 - PAIR.index(colour)]
    return {"prompt": [{"role": "user", "content": content}], "chosen": colour, "rejected": other}


def colour_pairs(folder: Path, count: int, name: str = "pairs.jsonl", texts: bool = False) -> Data:
    """Squares of two colours in turn, and of some sizes. `texts`: every fourth row has no image."""
    rows = []
    for number in range(count):
        colour = PAIR[number % 2]
        file = f"{name}-{number}.png"
        (folder / file).write_bytes(square(colour, 16 + number % 5, 16))
        if texts and number % 4 == 3:
            rows.append({"prompt": "Say hi.", "chosen": "hi", "rejected": "no"})
        else:
            rows.append(colour_row(colour, file))
    return Data(sources=str(write_rows(folder / name, rows)))


def whole_inputs(
    whole: PreTrainedModel, reader: PictureReader, document: Document
) -> dict[str, torch.Tensor]:
    """The inputs of a multimodal model, as its own processor makes them."""
    tokens = torch.tensor(list(document.tokens))[None]
    inputs = {"input_ids": tokens}
    if whole.config.model_type in IMAGE_TYPES:
        inputs[IMAGE_TYPES[whole.config.model_type]] = (tokens == reader.token_id).int()
    sent = [reader.tensors(picture.source) for picture in document.pictures]
    for name in sent[0] if sent else ():
        inputs[name] = torch.cat([torch.from_numpy(part[name].copy()) for part in sent])
    if "image_sizes" in inputs:
        inputs["pixel_values"] = padded(inputs["pixel_values"], inputs["image_sizes"].tolist())
    return inputs


def padded(pixels: torch.Tensor, sizes: list[list[int]]) -> torch.Tensor:
    """Images, (N, 3, largest height, largest width), from the pixels of all in one dimension."""
    highest, widest = (max(side) for side in zip(*sizes, strict=True))
    made = torch.zeros(len(sizes), 3, highest, widest)
    parts = pixels.split([3 * height * width for height, width in sizes])
    for number, (part, (height, width)) in enumerate(zip(parts, sizes, strict=True)):
        made[number, :, :height, :width] = part.view(3, height, width)
    return made


@torch.no_grad()
def whole_outputs(
    folder: Path, reader: PictureReader, document: Document
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last hidden states (T, H) and the log-probs of all tokens after the first, (T - 1,), that the whole
    model of transformers computes from the inputs of the model's own processor."""
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = whole_inputs(whole, reader, document)
    tokens = inputs["input_ids"]
    found = whole(output_hidden_states=True, **inputs)
    logprobs = found.logits.float().log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
    return found.hidden_states[-1][0], logprobs
