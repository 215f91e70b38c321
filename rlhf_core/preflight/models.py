"""Model folders as `check` sees them: whether they can be loaded, are what a stage needs, and may have packed
rows."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_core.config import KINDS, PPO, Evaluation, Optimised, StageConfig
from rlhf_core.config.kinds import named
from rlhf_core.hub.ids import is_remote
from rlhf_core.hub.model_config import (
    FIXED_EXPERTS,
    cannot_train_quantised,
    keeps_experts,
    more_than_text,
    quantised_by,
    wraps_text_by_config,
)
from rlhf_core.hub.model_files import ADAPTER_CONFIG
from rlhf_core.hub.stored_head import has_several_labels, has_trained_head, no_reward_head, several_labels
from rlhf_core.hub.vocabulary import compared
from rlhf_core.recipe.plan import Node
from rlhf_core.recipe.references import Reference, references

REWARD = named("reward")
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError)


def model_problem(where: str, place: str) -> dict[str, str]:
    """Returns {folder: why it cannot be loaded}; {} when it can, or is on the Hub. `where` is its place in
    the recipe."""
    folder = Path(place)
    if is_remote(place):
        return {}  # fetching its tokenizer reports a missing repository
    if not folder.is_dir():
        what = f"{place} is a file" if folder.is_file() else f"there is no model folder {place}"
        return {place: f"{where}: {what}; correct the path, or make the model first"}
    if not any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        return {
            place: (
                f"{where}: {place} has no config.json, so it is no model folder; give one that transformers"
                " can load"
            )
        }
    return {}


def unfit_models(node: Node) -> dict[tuple[str, str], str]:
    """Why models that the stage names and loads for training or scoring are not what it needs, by place and
    fault."""
    problems = {}
    for reference in references(node.config):
        place = node.models.get(reference.name)
        if place is None or is_remote(place):
            continue
        where = "base_model" if reference.name == "base" else f"stages.{node.name}.{reference.place}"
        config = _config(place)
        if (
            _loads(node.config, reference)
            and wraps_text_by_config(config)
            and not _has_language_model(config)
        ):
            named = (config.get("architectures") or [config.get("model_type")])[0]
            problems[place, "wrapper"] = f"{where}: {more_than_text(place, str(named))}"
        elif _loads(node.config, reference) and (told := cannot_train_quantised(place, config)):
            problems[place, "quantised"] = f"{where}: {told}"
        elif reference.kinds == REWARD and _lacks_head(Path(place)):
            problems[place, "head"] = f"{where}: {no_reward_head(place)}"
        elif reference.place == KINDS[node.kind].scored and _several_labels(Path(place)):
            problems[place, "labels"] = f"{where}: {several_labels(place)}"
    return problems


def _lacks_head(folder: Path) -> bool:
    """Whether neither the folder's weights nor, of an adapter, its base's are a reward model's; not where
    they cannot be read here."""
    try:
        if has_trained_head(folder) or not any(folder.glob("*.safetensors")):
            return False
        adapter = folder / ADAPTER_CONFIG
        base = json.loads(adapter.read_text()).get("base_model_name_or_path") if adapter.is_file() else None
    except UNREADABLE:
        return False
    return base is None or (not is_remote(base) and Path(base).is_dir() and _lacks_head(Path(base)))


def _several_labels(folder: Path) -> bool:
    """Whether the folder's model is a classifier of several labels; not where its files cannot be read
    here."""
    try:
        return has_several_labels(folder)
    except UNREADABLE:
        return False


def _loads(config: StageConfig, reference: Reference) -> bool:
    """Whether the stage has the model in PyTorch. Elsewhere vLLM alone answers with it, or its files are
    published."""
    if reference.kinds == REWARD or isinstance(config, Optimised):
        return True
    return (
        isinstance(config, Evaluation)
        and config.proxy is not None
        and reference.place.partition(".")[0] in ("models", "baseline")
    )


def _has_language_model(config: dict[str, Any]) -> bool:
    """Whether transformers has a class for the language model that a multimodal model has as a part; True
    without transformers."""
    if importlib.util.find_spec("transformers") is None:
        return True
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # takes seconds

    return str((config.get("text_config") or {}).get("model_type")) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def _config(place: str) -> dict[str, Any]:
    """A folder's config.json; nothing where it has none that can be read, which others say."""
    try:
        config = json.loads((Path(place) / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def vocabulary_problems(
    node: Node, start_of: Callable[[str], str | None], unlike: Callable[[str, str], str | None]
) -> list[str]:
    """Models that would read other tokens in the policy's token ids, and reward models with another tokenizer
    without a chat template.

    `start_of`: the folder or Hub id that a name's chain of models starts from, which has its tokenizer;
    `unlike`: why the second of two places cannot be given the first one's token ids.
    """
    kind = KINDS[node.kind]
    config = node.config
    named = [(reference.place, reference.name) for reference in references(config)]
    if isinstance(config, PPO) and config.has_critic and config.critic is None:
        named.append(("critic", config.reward_models[0].model))
    own = start_of(getattr(config, kind.start)) if kind.given_tokens or "reward" in kind.names else None
    problems: dict[str, str] = {}
    for place, name in named:
        field = place.partition(".")[0]
        other = start_of(name)
        if own is None or other is None or field not in (*kind.given_tokens, "reward"):
            continue
        told = unlike(own, other)
        told = not_writable(other) if told and field == "reward" else told
        if told and not (place == "critic" and told in problems.values()):
            problems[place] = told
    return [f"stages.{node.name}.{place}: {told}" for place, told in problems.items()]


def not_writable(place: str) -> str | None:
    """Why answers cannot be written in the chat template of the model at `place`."""
    from rlhf_core.data.chat import Renderer, load_tokenizer

    try:
        Renderer(load_tokenizer(place), "chat")
    except ValueError as error:
        return str(error)
    return None


def sampling_problems(node: Node, start_of: Callable[[str], str | None]) -> list[str]:
    """Why vLLM cannot sample from the model while PPO trains it. `start_of`: as of `vocabulary_problems`."""
    if not isinstance(node.config, PPO):
        return []
    direct = node.models.get(node.config.actor)
    place = start_of(node.config.actor)
    if direct is not None and (method := quantised_by(_config(direct))):
        return [
            f"stages.{node.name}.actor: {direct} has weights quantised as {method}, and vLLM would take no"
            " new ones: name its checkpoint in bfloat16, or the result of a stage sft that starts from it"
        ]
    if place is None or is_remote(place) or _config(place).get("model_type") not in FIXED_EXPERTS:
        return []
    return [f"stages.{node.name}.actor: {keeps_experts(place)}"]


def unlike_vocabulary(own: str, other: str, trust_remote_code: bool = False) -> str | None:
    """Why the model `other` cannot be given token ids of the model `own`, as who loads them says it; without
    transformers only they do."""
    try:
        return compared(own, other, trust_remote_code)
    except ValueError as error:
        return str(error)
    except ImportError:
        return None
