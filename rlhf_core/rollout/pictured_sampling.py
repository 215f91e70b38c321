"""Samples answers to prompts with images, using the language model and the frozen image encoder.

A prompt is processed once for all of its answers, which start from copies of its keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import torch
from torch import Tensor
from transformers import DynamicCache

from rlhf_core.data.documents import Document
from rlhf_core.models.policy import Policy
from rlhf_core.objectives.collate import collate
from rlhf_core.objectives.picture_reader import PictureReader
from rlhf_core.rollout.engine_contract import Request

Draw = Callable[[Tensor, Tensor], Tensor]


@torch.no_grad()
def sample_pictured(
    policy: Policy, reader: PictureReader, requests: Sequence[Request], draw: Draw, ended: Draw
) -> None:
    """Samples until all answers have ended. The R prompts have the same length, and each has images.

    `draw` gets tokens (R, T) and logits (R, V), and returns logits in which the drawn token has the largest.
    `ended` gets the same after a draw, and returns whether each answer has ended, (R,).
    """
    model = policy.model
    places: dict[object, int] = {}  # of the prompts, each once
    rows = [places.setdefault(_identity(request), len(places)) for request in requests]
    first = [rows.index(place) for place in range(len(places))]
    cache = DynamicCache(config=model.config)
    logits, positions = _read(policy, reader, [requests[i] for i in first], cache)
    chosen = torch.tensor(rows, device=logits.device)
    cache.reorder_cache(chosen)
    logits = logits[chosen]
    positions = positions[..., chosen.cpu()].to(logits.device)
    tokens = torch.tensor([request.tokens for request in requests], device=logits.device)
    for step in count():
        drawn = draw(tokens, logits)
        tokens = drawn.argmax(-1)[:, None]
        if bool(ended(tokens, logits).all()):
            return
        found = model(
            input_ids=tokens,
            position_ids=(positions + step)[..., None],
            past_key_values=cache,
            use_cache=True,
        )
        logits = found.logits[:, -1].float()


def _read(
    policy: Policy, reader: PictureReader, prompts: Sequence[Request], cache: DynamicCache
) -> tuple[Tensor, Tensor]:
    """Reads prompts of one length into the cache. Returns the logits after them, (B, V), and the positions of
    their answers' first tokens (`SeenPictures.next_positions`)."""
    model = policy.model
    length = len(prompts[0].tokens)
    documents = [Document(prompt.tokens, [False] * length, pictures=prompt.pictures) for prompt in prompts]
    batch = collate([[document] for document in documents], pad_token_id=0, reader=reader)
    assert batch.pictures is not None and policy.tower is not None, "the prompts have images"
    device = next(model.parameters()).device
    pictures = replace(batch.pictures, places=batch.pictures.places[:, :length])
    tokens = batch.tokens[:, :length].to(device)
    positions = batch.positions[:, :length].to(device)
    seen = policy.tower.seen(tokens, positions, pictures.each(lambda tensor: tensor.to(device)))
    with seen.embedded(model, tokens.shape):
        found = model(
            input_ids=seen.tokens,
            position_ids=seen.positions_of(positions),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            **seen.options(model, tokens, positions),
        )
    return found.logits[:, -1].float(), seen.next_positions()


def _identity(request: Request) -> object:
    """Returns a key that is equal for equal prompts."""
    return tuple(request.tokens), tuple(picture.source.identity for picture in request.pictures)
