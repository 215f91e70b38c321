"""Loads lm-eval's tasks, runs them against a local vLLM server, and converts the results to our records.

lm-eval is imported only if a model must be measured. It sends token ids from the checkpoint's own tokenizer
to the server's completions endpoint, so that prompts and log-probs match the model. Prompts start with BOS if
the tokenizer adds it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

from evaluation.alignment_tax.tax_report import ModelScores, Score, TaskScores
from evaluation.answers.served_models import LocalModel
from rlhf_core.config import AlignmentTax
from rlhf_core.config.judging.lm_eval_tasks import is_path, located, read_task, task_name
from rlhf_core.data.chat import load_tokenizer
from rlhf_core.data.chat.template_arguments import refuse_unread
from rlhf_core.recipe.sentences import unknown
from rlhf_core.rollout.vllm.vllm_server import Server

# tolerance for treating a metric as the mean over documents, whose values can then be compared one by one
SAME_MEAN = 1e-6


class MeasuredModel(NamedTuple):
    """The scores of one model. `rows` lists every document with the model's answer, for people to read."""

    scores: ModelScores
    rows: list[dict[str, Any]]


class Tasks:
    """The tasks of a recipe, loaded once before any server starts. `leaves` maps each task or group to the
    names of the individual tasks in it.

    The constructor raises ValueError when a task is unknown or its data cannot be loaded.
    """

    def __init__(self, tasks: Sequence[str], trust_code: bool):
        from lm_eval.tasks import TaskManager

        if not trust_code:
            close_templates()
        local = all(map(is_path, tasks))
        # indexing lm-eval's own tasks takes ten seconds
        self.manager = TaskManager(include_defaults=not local)
        self.specs = [self._spec(task, trust_code) for task in tasks]
        self.leaves = {
            task_name(task): self._load(task, spec) for task, spec in zip(tasks, self.specs, strict=True)
        }

    def _spec(self, task: str, trust_code: bool) -> str | dict[str, Any]:
        if not is_path(task):
            known = self.manager.all_tasks
            if task not in known:
                what = unknown(task, known, "task")
                if len(what) >= 300:
                    what = f"lm-eval has no task {task!r}; `lm-eval ls tasks` lists all tasks"
                raise ValueError(f"tasks: {what}")
            return task
        from lm_eval.tasks._yaml_loader import load_yaml

        file = read_task(task, trust_code).files[0]
        spec: dict[str, Any] = load_yaml(file) | {"task": task_name(task)}
        if not trust_code and (foreign := _foreign_metrics(spec)):
            raise ValueError(
                f"tasks: lm-eval has no metric {', '.join(foreign)}, and would run code from the Hub for it:"
                f" correct metric_list in {task}, or set trust_task_code to true"
            )
        arguments = dict(spec.get("dataset_kwargs") or {})
        if "data_files" in arguments:
            arguments["data_files"] = located(arguments["data_files"], file.parent)
        return spec | ({"dataset_kwargs": arguments} if arguments else {})

    def _load(self, task: str, spec: str | dict[str, Any]) -> list[str]:
        try:
            return list(self.manager.load([copy.deepcopy(spec)])["tasks"])
        except ModuleNotFoundError:
            raise
        except (
            Exception
        ) as error:  # from datasets, the Hub's client, the network, Jinja, ...; each becomes one sentence
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if is_path(task):
                raise ValueError(f"tasks: {task} cannot be loaded ({why}): correct the file") from error
            raise ValueError(
                f"tasks: the data of {task} cannot be loaded ({why}): lm-eval loads it from the Hub, so this"
                " machine must reach the Hub or have the data in its cache; a task YAML with local"
                " data_files needs neither"
            ) from error


def close_templates() -> None:
    """Makes lm-eval render the Jinja templates of tasks in Jinja's sandbox, because a template could
    otherwise run any Python code."""
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import utils

    own = utils.env
    utils.env = SandboxedEnvironment(
        loader=own.loader, undefined=own.undefined, keep_trailing_newline=own.keep_trailing_newline
    )
    utils.env.filters |= own.filters


def _foreign_metrics(spec: Mapping[str, Any]) -> list[str]:
    """Returns the metrics of a task that lm-eval would load as code from the Hub (`evaluate`)."""
    import lm_eval.api.metrics  # noqa: F401 registers its own
    from lm_eval.api.registry import metric_registry

    entries = [entry for entry in spec.get("metric_list") or [] if isinstance(entry, dict)]
    return [
        str(entry.get("metric"))
        for entry in entries
        if entry.get("hf_evaluate") or entry.get("metric") not in metric_registry
    ]


def measure(
    name: str,
    served: LocalModel,
    server: Server,
    tasks: Tasks,
    config: AlignmentTax,
    seed: int,
    trust_remote_code: bool,
) -> MeasuredModel:
    """Runs all tasks on the model that `server` serves, and returns its scores.

    Raises ValueError when the recipe sets chat_template but the tokenizer has no template, or its template
    ignores an argument in template_args. Raises ServerFailed when the server has died.
    """
    import lm_eval
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    tokenizer = load_tokenizer(served.path, trust_remote_code)
    if config.chat_template and tokenizer.chat_template is None:
        raise ValueError(
            f"chat_template is set, but the tokenizer of {name} has none: leave it out, or name chat models"
            " only"
        )
    refuse_unread(str(tokenizer.chat_template), config.template_args, name)
    starts = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    model = LocalCompletionsAPI(
        base_url=f"{server.url}/completions",
        model=server.model,
        tokenizer=served.path,
        tokenizer_backend="huggingface",
        header={"Authorization": f"Bearer {server.key}"},
        add_bos_token=starts and not config.chat_template,  # a chat template adds BOS itself
        num_concurrent=config.concurrency,
        batch_size=config.batch_size,
        max_length=server.max_model_len,
        max_gen_toks=config.max_gen_toks,
        timeout=math.ceil(config.timeout),
        seed=seed,
        trust_remote_code=trust_remote_code,
    )
    give_arguments(model, config.template_args)
    try:
        found = lm_eval.simple_evaluate(
            model,
            tasks=copy.deepcopy(tasks.specs),
            task_manager=tasks.manager,
            num_fewshot=config.num_fewshot,
            limit=config.limit,
            bootstrap_iters=config.bootstrap_rounds,
            apply_chat_template=config.chat_template,
            fewshot_as_multiturn=config.chat_template,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
    except Exception:
        server.check()  # raises the server's own error if it died
        raise
    assert found is not None
    scores = scores_of(found, tasks.leaves)
    return MeasuredModel(
        ModelScores(model=name, identity=served.identity, tasks=scores, lm_eval=lm_eval.__version__),
        rows_of(found["samples"]),
    )


def give_arguments(model: Any, template_args: Mapping[str, Any]) -> None:
    """Makes lm-eval's `model` pass these arguments to its tokenizer's chat template, for which lm-eval has no
    option."""
    if template_args:
        model.tokenizer.apply_chat_template = partial(model.tokenizer.apply_chat_template, **template_args)


def scores_of(found: Mapping[str, Any], leaves: Mapping[str, Sequence[str]]) -> dict[str, TaskScores]:
    """Converts lm-eval's results to scores by task. A group gets the metrics that all of its tasks report,
    averaged over all documents."""
    scores = {}
    for task, names in leaves.items():
        parts = [_leaf(name, found) for name in names]
        shared = [metric for metric in parts[0].metrics if all(metric in part.metrics for part in parts)]
        sizes = [part.documents for part in parts]
        metrics = {metric: _pooled([part.metrics[metric] for part in parts], sizes) for metric in shared}
        scores[task] = TaskScores(metrics=metrics, documents=sum(sizes))
    return scores


def rows_of(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Returns one row per document and filter: prompt, response, target and metrics."""
    rows = []
    for task, found in samples.items():
        for sample in found:
            shown = {
                "task": task,
                "doc_id": sample["doc_id"],
                "filter": sample["filter"],
                "prompt": _first(sample["arguments"]),
            }
            values = {metric: _number(sample.get(metric)) for metric in sample["metrics"]}
            rows.append(
                shown | {"target": sample["target"], "response": sample["filtered_resps"], "metrics": values}
            )
    return rows


def _leaf(name: str, found: Mapping[str, Any]) -> TaskScores:
    result = found["results"][name]
    samples = found["samples"][name]
    better = found["higher_is_better"].get(name, {})
    metrics = {}
    for key, value in result.items():
        metric, comma, filtered = key.partition(",")
        if not comma or metric.endswith("_stderr") or _number(value) is None:
            continue
        values = {
            f"{name}/{s['doc_id']}/{s['doc_hash'][:16]}": _number(s.get(metric))
            for s in samples
            if s["filter"] == filtered
        }
        known = {document: number for document, number in values.items() if number is not None}
        is_mean = len(known) == len(values) > 0 and abs(fmean(known.values()) - value) < SAME_MEAN
        metrics[key] = Score(
            value=float(value),
            stderr=_number(result.get(f"{metric}_stderr,{filtered}")),
            higher_is_better=better.get(metric) is not False,
            documents=known if is_mean else None,
        )
    return TaskScores(metrics=metrics, documents=len({sample["doc_id"] for sample in samples}))


def _pooled(scores: Sequence[Score], sizes: Sequence[int]) -> Score:
    total = sum(sizes)
    errors = [score.stderr for score in scores]
    variance = sum(
        (size * error) ** 2 for size, error in zip(sizes, errors, strict=True) if error is not None
    )
    documents: dict[str, float] | None = {}
    for score in scores:
        documents = (
            documents | score.documents if documents is not None and score.documents is not None else None
        )
    return Score(
        value=sum(size * score.value for size, score in zip(sizes, scores, strict=True)) / total,
        stderr=None if None in errors else math.sqrt(variance) / total,
        higher_is_better=scores[0].higher_is_better,
        documents=documents,
    )


def _number(value: Any) -> float | None:
    """Returns `value` as a finite float (it may be a numpy scalar or boolean), or None for 'N/A', lists and
    missing values."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) and not isinstance(value, str) else None


def _first(arguments: Any) -> str:
    """Returns the prompt of a sample's first request. Reads both layouts of arguments that lm-eval uses."""
    first = next(iter(arguments.values())) if isinstance(arguments, dict) else arguments[0]
    return str(next(iter(first.values())) if isinstance(first, dict) else first[0])
