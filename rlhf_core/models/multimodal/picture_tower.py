"""Runs the image encoder of a multimodal checkpoint alongside its language model.

The encoder is not part of the trained module. Each rank holds all of it, except weights that are trained (see
`trained_encoder.py`), so passes with and without images run the same collectives. Features replace the
embeddings of their document's image tokens. Not supported: rows that several ranks compute together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gemma4 import modeling_gemma4

from rlhf_core.hub.model_config import PICTURE_FAMILIES
from rlhf_core.models.kernels.attention import mask_attention, takes_varlen
from rlhf_core.models.multimodal.wrapper import without_reports
from rlhf_core.models.weights.trained_encoder import TrainedEncoder
from rlhf_core.objectives.collate import BatchPictures

Masks = Callable[..., dict[str, Tensor | None]]
# Masks by which tokens of an image attend to each other in both directions: in all layers (Gemma 3, section
# 2), or in those with a window (Gemma 4, the larger models). Varlen kernels cannot mask so.
BOTH_WAYS: dict[str, Masks] = {
    "gemma3": modeling_gemma3.create_masks_for_vision_model,
    "gemma4": modeling_gemma4.create_masks_for_vision_model,
}
# Tokens of an image have a position per axis: time, height, width (M-RoPE; Qwen2-VL, section 2.1).
THREE_AXES = ("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl")
# Encoders that pad the images of a pass to one size and mask all their patches against each other: they get
# one image at a time.
EACH_ALONE = ("mistral3",)
# The parts between an encoder and its language model, by the beginning of their weights' names.
PROJECTORS = ("multi_modal_projector.", "embed_vision.", "visual.merger.", "visual.deepstack_merger_list.")
# SigLIP's head, which pools an image into one vector that no language model reads
UNUSED = ("vision_tower.head.",)


class SeenPictures(NamedTuple):
    """The images of a pass as the language model receives them. tokens: (B, T), image tokens replaced by a
    token with an embedding. places: (B, T) bool, the image tokens. features: (image tokens, H). deep:
    features that layers add to their outputs, each like `features`. axes: positions per axis, (3, B, T), or
    None. masks: returns the masks by which an image's tokens attend to each other in both directions; None if
    they do not."""

    tokens: Tensor
    places: Tensor
    features: Tensor
    deep: tuple[Tensor, ...]
    axes: Tensor | None
    masks: Masks | None

    def next_positions(self) -> Tensor:
        """Returns the position of the token after each row, (B,) or with axes (4, B), in the form of
        `positions_of`. Every row is one document without padding."""
        rows, length = self.tokens.shape
        after = torch.full((rows,), length)
        if self.axes is None:
            return after
        # text goes on after the largest position on any axis (Qwen2-VL, section 2.1)
        largest = self.axes.amax((0, 2)).cpu() + 1
        return torch.stack([after, largest, largest, largest])

    @contextmanager
    def embedded(self, model: PreTrainedModel, shape: torch.Size) -> Iterator[None]:
        """Replaces the embeddings of image tokens by the features. `shape`: the shape of the pass's tokens,
        (B, T) or (1, B * T)."""
        places = self.places.view(shape)[..., None]

        def put(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
            return output.masked_scatter(places, self.features.to(output.dtype))

        hook = model.get_input_embeddings().register_forward_hook(put)
        try:
            yield
        finally:
            hook.remove()

    def positions_of(self, positions: Tensor) -> Tensor:
        """Returns the positions to pass to the model. Without axes these are the rows' positions, (B, T) or
        (1, B * T); with axes they are (4, ...), with the rows' positions first."""
        if self.axes is None:
            return positions
        return torch.cat([positions[None], self.axes.view(3, *positions.shape).to(positions.device)])

    def options(self, model: PreTrainedModel, tokens: Tensor, positions: Tensor) -> dict[str, Any]:
        """Returns the additional arguments of the model's forward function."""
        if self.deep:
            return {
                "visual_pos_masks": self.places.view(tokens.shape),
                "deepstack_visual_embeds": list(self.deep),
            }
        if self.masks is None:
            return {}
        masks = self.masks(
            config=model.config,
            inputs_embeds=torch.empty(*tokens.shape, 1, dtype=model.dtype, device=tokens.device),
            attention_mask=None,
            past_key_values=None,
            position_ids=positions.to(tokens.device),
            block_sequence_ids=_blocks(self.places),
        )
        return {"attention_mask": masks}


def _blocks(places: Tensor) -> Tensor:
    """Returns, for each token, the index of its image within its row; -1 for text."""
    before = torch.nn.functional.pad(places, (1, 0))[:, :-1]
    return torch.where(places, (places & ~before).cumsum(1) - 1, -1)


def _joined(features: Tensor | Sequence[Tensor]) -> Tensor:
    """Returns the features of all images, (image tokens, H). `features` holds them per image or, as
    transformers 5.17 returns some, already joined."""
    if isinstance(features, Tensor):
        return features.flatten(0, -2)
    return torch.cat([part.flatten(0, -2) for part in features])


def _each_alone(pixels: Tensor, sizes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields each image, (1, 3, height, width), and its size, (1, 2). `pixels`: the pixels of all images, in
    one dimension. `sizes`: (images, 2)."""
    shapes = sizes.tolist()
    parts = pixels.split([3 * height * width for height, width in shapes])
    for part, (height, width), size in zip(parts, shapes, sizes, strict=True):
        yield part.view(1, 3, height, width), size[None]


class PictureTower:
    """Turns images into features. `named`: the multimodal model without its language model; its base model is
    the encoder. `stand_in`: the token that replaces image tokens."""

    # None: nothing is trained
    trained: TrainedEncoder | None = None

    def __init__(self, named: PreTrainedModel, family: str, masks: Masks | None, stand_in: int):
        self._named = named.eval().requires_grad_(False)
        self._whole = named.base_model
        self._family = family
        self._masks = masks
        self._stand_in = stand_in
        # of all its parts; an engine moves only trained weights
        self._device: torch.device | None = None

    def move(self, device: torch.device | str) -> None:
        """Moves the encoder; a pass moves it to its own device."""
        self._whole.to(device)
        self._device = torch.device(device)

    @property
    def parts(self) -> list[PreTrainedModel]:
        """Returns the encoder, without its projector if that is a separate module."""
        return [part for part in self._whole.children() if isinstance(part, PreTrainedModel)]

    def train(self, projector_only: bool) -> TrainedEncoder:
        """Makes the encoder or only its projector trainable, and returns its weights, which must become part
        of the trained module. Dropout must be off (see `without_dropout`)."""
        stored = self.stored_weights()
        names = {id(weight): name for name, weight in self._whole.named_parameters()}
        used = {name: weight for name, weight in stored.items() if not names[id(weight)].startswith(UNUSED)}
        if projector_only:
            used = {name: weight for name, weight in used.items() if names[id(weight)].startswith(PROJECTORS)}
        tables = [part for part in self._whole.modules() if isinstance(part, nn.Embedding)]
        embeddings = [weight for table in tables for weight in table.parameters()]
        self._whole.train()  # in eval mode, transformers recomputes no activations
        self.trained = TrainedEncoder(used, embeddings, self._encoded)
        return self.trained

    def stored_weights(self) -> dict[str, nn.Parameter]:
        """Returns the encoder's weights by their names in a checkpoint. Raises ValueError if the checkpoint
        stores a weight in another form."""
        weights = dict(self._named.named_parameters())
        known = {id(weight) for weight in weights.values()}
        stored: dict[str, Any] = revert_weight_conversion(self._named, weights)
        changed = [name for name, weight in stored.items() if id(weight) not in known]
        if changed or len(stored) != len(weights):
            raise ValueError(
                f"the image encoder of {self._family} stores {', '.join(changed[:1]) or 'weights'} in another"
                " form than it computes with: set image_encoder to frozen"
            )
        return stored

    @torch.no_grad()
    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Replaces weights. `weights`: keyed by their names in a checkpoint. Raises ValueError for a weight
        that the encoder does not have."""
        own = self.stored_weights()
        for name, weight in weights.items():
            if name not in own:
                raise ValueError(f"the image encoder of {self._family} has no weight {name}, which was sent")
            own[name].copy_(weight)

    def unseen(self, tokens: Tensor) -> SeenPictures | None:
        """Returns the record for a pass without images, tokens (B, T), in which the trained weights still
        take part; None if no weights are trained."""
        if self.trained is None:
            return None
        nothing = self.trained(None)
        return SeenPictures(tokens, torch.zeros_like(tokens, dtype=torch.bool), nothing, (), None, None)

    def seen(self, tokens: Tensor, positions: Tensor, pictures: BatchPictures) -> SeenPictures:
        """Returns the images of a pass. Raises ValueError if the numbers of features and of image tokens
        differ."""
        if self._device != tokens.device:
            self.move(tokens.device)
        if self.trained is None:
            with torch.no_grad():
                found = self._encoded(pictures.inputs)
        else:
            found = self.trained(pictures.inputs)
        features, *deep = found.unbind()
        count = int(pictures.places.sum())
        if len(features) != count:
            raise ValueError(
                f"images have {len(features)} features for {count} tokens: a file has changed since the data"
                " was read, or the processor is from another model"
            )
        known = tokens.masked_fill(pictures.places, self._stand_in)
        axes = self._axes(tokens, positions, pictures) if self._family in THREE_AXES else None
        return SeenPictures(known, pictures.places, features, tuple(deep), axes, self._masks)

    def _encoded(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Returns the features of all images, followed by the features that layers add, (1 + layers, image
        tokens, H)."""
        encode = self._whole.get_image_features
        if self._family in EACH_ALONE:
            pooled = [
                self._alone(pixels, size)
                for pixels, size in _each_alone(inputs["pixel_values"], inputs["image_sizes"])
            ]
            return torch.cat(pooled)[None]
        found = encode(**inputs, return_dict=True)
        deep = getattr(found, "deepstack_features", None) or ()
        return torch.stack([_joined(part) for part in (found.pooler_output, *deep)])

    def _alone(self, pixels: Tensor, size: Tensor) -> Tensor:
        """Returns the features of one image, (image tokens, H). An image with a single token is encoded
        twice, since transformers 5.19 drops a dimension of 1."""
        config: Any = self._whole.config
        side = config.vision_config.patch_size * config.spatial_merge_size
        times = 2 if int(size.max()) <= side else 1
        pixels = pixels.expand(times, *pixels.shape[1:])
        sizes = size.expand(times, 2)
        found = self._whole.get_image_features(pixel_values=pixels, image_sizes=sizes, return_dict=True)
        features: Tensor = found.pooler_output[0]
        return features

    def _axes(self, tokens: Tensor, positions: Tensor, pictures: BatchPictures) -> Tensor:
        """Returns the positions of all tokens per axis, (3, B, T); each document begins at 0."""
        axes = positions.cpu().expand(3, *positions.shape).clone()
        rows = tokens.cpu()
        places = pictures.places.cpu()
        grids = pictures.inputs["image_grid_thw"].cpu()
        first = 0
        for row, start, stop, images in pictures.documents:
            own, _ = self._whole.get_rope_index(
                rows[row : row + 1, start:stop],
                mm_token_type_ids=places[row : row + 1, start:stop].int(),
                image_grid_thw=grids[first : first + images],
            )
            axes[:, row, start:stop] = own[:, 0]
            first += images
        return axes


def load_tower(model: PreTrainedModel, path: str, dtype: str) -> PictureTower:
    """Loads the image encoder of the checkpoint at `path` for its language model, `model`. If images need
    masks, switches the model to an attention that accepts them. Raises ValueError for other families."""
    config = AutoConfig.from_pretrained(path)
    family = str(config.model_type)
    if family not in PICTURE_FAMILIES:
        raise ValueError(
            f"the data has images, and {path} ({family}) has no image encoder that is run here: name a model"
            f" of the families {', '.join(PICTURE_FAMILIES)}, or one that a stage has trained on images"
        )
    text = config.get_text_config()
    masks = _masks_of(family, text)
    # the embeddings of Gemma 4's layers take image tokens for padding
    stand_in = text.pad_token_id if getattr(text, "hidden_size_per_layer_input", 0) else 0
    _leave_out(config, text)
    with without_reports():  # about the missing layers
        named = AutoModelForImageTextToText.from_pretrained(
            path, config=config, dtype=getattr(torch, dtype), use_safetensors=True
        )
    del named.base_model.language_model, named.lm_head
    if masks is not None and takes_varlen(model):
        mask_attention(model)
    return PictureTower(named, family, masks, stand_in)


def _masks_of(family: str, text: PretrainedConfig) -> Masks | None:
    if family == "gemma4" and text.use_bidirectional_attention != "vision":
        return None
    return BOTH_WAYS.get(family)


def _leave_out(config: PretrainedConfig, text: PretrainedConfig) -> None:
    """Changes the configs so that the multimodal model is built without a part for sound and with only one
    layer of the language model, which is already loaded."""
    text.num_hidden_layers = 1
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    if config.model_type == "gemma4":
        text.num_kv_shared_layers = 0
        text.hidden_size_per_layer_input = 0
        config.audio_config = None
