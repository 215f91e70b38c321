"""Translates the data of a TRL command: data sets and their splits, held-out data, and the choice of tokens
to train on."""

from __future__ import annotations

import json
from typing import Any

from rlhf_core.migrate.draft import Draft, Flag
from rlhf_core.migrate.flag_values import true, whole
from rlhf_core.migrate.script_inputs import is_unknown, required

COLUMNS = {"sft": {"response_key": "completion"}, "kto": {"response_key": "completion"}}


def read_data(draft: Draft) -> None:
    """Reads the data sets, from `datasets` in a config or from dataset_name, and also the held-out split if
    the command evaluates."""
    name = draft.take("dataset_name")
    mixture = draft.take("datasets")
    split = draft.take("dataset_train_split")
    test_split = draft.take("dataset_test_split")
    config = draft.take("dataset_config")
    field = "prompts" if draft.kind == "ppo" else "data"
    columns = {"format": "columns", **COLUMNS.get(draft.kind, {})} if draft.kind != "ppo" else {}
    if mixture:
        sources = [_source(draft, json.loads(word)) | columns for word in mixture.words]
        if len(sources) > 1:
            draft.note(
                "approximated",
                mixture,
                f"{field}.sources: of equal shares, where TRL takes all rows of each: set probability",
            )
            sources = [source | {"probability": round(1 / len(sources), 10)} for source in sources]
            sources[-1]["probability"] = round(1 - sum(source["probability"] for source in sources[:-1]), 10)
        else:
            draft.note("translated", mixture, f"{field}.sources")
        draft.note("dropped", name, "datasets of the config are used alone")
    else:
        flag = required(draft, name, "data (--dataset_name, or datasets in its config)")
        sources = [{"path": flag.first, **columns}]
        unknown = (
            "the value of this variable is not in the script: write the data set there"
            if is_unknown(flag.first)
            else ""
        )
        draft.note("approximated" if unknown else "translated", flag, unknown or f"{field}.sources")
    if split and split.first != "train":
        sources = [source | {"split": split.first} for source in sources]
    draft.note("translated", split, f"split of {field}.sources")
    draft.note(
        "dropped",
        config,
        "a configuration of a data set is not selected: give its files, or another data set",
    )
    draft.put(field, {"sources": sources})
    if draft.kind == "sft":
        _read_loss_mask(draft)
    _read_held_out(draft, sources, test_split)


def _source(draft: Draft, entry: dict[str, Any]) -> dict[str, Any]:
    """Returns the source for an entry of `datasets`."""
    path = entry.pop("path", "")
    files = entry.pop("data_files", None)
    source: dict[str, Any] = {"path": files if isinstance(files, str) else path}
    split = entry.pop("split", "train")
    if split != "train":
        source["split"] = split
    for option, value in entry.items():
        if value is not None:
            draft.note(
                "dropped",
                f"datasets: {option}: {value}",
                f"a source has no such field: check {source['path']}",
            )
    if files is not None and not isinstance(files, str):
        draft.note(
            "dropped", f"datasets: data_files: {files}", f"a source is one file: list them in place of {path}"
        )
    return source


def _read_loss_mask(draft: Draft) -> None:
    """Notes in the draft whether TRL trains on tokens outside the answers."""
    answers = draft.take("assistant_only_loss")
    completion = draft.take("completion_only_loss")
    if answers and true(answers.words):
        draft.note("translated", answers, "always: the loss is over answers alone")
    else:
        text = (
            "of `messages` TRL trains on all tokens, alignflow on answers alone; of prompt and completion"
            " both on the completion"
        )
        draft.note("approximated", answers or "(no --assistant_only_loss)", text)
    if completion and not true(completion.words):
        draft.note("dropped", completion, "prompts are not trained on")
    else:
        draft.note("translated", completion, "always: the loss is over answers alone")


def _read_held_out(draft: Draft, sources: list[dict[str, Any]], test_split: Flag | None) -> None:
    strategy = draft.take("eval_strategy") or draft.take("evaluation_strategy")
    steps = draft.take("eval_steps")
    field = "eval_prompts" if draft.kind == "ppo" else "eval_data"
    if strategy is None or strategy.first == "no":
        draft.note("translated", strategy, "nothing is evaluated in training")
        for flag in (test_split, steps):
            draft.note("dropped", flag, "it belongs to --eval_strategy, which is no")
        return
    held_out = test_split.first if test_split else "test"
    draft.put(field, {"sources": [source | {"split": held_out} for source in sources]})
    draft.note("translated", test_split or "(no --dataset_test_split)", f"{field}: the split {held_out}")
    draft.note(
        "translated" if strategy.first == "steps" else "approximated",
        strategy,
        f"{field}; eval_steps says how often",
    )
    value = draft.read(steps, whole, "eval_steps keeps its default")
    if value:
        draft.translate(steps, "eval_steps", value, "iterations" if draft.kind == "ppo" else "")
