"""Translates the models and data of a stage, which come from other stages of the same script or from outside
it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from rlhf_core.migrate.draft import Draft, Flag
from rlhf_core.migrate.flag_values import Words, count, listed, number, off_or_number

NO_LIMIT = 10**8  # in the dialects, means that all samples are used
PLAIN = {"flat": "Human: {}\nAssistant: ", "dotted": "{}"}  # the template when a script gives none
MODEL_FIELD = {"sft": "model", "reward_model": "model", "dpo": "policy", "kto": "policy", "ppo": "actor"}


@dataclass
class Chain:
    """The stages so far, by the output path of their model. `base`: the recipe's base model."""

    base: str | None = None
    models: dict[str, str] = field(default_factory=dict)

    def model(self, path: str) -> str:
        """Returns a model's name in the recipe: a stage, `base`, or the path itself. The first outside
        model becomes the base."""
        if plain(path) in self.models:
            return self.models[plain(path)]
        if self.base is None:
            self.base = path
        return "base" if path == self.base else outside(path)

    def reward(self, path: str) -> str:
        """Returns the name of a reward model: a stage or the path, never `base`."""
        return self.models.get(plain(path)) or outside(path)


def outside(path: str) -> str:
    """Returns a folder or Hub id in a form that contains a slash, because a name without one refers to a
    stage."""
    return path if "/" in path else f"./{path}"


def plain(path: str) -> str:
    """Returns a path without leading ./ and trailing slashes."""
    while path.startswith("./"):
        path = path[2:]
    return path.rstrip("/")


def is_unknown(text: str) -> bool:
    """Returns whether a string contains a variable or command substitution whose value is unknown."""
    return "$" in text or "`" in text


def is_model(source: str) -> bool:
    """Returns whether a reward source is a model rather than a URL or a function."""
    return not source.startswith(("http://", "https://")) and ".py:" not in source


def rewards_of(draft: Draft) -> list[str]:
    """Returns the names of a PPO stage's reward sources: models, functions, URLs."""
    sources = draft.fields["reward"]
    listed_sources = sources if isinstance(sources, list) else [sources]
    return [
        str(next(iter(source.values()))) if isinstance(source, dict) else source for source in listed_sources
    ]


def required(draft: Draft, flag: Flag | None, what: str) -> Flag:
    """Returns a flag that a command must have. Raises ValueError when it is missing or empty."""
    if flag is None or not listed(flag.words):
        raise ValueError(f"line {draft.line} of the script: the command names no {what}; add it")
    return flag


def model_of(draft: Draft, flag: Flag, name: str, chain: Chain) -> str:
    """Sets the field `name` to a model. Returns its name in the recipe."""
    path = flag.first
    found = chain.model(path)
    unknown = (
        "the value of this variable is not in the script: write the model there" if is_unknown(path) else ""
    )
    for output, stage in chain.models.items():
        if found == outside(path) and plain(path).startswith(output + "/"):
            found = stage
            unknown = f"a folder inside the output of stage {stage} is taken as its final model"
    draft.translate(flag, name, found, unknown)
    return found


def read_models(draft: Draft, chain: Chain) -> None:
    """Reads the model to train, its reference, and PPO's critic and rewards. Raises ValueError when there
    is no model or reward."""
    flag = required(draft, draft.take("pretrain"), "model (--pretrain, --model.model_name_or_path)")
    start = model_of(draft, flag, MODEL_FIELD[draft.kind], chain)
    reference = draft.take("ref_pretrain")
    if reference and reference.words and chain.model(reference.first) != start and draft.has("reference"):
        model_of(draft, reference, "reference", chain)
    else:
        draft.note("translated", reference, "the reference is the model before training")
    if draft.kind == "ppo":
        _read_rewards(draft, chain)
        _read_critic(draft, chain, start)


def _read_rewards(draft: Draft, chain: Chain) -> None:
    sources: list[Any] = []
    flag = draft.take("remote_rm_url")
    if flag:
        for place in listed(flag.words):
            if "@" in urlsplit(place).netloc:
                text = (
                    "the address contains a password: add it to reward without, with the name of a variable"
                    " in api_key_env"
                )
                draft.note("dropped", flag, text)
            elif place.startswith(("http://", "https://")):
                sources.append(place)
                text = (
                    "reward: the server must answer as docs/how-to/rewards.md says, or as `alignflow"
                    " serve-reward` does"
                )
                draft.note("approximated", flag, text)
            elif place.partition(":")[0].endswith(".py"):
                sources.append(place if ":" in place else f"{place}:reward_func")
                text = (
                    "reward: a function names the arguments it needs, see docs/how-to/rewards.md; change its"
                    " signature"
                )
                draft.note("approximated", flag, text)
            else:
                draft.note("dropped", flag, f"{place} is neither a URL nor a Python file; add a reward")
    flag = draft.take("reward_pretrain")
    if flag and not sources:
        for path in listed(flag.words):
            sources.append(chain.reward(path))
            draft.note("translated", flag, f"reward: {sources[-1]}")
    else:
        draft.note("dropped", flag, "the script has a remote reward, which is used alone")
    draft.note(
        "dropped",
        draft.take("agent_func_path"),
        "multi-turn agents are not part of a recipe; write a reward function and add it to reward",
    )
    if not sources:
        required(draft, None, "reward (--reward_pretrain or --remote_rm_url)")
    draft.put("reward", sources[0] if len(sources) == 1 else sources)


def _read_critic(draft: Draft, chain: Chain, start: str) -> None:
    first = rewards_of(draft)[0]
    flag = draft.take("critic_pretrain")
    if draft.get("advantage_estimator") != "gae":
        draft.note("dropped", flag, f"{draft.get('advantage_estimator')} has no critic")
        if draft.fields.pop("freezing_actor_steps", None):
            draft.note(
                "dropped", "--freezing_actor_steps", f"{draft.get('advantage_estimator')} has no critic"
            )
    elif flag and flag.words and chain.model(flag.first) != first:
        model_of(draft, flag, "critic", chain)
    elif flag:
        draft.note("translated", flag, "the critic starts from the first reward model")
    elif not is_model(first):
        draft.put("critic", start)
        draft.note(
            "approximated",
            "(no --critic_pretrain)",
            "critic: starts from the actor, as there is no reward model",
        )


def read_data(draft: Draft) -> None:
    """Reads a stage's training data and held-out data. Raises ValueError when the command does not name any
    data."""
    ppo = draft.kind == "ppo"
    flag = (draft.take("prompt_data") if ppo else None) or draft.take("dataset")
    flag = required(draft, flag, f"data (--{'prompt_data' if ppo else 'dataset'})")
    template = _template(draft)
    columns = _columns(draft, template)
    data: dict[str, Any] = {"sources": _sources(draft, flag, columns, "prompt" if ppo else "train")}
    if template != "chat":
        data["template"] = template
    most = draft.read(limit := draft.take("max_samples"), count)
    if most:
        if most < NO_LIMIT:
            data["max_samples"] = most
        draft.note("translated", limit, "max_samples of the data")
    name = "prompts" if ppo else "data"
    draft.put(name, data)
    draft.note("translated", flag, f"{name}.sources")
    _held_out(draft, columns, template)


def _sources(draft: Draft, flag: Flag, columns: dict[str, str], kind: str) -> list[dict[str, Any]]:
    paths = listed(flag.words)
    given = draft.take("prompt_data_probs" if kind == "prompt" else "dataset_probs")

    def weights_of(words: Words) -> list[float]:
        weights = [number((word,)) for word in listed(words)]
        if len(weights) != len(paths) or sum(weights) <= 0 or min(weights) < 0:
            raise ValueError(f"{len(weights)} shares for {len(paths)} data sets")
        return weights

    weights = draft.read(given, weights_of, "the data sets have equal shares")
    if weights:
        sums_to_1 = abs(sum(weights) - 1) < 1e-6
        draft.note(
            "translated" if sums_to_1 else "approximated", given, "probability of each source; they sum to 1"
        )
    weights = weights or [1.0] * len(paths)
    split = draft.take("prompt_split" if kind == "prompt" else "train_split")
    draft.note("translated", split, "split of the sources")
    sources: list[dict[str, Any]] = []
    for path, weight in zip(paths, weights, strict=True):
        name, at, folder = path.partition("@")
        if at:
            draft.note(
                "approximated",
                flag,
                f"the folder {folder} of {name} is not selected: give its files, or another data set id",
            )
        if is_unknown(path):
            draft.note(
                "approximated",
                flag,
                "the value of this variable is not in the script: write the data set there",
            )
        source: dict[str, Any] = {"path": name, **columns}
        if split and split.first not in ("", "train"):
            source["split"] = split.first
        if len(paths) > 1:
            source["probability"] = round(weight / sum(weights), 10)
        sources.append(source)
    if len(sources) > 1:  # the sum must still be 1 after rounding
        sources[-1]["probability"] = round(1 - sum(source["probability"] for source in sources[:-1]), 10)
    return sources


def _columns(draft: Draft, template: str) -> dict[str, str]:
    """Reads the names of the data's columns."""
    wanted: dict[str, str] = {}
    match draft.kind:
        case "sft":
            chat = template == "chat" and "output_key" not in draft.left
            wanted = (
                {"input_key": "messages_key"}
                if chat
                else {"input_key": "prompt_key", "output_key": "response_key"}
            )
            if chat and "input_key" in draft.left and "multiturn" not in draft.left:
                text = "messages_key; every assistant message of a conversation is learned, not only the last"
                draft.note("approximated", draft.left["input_key"], text)
        case "kto":
            wanted = {"input_key": "prompt_key", "output_key": "response_key", "label_key": "label_key"}
        case "ppo":
            wanted = {"input_key": "prompt_key"}
        case _:
            wanted = {"prompt_key": "prompt_key", "chosen_key": "chosen_key", "rejected_key": "rejected_key"}
    columns: dict[str, str] = {}
    margin = draft.take("margin_loss")
    if margin:
        columns["margin_key"] = "margin"
        draft.note("translated", margin, "margin_key of the data: margin")
    for flag, column in wanted.items():
        given = draft.take(flag)
        if given and given.first.lower() not in ("", "none"):
            columns[column] = given.first
            if not any(note.flag == given.shown for note in draft.notes):
                draft.note("translated", given, f"{column} of the data")
    return {"format": "columns", **columns} if columns else {}


def _template(draft: Draft) -> str:
    chat = draft.take("apply_chat_template")
    given = draft.take("input_template")
    if chat:
        draft.note("translated", chat, "template: chat")
        draft.note("dropped", given, "--apply_chat_template is used")
        return "chat"
    if given and given.words and given.first.lower() != "none":
        template = given.first.replace("\\n", "\n")
        if template.count("{}") == 1:
            draft.note("translated", given, "template")
            return template
        draft.note("approximated", given, "template: '{}', as this one has not exactly one {}")
        return "{}"
    if draft.dialect == "flat":
        text = "template: 'Human: {}\\nAssistant: ', the default of older releases; later ones '{}'"
        draft.note("approximated", "(no --apply_chat_template)", text)
    return PLAIN[draft.dialect]


def _held_out(draft: Draft, columns: dict[str, str], template: str) -> None:
    name = "eval_prompts" if draft.has("eval_prompts") else "eval_data"
    flag = draft.take("eval_dataset")
    split = draft.take("eval_split")
    if not draft.has(name):
        draft.note("dropped", flag, "an `evaluation` stage after training judges answers; add one")
        draft.note("dropped", None if flag else split, "an `evaluation` stage after training judges answers")
    elif flag and flag.words:
        paths = listed(flag.words)
        extra: dict[str, Any] = {"split": split.first} if split and split.words else {}
        extra |= {"probability": 1 / len(paths)} if len(paths) > 1 else {}
        data = {"sources": [{"path": path, **columns, **extra} for path in paths]}
        draft.put(name, data | ({"template": template} if template != "chat" else {}))
        if name == "eval_prompts":
            draft.note("approximated", flag, "eval_prompts: the checkpoint is then the best iteration's")
        else:
            draft.note("translated", flag, name)
    else:
        text = f"without a held-out data set nothing is evaluated in training: set {name}"
        draft.note("dropped", flag or split, text)
    if name == "eval_prompts":
        _validation(draft)


def _validation(draft: Draft) -> None:
    """Translates PPO's validation: how often prompts are answered during training, with how many answers
    each, and how these are sampled."""
    temperature = draft.take("eval_temperature")
    if "eval_prompts" not in draft.fields:
        draft.note("dropped", temperature, "there are no eval_prompts")
    elif (value := draft.read(temperature, number, "it is that of the training")) is not None:
        draft.translate(temperature, "eval_temperature", value)
    for flag, name, how in (
        ("eval_steps", "eval_steps", "iterations"),
        ("eval_n_samples_per_prompt", "eval_samples", ""),
    ):
        given = draft.take(flag)
        if "eval_prompts" not in draft.fields:
            draft.note("dropped", given, "there are no eval_prompts")
        elif count_of := draft.read(given, off_or_number, f"{name} keeps its default"):
            draft.translate(given, name, count_of, how)
        elif count_of == 0:
            draft.note(
                "approximated", given, f"{name} keeps its default: remove eval_prompts to validate nothing"
            )
