"""Checks model folders: whether the models can be loaded, suit their stage, share a vocabulary, and can be
sampled from with vLLM."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_core.config import KINDS, PPO, AlignmentTax, Evaluation, Rewarded, StageConfig
from rlhf_core.config.kinds import named
from rlhf_core.data.prompt_rows import SENDS, UNUSED_ENCODER, environment_sends, picture_refusal
from rlhf_core.forecast.image_data import may_have_images
from rlhf_core.hub.ids import is_remote
from rlhf_core.hub.model_config import (
    FIXED_EXPERTS,
    NO_FLOAT16,
    ONLY_TRAINED,
    PICTURE_FAMILIES,
    cannot_train_quantised,
    keeps_experts,
    more_than_text,
    quantised_by,
    text_config,
    wraps_text_by_config,
)
from rlhf_core.hub.model_files import ADAPTER_CONFIG
from rlhf_core.hub.stored_head import has_several_labels, has_trained_head, no_reward_head, several_labels
from rlhf_core.hub.vocabulary import compared
from rlhf_core.recipe.named_inputs import ConfigReference, references
from rlhf_core.recipe.plan import Node
from rlhf_core.system.torchvision_check import lacks_torchvision

REWARD = named("reward")
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError)


def model_problem(where: str, place: str) -> dict[str, str]:
    """Returns {folder: why the model cannot be loaded}, or {} if it can be loaded or is on the Hub. `where`
    is the model's place in the recipe."""
    folder = Path(place)
    if is_remote(place):
        return {}  # if the repository is missing, fetching its tokenizer reports it
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
    """Returns the reasons why models that a stage names do not suit it, keyed by folder and kind of fault."""
    problems = {}
    for reference in references(node.config):
        place = node.models.get(reference.name)
        if place is None or is_remote(place):
            continue
        where = "base_model" if reference.name == "base" else f"stages.{node.name}.{reference.place}"
        config = _config(place)
        used_as = "reward_model" if reference.kinds == REWARD else node.kind
        if (
            _loads(node.config, reference)
            and wraps_text_by_config(config)
            and not _has_language_model(config, node, used_as)
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
    """Returns whether the model lacks the head of a reward model. For an adapter, the head may also be in the
    weights of its base. Returns False if the weights cannot be read here."""
    try:
        if has_trained_head(folder) or not any(folder.glob("*.safetensors")):
            return False
        adapter = folder / ADAPTER_CONFIG
        base = json.loads(adapter.read_text()).get("base_model_name_or_path") if adapter.is_file() else None
    except UNREADABLE:
        return False
    return base is None or (not is_remote(base) and Path(base).is_dir() and _lacks_head(Path(base)))


def _several_labels(folder: Path) -> bool:
    """Returns whether the folder holds a classifier with several labels. Returns False if its files cannot be
    read here."""
    try:
        return has_several_labels(folder)
    except UNREADABLE:
        return False


def _loads(config: StageConfig, reference: ConfigReference) -> bool:
    """Returns whether the stage loads the model in PyTorch. Otherwise the model only answers in vLLM, or its
    files are only published."""
    return reference.kinds == REWARD or config.loads(reference.place)


def _has_language_model(config: dict[str, Any], node: Node, used_as: str) -> bool:
    """Returns whether transformers has a class for the language model inside a multimodal model, and the
    stage can use it. `used_as` is the kind of the stage, or of a stage that trains such a model. Returns True
    without transformers."""
    if importlib.util.find_spec("transformers") is None:
        return True
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # takes seconds

    inner = str(text_config(config).get("model_type"))
    if inner in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return True
    engine = getattr(node.config, "engine", None)
    # vLLM runs the whole model
    is_sampled = engine is not None and not (engine.kind == "vllm" and lacks_torchvision())
    return inner in ONLY_TRAINED and (is_sampled or used_as in ONLY_TRAINED[inner])


def _config(place: str) -> dict[str, Any]:
    """Returns a folder's config.json, or {} if it cannot be read; other checks report that."""
    try:
        config = json.loads((Path(place) / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def vocabulary_problems(
    node: Node, start_of: Callable[[str], str | None], unlike: Callable[[str, str], str | None]
) -> list[str]:
    """Returns a sentence for each model whose vocabulary gives the policy's token ids another meaning, and
    for each reward model that has its own tokenizer but no usable chat template.

    `start_of` returns the folder or Hub id of the model from which a named model's training began; both have
    the same tokenizer. `unlike` returns why the second of two models cannot read the first one's token ids.
    """
    kind = KINDS[node.kind]
    config = node.config
    own = {place for place, _, _ in config.nested_names}  # judges receive text
    named = [
        (reference.place, reference.name) for reference in references(config) if reference.place not in own
    ]
    if isinstance(config, PPO) and config.has_critic and config.critic is None:
        named.append(("critic", config.reward_models[0].model))
    start = start_of(getattr(config, kind.start)) if kind.given_tokens or "reward" in kind.names else None
    problems: dict[str, str] = {}
    for place, name in named:
        field = place.partition(".")[0]
        other = start_of(name)
        if start is None or other is None or field not in (*kind.given_tokens, "reward"):
            continue
        told = unlike(start, other)
        teaches = field in ("reference", "teachers")
        if told is None and teaches and isinstance(config, PPO) and config.teacher_top_k:
            told = unlike(other, start)  # the teacher's most probable tokens go to the actor
        told = not_writable(other) if told and field == "reward" else told
        if told and not (place == "critic" and told in problems.values()):
            problems[place] = told
    return [f"stages.{node.name}.{place}: {told}" for place, told in problems.items()]


def judge_problems(node: Node, start_of: Callable[[str], str | None], trust_remote_code: bool) -> list[str]:
    """Returns a sentence for each judge that runs on the stage's engines and whose chat template cannot
    render its requests. `start_of`: as in `vocabulary_problems`."""
    if not isinstance(node.config, Rewarded) or not node.config.own_judges:
        return []
    if importlib.util.find_spec("transformers") is None:
        return []
    from rlhf_core.rollout.chat_models import judge_renderer  # takes seconds

    problems = []
    for judge in node.config.own_judges:
        place = start_of(judge.model.model)
        try:
            if place is not None:
                judge_renderer(f"the judge {judge.model.model}", place, trust_remote_code)
        except ValueError as error:
            problems.append(f"stages.{node.name.partition('.')[0]}.{judge.place}.model: {error}")
    return problems


def not_writable(place: str) -> str | None:
    """Returns why the chat template of the model at `place` cannot render answers, or None if it can."""
    from rlhf_core.data.chat import Renderer, load_tokenizer

    try:
        Renderer(load_tokenizer(place), "chat")
    except ValueError as error:
        return str(error)
    return None


def argument_problems(
    node: Node, start_of: Callable[[str], str | None], trust_remote_code: bool
) -> list[str]:
    """Returns a sentence for each tokenizer whose chat template never reads an argument that the evaluation
    or alignment_tax stage passes to it."""
    config = node.config
    if (
        not isinstance(config, Evaluation | AlignmentTax)
        or not config.template_args
        or importlib.util.find_spec("transformers") is None
    ):
        return []
    from rlhf_core.data.chat import load_tokenizer
    from rlhf_core.data.chat.template_arguments import refuse_unread

    names = [config.baseline, *config.models]
    if isinstance(config, Evaluation):
        names += (config.parents or {}).values()
        names = [name for name in names if name not in config.endpoints]
    field = "questions" if isinstance(config, Evaluation) else "template_args"
    places = dict.fromkeys(start_of(name) for name in names)
    problems = []
    for place in filter(None, places):
        try:
            template = str(load_tokenizer(place, trust_remote_code).get_chat_template())
        except ValueError:  # reported with the models and the data
            continue
        try:
            refuse_unread(template, config.template_args, place)
        except ValueError as error:
            problems.append(f"stages.{node.name}.{field}: {error}")
    return problems


def sampling_problems(node: Node, start_of: Callable[[str], str | None]) -> list[str]:
    """Returns the reasons why vLLM cannot sample from the model while PPO trains it. `start_of`: as in
    `vocabulary_problems`."""
    if not isinstance(node.config, PPO) or node.config.engine.kind != "vllm":
        return []
    direct = node.models.get(node.config.actor)
    place = start_of(node.config.actor)
    if direct is not None and (method := quantised_by(_config(direct))):
        return [
            f"stages.{node.name}.actor: {direct} has weights quantised as {method}, and vLLM would take no"
            " new ones: name its checkpoint in bfloat16, or the result of a stage sft that starts from it"
        ]
    if place is None or is_remote(place):
        return []
    family = _config(place).get("model_type")
    if family in FIXED_EXPERTS:
        return [f"stages.{node.name}.actor: {keeps_experts(place)}"]
    if node.config.dtype == "float16" and family in NO_FLOAT16:
        return [
            f"stages.{node.name}.dtype: vLLM does not sample models of the family {family} in float16, which"
            " their activations overflow: set bfloat16"
        ]
    return []


def image_problems(node: Node, start_of: Callable[[str], str | None]) -> list[str]:
    """Returns the reasons why the stage cannot read images that its environment may send, or why it has no
    images for the encoder that it trains. `start_of`: as in `vocabulary_problems`."""
    config = node.config
    trained = getattr(config, "image_encoder", "frozen")
    if trained != "frozen" and not may_have_images(config):
        return [f"stages.{node.name}.{UNUSED_ENCODER.format(trained)}"]
    if not isinstance(config, PPO) or not environment_sends(config):
        return []
    told = picture_refusal(config, SENDS)
    place = start_of(config.actor)
    if not told and place is not None and not is_remote(place):
        family = _config(place).get("model_type")
        if family is not None and family not in PICTURE_FAMILIES:
            families = ", ".join(PICTURE_FAMILIES)
            told = (
                f"{SENDS}, but {place} ({family}) reads none: name a model of the families {families}, or"
                " leave images out"
            )
    return [f"stages.{node.name}.actor: {told}"] if told else []


def unlike_vocabulary(own: str, other: str, trust_remote_code: bool = False) -> str | None:
    """Returns why the model `other` cannot read token ids of the model `own`, in the words that the stages
    use. Returns None if it can, and also without transformers, when only the stages check this."""
    try:
        return compared(own, other, trust_remote_code)
    except ValueError as error:
        return str(error)
    except ImportError:
        return None
