"""Checks the maximum sequence length and the chat template of chat models that this run starts, mainly
judges."""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from rlhf_core.config.rewarding.judge_models import EngineJudge
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.hub.positions import positions_of
from rlhf_core.models.lora import base_of
from rlhf_core.models.precision import stored_dtype

REQUEST = ({"role": "system", "content": "Rate."}, {"role": "user", "content": "An answer."})


def longest_of(where: str, config: PretrainedConfig, max_model_len: int | None) -> int:
    """Returns the maximum number of tokens of a prompt and its answer together: `max_model_len`, or by
    default the model's number of positions. Raises ValueError, starting with `where`, when the number of
    positions is unknown and `max_model_len` is not set, or when it is smaller than `max_model_len`."""
    positions = positions_of(config.to_dict())
    length = max_model_len or positions
    if length is None:
        raise ValueError(f"{where}: the model's config has no max_position_embeddings: set max_model_len")
    if positions is not None and length > positions:
        raise ValueError(
            f"{where}: max_model_len is {length}, but the model has {positions} positions: lower it"
        )
    return length


def require_room(where: str, max_tokens: int, max_model_len: int) -> None:
    """Raises ValueError, starting with `where`, when replies of `max_tokens` leave no room for a judge's
    prompt."""
    if max_tokens >= max_model_len:
        left = f"max_tokens={max_tokens} leaves none of its {max_model_len} tokens for a prompt"
        raise ValueError(f"{where}: {left}: lower it")


def require_template(where: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError, starting with `where`, when a judge's tokenizer has no chat template."""
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{where}: its tokenizer has no chat template, but judging uses chat requests: name a chat model"
        )


def judge_renderer(where: str, path: str, trust_remote_code: bool) -> Renderer:
    """Returns the renderer of requests to a judge. Raises ValueError, starting with `where`, when its chat
    template cannot render them."""
    tokenizer = load_tokenizer(path, trust_remote_code)
    require_template(where, tokenizer)
    renderer = Renderer(tokenizer, "chat")
    try:
        renderer.prompt(REQUEST)
    except ValueError as error:
        raise ValueError(f"{where}: {error}: name a model whose template takes both") from None
    return renderer


class JudgeSetup(NamedTuple):
    """A judge on engines: the renderer of its requests, and the options of its engines; see `SamplerRole`."""

    judge: EngineJudge
    renderer: Renderer
    options: dict[str, Any]


def judge_setup(where: str, path: str, judge: EngineJudge, seed: int, trust_remote_code: bool) -> JudgeSetup:
    """Returns the setup for a judge whose model is at `path`. Raises ValueError for the same reasons as
    `longest_of`, `require_room` and `judge_renderer`."""
    config = AutoConfig.from_pretrained(base_of(path) or path, trust_remote_code=trust_remote_code)
    longest = longest_of(where, config, judge.max_model_len)
    require_room(where, judge.max_tokens, longest)
    renderer = judge_renderer(where, path, trust_remote_code)
    options = {
        "model": path,
        "config": judge.engine,
        "seed": seed,
        "max_model_len": longest,
        "dtype": stored_dtype(config) if judge.dtype == "auto" else judge.dtype,
        "trust_remote_code": trust_remote_code,
        "can_sleep": judge.engine.sleep,
    }
    return JudgeSetup(judge, renderer, options)
