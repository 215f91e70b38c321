"""The evaluation stage: every model answers, every judge decides against the baseline, the scores become a report.

`report/eval.json` is the report of the first judge, `report/second_opinions.json` the list of the others' (same record);
`report/answers/<model>.jsonl` and `report/judgments/<judge>.jsonl` are in Arena-Hard's formats.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from evaluation.answers import (
    Engine,
    ModelAnswer,
    file_name,
    generate,
    model_config,
    model_kind,
    read_answers,
    stored_dtype,
    write_answers,
)
from evaluation.judge import Judge, RewardJudge, RuleJudge, battles
from evaluation.openai_judge import OpenAIJudge
from evaluation.questions import Question, load_questions
from evaluation.scoring import agreement, win_rate
from rlhf_core import config as configs
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.condition import stored_suffix
from rlhf_core.stage import Outcome, RunDir, StageRequest, write_text
from rlhf_core.tracking import Tracker
from rlhf_core.types import EvalReport, Judgment

if TYPE_CHECKING:
    from rlhf_core.rollout.engine import Sampler

REPORT, CACHE = "report", "judge_cache"
Answers = Mapping[str, Sequence[ModelAnswer]]


def run(request: StageRequest, run: RunDir) -> Outcome:
    """Evaluates all models of the config. Finished answers and verdicts of an earlier, killed attempt are used again."""
    config = request.config
    assert isinstance(config, configs.Evaluation), f"evaluation got the config of a {config.stage} stage"
    questions = load_questions(config.questions, config.max_questions, request.seed)
    rule = next((RuleJudge("rule", judge.answer_key) for judge in config.judges if isinstance(judge, configs.RuleJudge)), None)
    if rule is not None:
        for question in questions:
            rule.known(question)  # a missing answer is told before any model is asked

    answers = answer_all(request, config, run, questions)
    judgments: dict[str, list[Judgment]] = {}
    metrics: dict[str, float] = {"questions": float(len(questions))}
    texts = {model: [answer.text for answer in given] for model, given in answers.items()}
    for name, judge_config in judge_names(config.judges).items():
        judge = make_judge(name, judge_config, request, config, run)
        judgments[name] = battles(judge, questions, texts, config.baseline)
        path = run / REPORT / "judgments" / f"{file_name(name)}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(judgment.model_dump_json() + "\n" for judgment in judgments[name]))
        if isinstance(judge, OpenAIJudge):
            metrics |= {f"judge_input_tokens/{name}": judge.input_tokens, f"judge_output_tokens/{name}": judge.output_tokens}

    right = {model: fmean(map(rule.right, questions, given)) for model, given in texts.items()} if rule else {}
    reports = make_reports(config, judgments, answers, right, request.seed)
    write_text(run / REPORT / "second_opinions.json", json.dumps([r.model_dump(mode="json") for r in reports[1:]], indent=2))
    write_text(run / REPORT / "eval.json", reports[0].model_dump_json(indent=2))
    metrics |= report_metrics(reports[0])
    metrics |= {f"prompt_truncated/{model}": fmean(a.prompt_truncated for a in given) for model, given in answers.items()}
    tracker = Tracker(run, total_steps=1)
    tracker.log(1, metrics)
    tracker.close()
    for rate in reports[0].win_rates:
        bounds = f"[{rate.ci_low:.3f}, {rate.ci_high:.3f}]"
        print(f"{rate.model} against {rate.baseline}: {rate.win_rate:.3f} {bounds} by {rate.judge}", flush=True)
    return Outcome(metrics, {"report": REPORT})


def answer_all(
    request: StageRequest, config: configs.Evaluation, run: RunDir, questions: Sequence[Question]
) -> dict[str, list[ModelAnswer]]:
    """The answers of the baseline and of each model, by name; files of an earlier attempt that are whole are read."""
    max_len = config.prompt_max_len + config.generate_max_len
    trust = request.trust_remote_code

    def open_sampler(path: str) -> Sampler:
        from rlhf_core.rollout.engine import Sampler  # only when there is something to generate: importing vLLM takes seconds

        dtype = stored_dtype(model_config(path, max_len, trust)) if config.dtype == "auto" else config.dtype
        return Sampler(
            path,
            seed=request.seed,
            max_model_len=max_len,
            dtype=dtype,
            kv_cache_gib=config.vllm.kv_cache_gib,
            gpu_memory_utilization=config.vllm.gpu_memory_utilization,
            trust_remote_code=trust,
        )

    engine = Engine(open_sampler)
    answers: dict[str, list[ModelAnswer]] = {}
    try:
        for model in dict.fromkeys((config.baseline, *config.models)):
            file = run / REPORT / "answers" / f"{file_name(model)}.jsonl"
            found = read_answers(file, questions)
            if found is None:
                path, start = request.inputs[model], time.monotonic()
                renderer = Renderer(load_tokenizer(path, trust), config.template, stored_suffix(path))
                found = generate(
                    engine.with_model(path, model_kind(model_config(path, max_len, trust), renderer)),
                    renderer,
                    questions,
                    seed=request.seed,
                    temperature=config.temperature,
                    prompt_max_len=config.prompt_max_len,
                    generate_max_len=config.generate_max_len,
                )
                write_answers(file, model, questions, found)
                print(f"{model}: {len(found)} answers in {time.monotonic() - start:.1f} s", flush=True)
            answers[model] = found
    finally:
        engine.close()
    return answers


def judge_names(judges: Sequence[configs.Judge]) -> dict[str, configs.Judge]:
    """Judges by name: `rule`, the reward model's name, the chat model's name; a second one of the same name gets a number."""
    named: dict[str, configs.Judge] = {}
    for judge in judges:
        base = judge.reward if judge.kind == "reward" else judge.model if judge.kind == "openai" else "rule"
        names = (base, *(f"{base}-{number}" for number in range(2, len(judges) + 1)))
        named[next(name for name in names if name not in named)] = judge
    return named


def make_judge(name: str, judge: configs.Judge, request: StageRequest, config: configs.Evaluation, run: RunDir) -> Judge:
    """The judge of one judge config."""
    if isinstance(judge, configs.RuleJudge):
        return RuleJudge(name, judge.answer_key)
    if isinstance(judge, configs.RewardJudge):
        from rlhf_core.models.scoring import RewardScorer  # loads the reward model onto the device only when it judges

        path = request.inputs[judge.reward]
        reward_config = model_config(path, config.prompt_max_len + config.generate_max_len, request.trust_remote_code)
        scorer = RewardScorer(path, stored_dtype(reward_config), config.micro_rollout_batch_size, request.trust_remote_code)
        renderer = Renderer(load_tokenizer(path, request.trust_remote_code), config.template)
        return RewardJudge(name, scorer.score, renderer, judge.tie, config.prompt_max_len, config.generate_max_len)
    return OpenAIJudge(
        name,
        judge.model,
        judge.base_url,
        judge.api_key_env,
        run / CACHE / f"{file_name(name)}.jsonl",
        max_tokens=judge.max_tokens,
        concurrency=judge.concurrency,
        max_failed=judge.max_failed,
        timeout=judge.timeout,
        max_attempts=judge.max_attempts,
    )


def make_reports(
    config: configs.Evaluation, judgments: Mapping[str, Sequence[Judgment]], answers: Answers, right: dict[str, float], seed: int
) -> list[EvalReport]:
    """One report per judge, in the config's order."""
    reports = []
    for name, ours in judgments.items():
        models = dict.fromkeys(judgment.model for judgment in ours)
        agreements = {other: agreement(ours, theirs) for other, theirs in judgments.items() if other != name}
        reports.append(
            EvalReport(
                baseline=config.baseline,
                judge=name,
                win_rates=tuple(win_rate([j for j in ours if j.model == model], config.bootstrap_rounds, seed) for model in models),
                right=right,
                mean_tokens={model: fmean(answer.tokens for answer in given) for model, given in answers.items()},
                truncated={model: fmean(answer.answer_truncated for answer in given) for model, given in answers.items()},
                agreement={other: share for other, share in agreements.items() if share is not None},
            )
        )
    return reports


def report_metrics(report: EvalReport) -> dict[str, float]:
    """`win_rate/<model>`, `right/<model>`, ... of the deciding judge; `judge_agreement` is the mean over the other judges."""
    metrics: dict[str, float] = {}
    for rate in report.win_rates:
        metrics |= {f"win_rate/{rate.model}": rate.win_rate, f"ci_low/{rate.model}": rate.ci_low, f"ci_high/{rate.model}": rate.ci_high}
        metrics |= {f"swap_consistency/{rate.model}": rate.swap_consistency, f"failed_games/{rate.model}": float(rate.num_failed)}
    for name, values in (("right", report.right), ("length", report.mean_tokens), ("truncated", report.truncated)):
        metrics |= {f"{name}/{model}": value for model, value in values.items()}
    metrics |= {f"judge_agreement/{judge}": share for judge, share in report.agreement.items()}
    if report.agreement:
        metrics["judge_agreement"] = fmean(report.agreement.values())
    return metrics
