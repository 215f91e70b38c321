"""Runs the evaluation stage: collects every model's answers, has every judge compare them with the
baseline's, and writes the report.

`report/eval.json` is the report of the first judge; `report/second_opinions.json` lists the other judges'
reports (same record). `report/answers/<model>.jsonl` and `report/judgments/<judge>.jsonl` are in
Arena-Hard's formats. `report/reward_models.json` is written when reward models are evaluated on pairs,
`report/over_optimisation.json` when there is a proxy.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from evaluation.answers.local_answers import (
    EngineKeeper,
    ModelAnswer,
    file_name,
    generate,
    model_config,
    model_kind,
    read_answers,
    write_answers,
)
from evaluation.answers.question_pictures import store_pictures
from evaluation.answers.remote_answers import answer_remotely, answering_metrics
from evaluation.judges.factory import (
    judge_names,
    judges_with_verdicts,
    judging,
    load_reward_model,
    make_judge,
)
from evaluation.judges.offline import KnownAnswerJudge, RewardModelJudge, battles
from evaluation.judges.sequential import battles_in_turns
from evaluation.scores import over_optimisation, reward_accuracy
from evaluation.scores.arena_files import judgment_lines, token_counter
from evaluation.scores.reports import judging_metrics, make_reports, report_metrics
from evaluation.scores.style import style_of
from rlhf_core import config as configs
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import Document, answered, as_text, stored_suffix
from rlhf_core.data.questions import Question, cannot_see, load_questions
from rlhf_core.data.rows.columns import preference_of, tools_of
from rlhf_core.data.rows.mixture import placed_rows, unusable
from rlhf_core.data.sources import at
from rlhf_core.models.precision import stored_dtype
from rlhf_core.records import Answering, EvalReport, Judging, Judgment
from rlhf_core.runs.awaited_servers import require_servers
from rlhf_core.runs.metrics_log import Tracker
from rlhf_core.runs.run_dir import Outcome, RunDir, StageRequest
from rlhf_core.system.files import write_text

if TYPE_CHECKING:
    from rlhf_core.rollout.engine_contract import RolloutEngine

REPORT = "report"
REMOTE = "remote_answers"


def run(request: StageRequest, run: RunDir) -> Outcome:
    """Evaluates all models of the config. Reuses finished answers and verdicts of an earlier, killed
    attempt.

    Raises ValueError if questions or answers are invalid, or if too many answers or verdicts fail. Raises
    Unreachable, before any model answers, if a judge or an endpoint cannot be reached.
    """
    config = request.config
    assert isinstance(config, configs.Evaluation), f"evaluation got the config of a {config.stage} stage"
    questions = load_questions(config.questions, config.max_questions, request.seed)
    if any(question.pictures for question in questions):
        refused = list(cannot_see(config))
        if refused:
            raise ValueError(f"{config.questions.path}: " + "; ".join(refused))
    rule = rule_of(config, questions)
    require_servers(config.servers, readers_with_replies(config, run))
    store_pictures(run / REPORT, questions)
    answers, answering = answer_all(request, config, run, questions)
    texts = {model: [answer.text for answer in given] for model, given in answers.items()}
    judgments, use = judge_all(request, config, run, questions, texts)
    about = about_answers(answers, questions, rule)
    styles = {
        (model, answer.uid): style_of(answer.metadata) for model, given in answers.items() for answer in given
    }
    made = make_reports(judgments, config.baseline, styles, about, use, config.bootstrap_rounds, request.seed)
    reports = [report.model_copy(update={"answering": answering}) for report in made]
    metrics = {"questions": float(len(questions))}
    if config.proxy:
        judged = judgments[reports[0].judge]
        found = over_optimisation_of(request, config, questions, texts, judged, reports[0])
        write_text(run / REPORT / over_optimisation.FILE, found.model_dump_json(indent=2))
        metrics |= over_optimisation.metrics(found)
    if config.reward_evaluation:
        reward_models = evaluate_reward_models(request, config, config.reward_evaluation)
        write_text(run / REPORT / reward_accuracy.REWARD_MODELS, reward_models.model_dump_json(indent=2))
        metrics |= reward_accuracy.metrics(reward_models)
    write_reports(run, reports)
    metrics |= report_metrics(reports[0])
    for report in reports:
        metrics |= judging_metrics(report)
    metrics |= answering_metrics(answering)
    metrics |= {
        f"prompt_truncated/{model}": fmean(a.prompt_truncated for a in given)
        for model, given in answers.items()
    }
    tracker = Tracker(run, total_steps=1)
    tracker.log(1, metrics)
    tracker.close()
    print_win_rates(reports[0])
    return Outcome(metrics, {"report": REPORT})


def readers_with_replies(config: configs.Evaluation, run: RunDir) -> list[str]:
    """Returns the judges and endpoints with stored replies, under their names in messages."""
    answering = [f"the endpoint {name}" for name in config.endpoints if remote_file(run, name).is_file()]
    return answering + judges_with_verdicts(config.judges, run)


def remote_file(run: RunDir, model: str) -> Path:
    """Returns the file that stores the replies of a model behind an endpoint."""
    return run / REMOTE / f"{file_name(model)}.jsonl"


def rule_of(config: configs.Evaluation, questions: Sequence[Question]) -> KnownAnswerJudge | None:
    """Returns the first rule judge, or None if no judge is a rule. Raises ValueError, before any model
    answers, when a question has no known answer for the rule."""
    keys = [judge.answer_key for judge in config.judges if isinstance(judge, configs.RuleJudge)]
    if not keys:
        return None
    rule = KnownAnswerJudge("rule", keys[0])
    for question in questions:
        rule.known(question)
    return rule


def judge_all(
    request: StageRequest,
    config: configs.Evaluation,
    run: RunDir,
    questions: Sequence[Question],
    texts: Mapping[str, Sequence[str]],
) -> tuple[dict[str, list[Judgment]], dict[str, Judging]]:
    """Returns each judge's verdicts, requests and costs, by the judge's name. Writes the verdicts to
    `report/judgments/`."""
    judgments: dict[str, list[Judgment]] = {}
    use: dict[str, Judging] = {}
    for name, judge_config in judge_names(config.judges).items():
        with ExitStack() as stack:
            judge = make_judge(name, judge_config, request, config, run, stack)
            if isinstance(judge_config, configs.ChatJudge) and judge_config.interval_width is not None:
                width = judge_config.interval_width
                step = judge_config.sequential_questions
                judgments[name] = battles_in_turns(
                    judge, questions, texts, sides(config), width, step, request.seed
                )
            else:
                judgments[name] = battles(judge, questions, texts, sides(config))
        path = run / REPORT / "judgments" / f"{file_name(name)}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, judgment_lines(judgments[name]))
        use[name] = judging(judgments[name], judge, judge_config)
        del judge  # frees a reward model's memory before the next judge is loaded
    return judgments, use


def about_answers(
    answers: Mapping[str, Sequence[ModelAnswer]],
    questions: Sequence[Question],
    rule: KnownAnswerJudge | None,
) -> dict[str, dict[str, float]]:
    """Returns statistics of each model's answers for the reports: the fraction of right answers if there is a
    `rule`, the mean number of tokens, and the fraction of truncated answers."""
    right = {}
    if rule:
        for model, given in answers.items():
            right[model] = fmean(map(rule.right, questions, (answer.text for answer in given)))
    return {
        "right": right,
        "mean_tokens": {model: fmean(answer.tokens for answer in given) for model, given in answers.items()},
        "truncated": {
            model: fmean(answer.answer_truncated for answer in given) for model, given in answers.items()
        },
    }


def write_reports(run: RunDir, reports: Sequence[EvalReport]) -> None:
    """Writes the report of the first judge, and the reports of the others to a second file."""
    others = [report.model_dump(mode="json") for report in reports[1:]]
    write_text(run / REPORT / "second_opinions.json", json.dumps(others, indent=2))
    write_text(run / REPORT / "eval.json", reports[0].model_dump_json(indent=2))


def print_win_rates(report: EvalReport) -> None:
    """Prints each model's win rate against the baseline and its parent."""
    for rate in (*report.win_rates, *report.against_parent):
        share = f"win rate {rate.win_rate:.3f} [{rate.ci_low:.3f}, {rate.ci_high:.3f}] with ties as half"
        print(f"{rate.model} against {rate.baseline}: {rate.counted}, {share}, by {rate.judge}", flush=True)


def sides(config: configs.Evaluation) -> list[tuple[str, str]]:
    """Returns the (model, opponent) pairs: every model against the baseline, then against its parent if
    that is not the baseline."""
    parents = {
        model: parent
        for model, parent in (config.parents or {}).items()
        if parent not in (config.baseline, model)
    }
    models = [model for model in dict.fromkeys(config.models) if model != config.baseline]
    return [(model, config.baseline) for model in models] + [
        (model, parents[model]) for model in models if model in parents
    ]


def answer_all(
    request: StageRequest, config: configs.Evaluation, run: RunDir, questions: Sequence[Question]
) -> tuple[dict[str, list[ModelAnswer]], dict[str, Answering]]:
    """Returns the answers of the baseline and each model, by name, and the requests and costs of remote
    models.

    Reads complete files of an earlier attempt. A remote model's settings are part of the run directory's
    digest, so its file is also valid.
    """
    max_len = config.prompt_max_len + config.generate_max_len
    trust = request.trust_remote_code

    def open_sampler(path: str) -> RolloutEngine:
        print(f"starting {config.engine.kind} with {path}", flush=True)
        # imports the engine's library, which takes seconds, so only when needed
        from rlhf_core.rollout.engine_kinds import open_engine

        dtype = stored_dtype(model_config(path, max_len, trust)) if config.dtype == "auto" else config.dtype
        return open_engine(
            path,
            config.engine,
            seed=request.seed,
            max_model_len=max_len,
            dtype=dtype,
            trust_remote_code=trust,
            pictures=any(question.pictures for question in questions),
        )

    count = token_counter(config.style_tokenizer) if config.style_tokenizer else None
    engine = EngineKeeper(open_sampler)
    answers: dict[str, list[ModelAnswer]] = {}
    answering: dict[str, Answering] = {}
    try:
        models = list(dict.fromkeys((config.baseline, *config.models, *(config.parents or {}).values())))
        for place, model in enumerate(models, 1):
            file = run / REPORT / "answers" / f"{file_name(model)}.jsonl"
            if model in config.endpoints:
                known = remote_file(run, model)
                answers[model], answering[model] = answer_remotely(model, config, questions, known, count)
                write_answers(file, model, questions, answers[model])
                continue
            found = read_answers(file, questions)
            if found is None:
                path = request.inputs[model]
                start = time.monotonic()
                renderer = Renderer(
                    load_tokenizer(path, trust),
                    config.template,
                    stored_suffix(path),
                    template_args=config.template_args,
                )
                sampler = engine.with_model(path, model_kind(model_config(path, max_len, trust), renderer))
                found = generate(sampler, renderer, questions, config, request.seed)
                if count is not None:
                    found = [replace(answer, tokens=count(answer.text)) for answer in found]
                write_answers(file, model, questions, found)
                took = f"{model}: {len(found)} answers in {time.monotonic() - start:.1f} s"
                print(f"{took} ({place} of {len(models)} models)", flush=True)
            answers[model] = found
    finally:
        engine.close()
    return answers, answering


def over_optimisation_of(
    request: StageRequest,
    config: configs.Evaluation,
    questions: Sequence[Question],
    texts: Mapping[str, Sequence[str]],
    judged: Sequence[Judgment],
    report: EvalReport,
) -> over_optimisation.OverOptimisation:
    """Returns the proxy's scores and the KL of every judged model's answers, with the first judge's win
    rates."""
    # imports torch's model code, so only when needed
    from evaluation.answers.kl import log_ratios

    assert config.proxy is not None
    models = [config.baseline, *(model for model in config.models if model != config.baseline)]
    ratios = log_ratios(
        questions,
        {model: texts[model] for model in models},
        request.inputs,
        config,
        request.trust_remote_code,
    )
    scorer, renderer = load_reward_model(config.proxy, request, config, config)
    judge = RewardModelJudge(
        "proxy", scorer.score, renderer, 0.0, config.prompt_max_len, config.generate_max_len
    )
    uids = [question.uid for question in questions]
    measured = {}
    for model in models:
        scores = np.array(
            scorer.score([judge.document(*pair) for pair in zip(questions, texts[model], strict=True)])
        )
        half = np.full(len(questions), 0.5)
        battles = (
            half
            if model == config.baseline
            else over_optimisation.battle_scores(judged, model, config.baseline, uids)
        )
        measured[model] = over_optimisation.QuestionValues(ratios[model], scores, battles)
    rates = {rate.model: rate for rate in report.win_rates}
    return over_optimisation.curve(
        config.proxy, config.baseline, measured, rates, config.bootstrap_rounds, request.seed
    )


def evaluate_reward_models(
    request: StageRequest, config: configs.Evaluation, wanted: configs.RewardEvaluation
) -> reward_accuracy.RewardReports:
    """Returns the reports of all reward models on the same held-out pairs. Prompts and answers are truncated
    in the same way as for a judge of kind reward.

    Raises ValueError when no pair has two different answers.
    """
    placed = sorted(placed_rows(wanted.data, request.seed, "preference"), key=lambda each: each.place)
    rows = [each.located for each in placed if not unusable(each.located, "preference")]
    found = [(row, preference_of(row)) for row in rows]
    found = [(row, pair) for row, pair in found if pair.chosen != pair.rejected]
    if not found:
        raise ValueError(
            "reward_evaluation.data: chosen and rejected are identical in every row: give pairs that differ"
        )
    differences = {}
    pairs = None
    for name in dict.fromkeys(wanted.models):
        scorer, renderer = load_reward_model(name, request, config, wanted.data)
        documents: list[Document] = []
        for row, pair in found:
            tools = tools_of(row)
            limit = config.prompt_max_len
            prompt, _ = at(row.where, renderer.document_within, pair.prompt, limit, tools)
            tokens = list(prompt.tokens)
            whole = [
                answered(tokens, renderer.response_tokens(pair.prompt, text, tools), prompt.pictures)
                for text in (pair.chosen, pair.rejected)
            ]
            documents += [document.cut(len(prompt) + config.generate_max_len) for document in whole]
        scores = np.array(scorer.score(documents)).reshape(-1, 2)
        differences[name] = scores[:, 0] - scores[:, 1]
        if pairs is None:  # lengths according to the first model's tokenizer
            lengths = np.array([sum(document.mask) for document in documents]).reshape(-1, 2)
            prompts = [as_text(pair.prompt) for _, pair in found]
            subsets = [str(row.row.get(wanted.subset_key) or "all") for row, _ in found]
            pairs = reward_accuracy.HeldOutPairs(prompts, subsets, lengths[:, 0], lengths[:, 1])
    assert pairs is not None
    return reward_accuracy.evaluate(pairs, differences, wanted.bins)
