"""Writes the model card (README.md) of a published model: content, origin, scores and intended use.
Torch-free.

The functions are pure, from records to text, and use no dates. The same inputs therefore give the same card,
and repeating a publication changes nothing. Paths on this machine never appear: files are named by their last
component, stages by name and digest. The front matter has no legacy `model-index`. Scores always go to
`eval_results.json`. If the questions are a data set on the Hub, scores also go to `.eval_results/`. This is
the Hub's current format, which cannot refer to questions in any other way.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import yaml

from rlhf_core.config import KINDS
from rlhf_core.config.gates import Verdict
from rlhf_core.hub.ids import is_hub_id, parted
from rlhf_core.records import EvalReport, WinRate
from rlhf_core.runs.lineage import Ancestor, sources, stages, trained, tree
from rlhf_core.stages.publication.card_sections import configuration, data_sets, gate_section, public_names
from rlhf_core.stages.publication.terms import Terms
from rlhf_core.system.markdown_table import table

CONDITIONED = (
    "The model was trained with the reward of each answer at the end of its prompt: put the text in"
    " `prompt_suffix.json` after your last message to ask for its best answers, as the scores below did.\n"
)
SAMPLING = ("max_tokens", "temperature", "top_p")  # the endpoint settings that are published


class CardModel(NamedTuple):
    """Describes a model to publish: its checkpoint's lineage, its name in the evaluation, and the card's
    heading (a Hub ID or a name). Also holds the Hub repository of an adapter's base model (None: the model is
    not an adapter), and the branch to publish on.

    `needs_score_class` says whether transformers lacks its class (see `models.score_classes`). `terms` are
    the terms of its base model. `reads_images` says whether it has an image encoder.
    """

    lineage: Ancestor
    name: str
    title: str
    license: str
    is_reward_model: bool
    has_chat_template: bool
    adapts: str | None = None
    branch: str = "main"
    needs_score_class: bool = False
    terms: Terms = Terms()
    reads_images: bool = False

    @property
    def task(self) -> str:
        """Returns the Hub's name for the model's task."""
        if self.is_reward_model:
            return "text-classification"
        return "image-text-to-text" if self.reads_images else "text-generation"


def card(model: CardModel, report: EvalReport | None, gates: Sequence[Verdict] = ()) -> str:
    """Returns the README.md of a model. `gates` are the gates of all stages that led to it."""
    parts = [
        f"---\n{yaml.safe_dump(front_matter(model), sort_keys=False, allow_unicode=True)}---\n",
        f"# {model.title}\n",
        _summary(model),
        "## Use\n",
        _use(model),
        *([CONDITIONED] if model.lineage.config.get("condition") == "reward" else []),
        "## Scores\n",
        _scores(report, model.name),
        *gate_section(gates),
        "## Lineage\n",
        (
            "Each stage with the digest of everything that decided its result: configuration, parents, data,"
            " code.\n"
        ),
        f"```\n{tree(model.lineage)}\n```\n",
        "## Data\n",
        data_sets(model.lineage),
        "## Configuration\n",
        configuration(model.lineage),
        "## Intended use and limits\n",
        _intended(model.is_reward_model),
    ]
    return "\n".join(parts)


def front_matter(model: CardModel) -> dict[str, Any]:
    """Returns the card's YAML header, which the Hub indexes. Lists only Hub IDs as base model and data
    sets."""
    kinds = [stage.kind.replace("_", "-") for stage in stages(model.lineage)]
    base = trained(model.lineage)[0]
    header: dict[str, Any] = {
        **model.terms.license_fields(model.license),
        **model.terms.asking,
        "library_name": "peft" if model.adapts else "transformers",
        "pipeline_tag": model.task,
        "tags": list(
            dict.fromkeys(["alignflow", *(["reward-model"] if model.is_reward_model else []), *kinds])
        ),
    }
    if model.adapts:
        header |= {"base_model": model.adapts, "base_model_relation": "adapter"}
    elif base.kind == "hub" and not base.is_stage:
        header |= {"base_model": base.name, "base_model_relation": "finetune"}
    datasets = list(
        dict.fromkeys(
            parted(source["path"])[0] for _, _, source in sources(model.lineage) if is_hub_id(source["path"])
        )
    )
    if datasets:
        header["datasets"] = datasets
    return header


def public_report(report: EvalReport) -> tuple[EvalReport, dict[str, str]]:
    """Returns an evaluation without paths and addresses on this machine, and without endpoint settings other
    than `SAMPLING`. Also returns a mapping from names in `report` to public names."""
    rates = [*report.win_rates, *report.against_parent]
    names = [
        report.baseline,
        report.judge,
        *(name for rate in rates for name in (rate.model, rate.baseline, rate.judge)),
    ]
    public = public_names(
        [*names, *report.right, *report.mean_tokens, *report.truncated, *report.agreement, *report.answering]
    )

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {public.get(key, key): renamed(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [renamed(item) for item in value]
        return public.get(value, value) if isinstance(value, str) else value

    content = renamed(report.model_dump())
    for asked in content["answering"].values():
        asked |= {
            "url": "",
            "settings": {key: value for key, value in asked["settings"].items() if key in SAMPLING},
        }
    return EvalReport.model_validate(content), public


def eval_results(report: EvalReport, name: str, questions: str) -> str | None:
    """Returns the content of `.eval_results/*.yaml` (Hub docs: eval-results): the model's win rate, in
    percent, according to the deciding judge.

    Returns None unless the questions are on the Hub. The format requires one file per variant, so second
    opinions appear only in `eval_results.json`.
    """
    if not is_hub_id(questions):
        return None
    entries = [
        {
            "dataset": {"id": parted(questions)[0], "task_id": "win_rate"},
            "value": round(100 * rate.win_rate, 2),
            "notes": (
                f"against {rate.baseline}, judge {rate.judge}, {_interval(rate)} %, {rate.counted}, ties as"
                " half"
            ),
        }
        for rate in report.win_rates
        if rate.model == name and rate.judge == report.judge
    ]
    return yaml.safe_dump(entries, sort_keys=False, allow_unicode=True) if entries else None


def _summary(model: CardModel) -> str:
    chain = trained(model.lineage)
    steps = [
        KINDS[node.kind].shown_as if node.kind in KINDS else node.kind for node in chain if node.is_stage
    ]
    runs = [(step, len(list(same))) for step, same in groupby(steps)]
    words = (
        ", then ".join(f"{step} (x{count})" if count > 1 else step for step, count in runs)
        or "no training recorded"
    )
    what = "A reward model" if model.is_reward_model else "A language model"
    base = chain[0]
    known = f"`{base.name}`" + (f" (`{base.digest}`)" if base.digest else "")
    return f"{what} made with alignflow from {known}: {words}.\n"


def template_args(ancestor: Ancestor) -> dict[str, Any]:
    """Returns the chat template arguments, by name, from a model's last training stage."""
    for stage in reversed(trained(ancestor)):
        texts = stage.config.get("data") or stage.config.get("prompts")
        if texts or "template_args" in stage.config:
            return (texts or stage.config).get("template_args") or {}
    return {}


def _use(model: CardModel) -> str:
    place = f'"{model.title}"' if is_hub_id(model.title) else '"path/to/this/folder"'
    if is_hub_id(model.title) and model.branch != "main":
        place += f', revision="{model.branch}"'
    if model.is_reward_model:
        auto = "AutoModelForSequenceClassification"
        labels = ", num_labels=1"
        last = "print(model(tokens).logits[0, 0])"
        turns = '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
        prompt = ""
    else:
        auto = "AutoModelForImageTextToText" if model.reads_images else "AutoModelForCausalLM"
        labels = ""
        last = "print(tokenizer.decode(model.generate(tokens)[0]))"
        turns = '[{"role": "user", "content": "..."}]'
        prompt = "add_generation_prompt=True, "
    if model.has_chat_template:
        given = template_args(model.lineage)
        prompt = "".join(f"{name}={value!r}, " for name, value in given.items()) + prompt
        tokens = f'tokenizer.apply_chat_template({turns}, {prompt}return_dict=False, return_tensors="pt")'
    else:
        tokens = 'tokenizer("...", return_tensors="pt").input_ids'
    lines = [f"from transformers import {auto}, AutoTokenizer", ""]
    if model.needs_score_class:
        lines = [f"from transformers import {auto}, AutoConfig, AutoTokenizer"]
        lines += [
            (
                "from rlhf_core.models.score_classes import add_score_class  # of alignflow: transformers has"
                " no class for it"
            ),
            "",
        ]
        lines.append(f"add_score_class(AutoConfig.from_pretrained({place}))")
    if model.adapts:
        lines = [
            "from peft import PeftModel",
            *lines,
            f'model = {auto}.from_pretrained("{model.adapts}"{labels})',
        ]
        lines.append(f"model = PeftModel.from_pretrained(model, {place})")
    else:
        lines.append(f"model = {auto}.from_pretrained({place})")
    lines += [f"tokenizer = AutoTokenizer.from_pretrained({place})", f"tokens = {tokens}", last]
    images = [
        "It reads images with `AutoProcessor.from_pretrained`, like its base model.\n"
    ] * model.reads_images
    return "\n".join(["```python", *lines, "```\n", *images])


def _scores(report: EvalReport | None, name: str) -> str:
    if report is None or not report.win_rates:
        return "No evaluation was published with this model.\n"
    header = (
        "model",
        "against",
        "judge",
        "win rate %",
        "95 % interval",
        "counted",
        "failed",
        "swap consistency %",
    )
    rows = [
        (
            f"**{rate.model}**" if rate.model == name else rate.model,
            rate.baseline,
            rate.judge,
            f"{100 * rate.win_rate:.1f}",
            _interval(rate),
            rate.counted,
            rate.num_failed,
            f"{100 * rate.swap_consistency:.1f}",
        )
        for rate in report.win_rates
    ]
    parts = [
        (
            f"The published model is **{name}**. A battle is one question, played twice with the answers"
            f" swapped; a tie counts as half a win; the interval is over questions; `{report.judge}` decides,"
            " other judges are second opinions.\n"
        ),
        table(header, rows),
    ]
    if report.right or report.mean_tokens:
        models = dict.fromkeys((*report.right, *report.mean_tokens))
        shares = [
            (
                f"**{model}**" if model == name else model,
                _percent(report.right.get(model)),
                f"{report.mean_tokens[model]:.1f}" if model in report.mean_tokens else "",
                _percent(report.truncated.get(model)),
            )
            for model in models
        ]
        parts.append(
            table(("model", "right answers %", "tokens of an answer, mean", "cut by length %"), shares)
        )
    own = next((rate for rate in report.win_rates if rate.model == name and rate.judge == report.judge), None)
    if own and len(own.by_category) > 1:
        parts.append(
            table(
                ("category", "win rate %"),
                [(key, f"{100 * value:.1f}") for key, value in own.by_category.items()],
            )
        )
    return "\n".join(parts)


def _intended(is_reward_model: bool) -> str:
    if is_reward_model:
        return (
            "It scores answers to prompts like those it was trained on, to train or compare other models."
            " Scores are relative: only differences between answers to one prompt mean something, and an"
            " answer can be optimised to score well without being good.\n"
        )
    return (
        "It answers prompts like those it was trained and evaluated on. The win rate says how it compares"
        " with the baseline on those questions in the eyes of that judge; it was not tested for safety, for"
        " other languages or for other tasks. Read its answers before anyone relies on them, and respect the"
        " licences of the base model and of the data named above.\n"
    )


def _interval(rate: WinRate) -> str:
    return f"{100 * rate.ci_low:.1f} to {100 * rate.ci_high:.1f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"
