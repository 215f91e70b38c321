"""Builds prompts from rows, and determines which stages cannot sample answers to prompts with images.
Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rlhf_core.config import PPO, EngineConfig, Preferences, StageConfig
from rlhf_core.data.documents import Prompt
from rlhf_core.data.pictures.message_parts import named_pictures, sources_in
from rlhf_core.data.pictures.picture_source import MISNAMED, TOO_LONG, PictureFault
from rlhf_core.data.rows.columns import Located, pictured_prompt_of, tools_of
from rlhf_core.data.survey import BuiltItems
from rlhf_core.system.torchvision_check import lacks_torchvision

SENDS = "the environment may send images (images: true)"
UNUSED_ENCODER = "image_encoder: {} trains what reads images, and the data has none: leave it out"

if TYPE_CHECKING:  # chat imports transformers
    from rlhf_core.data.chat import Renderer


def prompt_within(renderer: Renderer, limit: int, located: Located) -> tuple[Prompt | None, BuiltItems]:
    """Returns the prompt of a row, and the counts for the data report. A prompt of more than `limit` tokens
    keeps its end (see `Renderer.prompt_within`). A prompt with images is None if it is too long or an image
    cannot be used. Raises ValueError, with the row's place, for wrong types and for a row that the template
    rejects."""
    messages = pictured_prompt_of(located)
    sources = sources_in(messages)
    try:
        if not sources:
            tokens, cut = renderer.prompt_within(messages, limit, tools_of(located))
            counted = BuiltItems([((), 0.0)], cut, 1, "", len(tokens))
            return Prompt(tuple(messages), tokens, located.row, cut), counted
        document = renderer.prompt_document(messages, tools_of(located))
        marks = [MISNAMED] if any(source.is_misnamed for source in sources) else []
        pictures = tuple(image._replace(source=image.source.anywhere()) for image in document.pictures)
    except PictureFault as fault:
        return None, BuiltItems((), 0, 1, fault.fact, marks=(fault.fact,))
    except ValueError as error:
        raise ValueError(f"{located.where}: {error}") from error
    length = len(document)
    if length > limit:
        return None, BuiltItems((), 0, 1, TOO_LONG, length, marks=(*marks, TOO_LONG))
    shown = tuple(named_pictures(messages))
    prompt = Prompt(shown, list(document.tokens), located.row, False, pictures)
    return prompt, BuiltItems([((), 0.0)], 0, 1, "", length, marks=marks)


def has_pictures(config: StageConfig, prompts: Sequence[Prompt], own_tokens: Iterable[str] = ()) -> bool:
    """Returns whether any prompt has images, or an environment may send some. `own_tokens` holds the titles
    of reward models whose tokenizer is not the policy's. Raises ValueError if there are images that the stage
    or these reward models cannot read."""
    if any(prompt.pictures for prompt in prompts):
        have = "the rows have images"
    elif environment_sends(config):
        have = SENDS
    else:
        return False
    if refusal := picture_refusal(config, have):
        raise ValueError(refusal)
    other = next(iter(own_tokens), None)
    if other is not None:
        raise ValueError(
            f"{have}, and the reward model {other} has another tokenizer than the policy:"
            " name one that was trained from the policy's base model"
        )
    return True


def environment_sends(config: StageConfig) -> bool:
    """Returns whether an environment of the stage may send images."""
    return isinstance(config, PPO) and any(known.images for known in config.talks_to.values())


def engine_refusal(engine: EngineConfig) -> str:
    """Returns a sentence that explains why engines cannot read images, or "" if they can."""
    if engine.kind != "vllm":
        return ""
    if engine.adapters == "alone":
        return "leave engine.adapters out, since vLLM has no adapters for models that read images"
    if engine.pipeline_parallel_size > 1:
        return "set engine.pipeline_parallel_size to 1"
    return lacks_torchvision()


def picture_refusal(config: StageConfig, have: str = "the rows have images") -> str:
    """Returns a sentence that explains why a stage cannot read the images of its rows, or "" if it can.
    `have` is the beginning of the sentence."""
    has = f"{have}, which"
    if getattr(config, "sequence_parallel_size", 1) > 1:
        return f"{has} ranks do not split: set sequence_parallel_size to 1"
    if not isinstance(config, PPO | Preferences):
        return ""
    samples = isinstance(config, Preferences) or config.has_engines
    if samples and (refusal := engine_refusal(config.engine)):
        return f"{has} these engines do not read: {refusal}"
    if isinstance(config, Preferences) and config.post_processor not in ("dpo", "kto"):
        return f"{has} rows of answers alone do not keep: set post_processor to dpo or kto"
    return ""
