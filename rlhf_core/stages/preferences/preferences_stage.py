"""Creates one round of training data: samples n answers for each prompt, scores them and turns them into rows
(`post_processor`).

A policy with rewards in its prompts (conditional SFT) receives each prompt with the best reward; rows and
reward sources receive the plain prompts. Sampling, scoring and judging run one after another, so that each
can use the whole device. Sampled answers survive if the process is killed (see `sample_answers.py`). An
answer's score is the weighted sum of its rewards; an answer is left out if any source fails.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean, pstdev
from typing import cast

from transformers import PreTrainedTokenizerBase

from rlhf_core.config import Preferences
from rlhf_core.config.rewarding.judge_reward import JudgeReward
from rlhf_core.config.rewards import ModelReward
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.data_report import JSON, write_data_report
from rlhf_core.data.documents import Document, Prompt, compact, stored_suffix
from rlhf_core.data.pictures.picture_files import PICTURES
from rlhf_core.data.prompt_rows import has_pictures
from rlhf_core.data.sources import prompts as load_prompts
from rlhf_core.environments.verifiers.verifier_checks import require_verifiable
from rlhf_core.hub.positions import require_positions, stored_config
from rlhf_core.rewards.batch import reward_batch, terms_of
from rlhf_core.rewards.combine import Combined
from rlhf_core.rewards.judge.label_agreement import JUDGE_CACHE, agreement_metrics
from rlhf_core.rewards.own_tokens import OwnTokens, writers
from rlhf_core.rewards.reward_contract import Sample
from rlhf_core.rewards.reward_trial import try_rewards
from rlhf_core.rollout.engine_contract import SampledAnswer
from rlhf_core.runs.awaited_servers import require_servers
from rlhf_core.runs.run_dir import Outcome, RunDir, StageRequest
from rlhf_core.stages.preferences.post_process import post_process
from rlhf_core.stages.preferences.round_judge import round_judge
from rlhf_core.stages.preferences.row_pictures import messages_of_row
from rlhf_core.stages.preferences.sample_answers import answers_of_round
from rlhf_core.system.files import write_text

WHY_NONE = {
    "dpo": "answers of equal score or text: raise temperature or n_samples_per_prompt",
    "kto": "answers of equal score: raise temperature or n_samples_per_prompt",
    "rejection_sampling": "no whole answer that scores min_reward: lower it, or raise generate_max_len",
    "conditional_sft": "no whole answer: raise generate_max_len",
}


def run(request: StageRequest, run: RunDir) -> Outcome:
    """Runs the stage. Writes `pairs.jsonl` (`PreferencePair`) if the post-processor is dpo, otherwise
    `answers.jsonl` (`ScoredAnswer`, `LabelledAnswer`)."""
    config = cast(Preferences, request.config)
    terms_of(config.reward, request.inputs)  # reports missing inputs before any work
    policy = request.inputs[config.policy]
    require_positions(policy, stored_config(policy), config.prompt_max_len + config.generate_max_len)
    tokenizer = load_tokenizer(policy, request.trust_remote_code)
    own_tokens = own_tokens_of(request, config, policy)
    renderer = Renderer(tokenizer, config.prompts.template, template_args=config.prompts.template_args)
    data = load_prompts(config.prompts, renderer, config.prompt_max_len, request.seed)
    write_data_report(run, request.name, prompts=data.report)
    has_pictures(config, data.items, own_tokens)
    prompts = slice_of_round(data.items, config.first_prompt, config.num_prompts, request.seed)
    require_verifiable(config.reward, prompts)
    try_rewards(config.reward, prompts, renderer)
    require_servers(config.servers, judges_with_verdicts(config, run))
    agreement = agreement_metrics(
        config.reward,
        config.max_failed_rewards,
        run / JUDGE_CACHE,
        request.seed,
        partial(round_judge, config, request),
    )
    prompt_tokens = conditioned(config, policy, tokenizer, prompts)
    pictures = [prompt.pictures for prompt in prompts]
    answers = answers_of_round(
        config,
        policy,
        prompt_tokens,
        renderer.stop_token_ids,
        request,
        run,
        pictures if any(pictures) else (),
    )
    texts = [
        [tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in group] for group in answers
    ]

    print("scoring the answers", flush=True)
    combined = rewards_of(request, config, tokenizer, prompts, answers, texts, own_tokens, run)
    scores = combined.rewards.where(combined.scored, math.nan).view(len(prompts), -1).tolist()

    finished = [[answer.finished for answer in group] for group in answers]
    made = post_process(
        config.post_processor,
        [messages_of_row(prompt, run.path) for prompt in prompts],
        texts,
        scores,
        finished,
        config.min_reward,
    )
    if not made.rows:
        raise ValueError(f"all {len(prompts)} prompts gave {WHY_NONE[config.post_processor]}")
    output = "pairs" if config.post_processor == "dpo" else "answers"
    file = f"{output}.jsonl"
    write_text(run / file, "".join(row.model_dump_json() + "\n" for row in made.rows))
    metrics = {
        "prompts": float(len(prompts)),
        output: float(len(made.rows)),
        **{f"dropped/{why}": float(count) for why, count in made.dropped.items()},
        **combined.metrics,
        **reward_metrics(scores),
        **length_metrics(prompts, answers),
        **agreement,
    }
    write_text(run / "metrics.jsonl", json.dumps({"step": 1, **metrics}) + "\n")
    outputs = {output: file, "data_report": JSON}
    if any(pictures):
        outputs["pictures"] = PICTURES
    return Outcome(metrics | data.report.metrics("data"), outputs)


def judges_with_verdicts(config: Preferences, run: RunDir) -> list[str]:
    """Returns the judges that have verdicts from an earlier attempt, with the names used in messages."""
    judges = [source for source in config.reward if isinstance(source, JudgeReward)]
    return [
        f"the reward {judge.title}"
        for judge in judges
        if (run / JUDGE_CACHE / f"{judge.title}.jsonl").is_file()
    ]


def own_tokens_of(request: StageRequest, config: Preferences, policy: str) -> dict[str, OwnTokens]:
    """Returns a re-tokeniser, keyed by title, for each reward model whose tokenizer differs from the
    policy's."""
    reward_models = {
        source.title: request.inputs[source.model]
        for source in config.reward
        if isinstance(source, ModelReward)
    }
    return writers(policy, reward_models, request.trust_remote_code)


def slice_of_round(prompts: Sequence[Prompt], first: int, count: int | None, seed: int) -> list[Prompt]:
    """Returns `count` prompts of one seeded shuffle, starting at position `first`. Wraps around at the
    end."""
    order = list(range(len(prompts)))
    random.Random(seed).shuffle(order)
    return [prompts[order[(first + i) % len(order)]] for i in range(min(count or len(order), len(order)))]


def conditioned(
    config: Preferences, policy: str, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]
) -> list[list[int]]:
    """Returns the tokens of the prompts. Adds the best reward to each prompt if the policy has rewards in its
    prompts."""
    suffix = stored_suffix(policy)
    if not suffix:
        return [prompt.tokens for prompt in prompts]
    if any(prompt.pictures for prompt in prompts):
        raise ValueError(
            f"the prompts have images, and {policy} was trained with rewards in prompts of text alone: drop"
            " the images, or name another policy"
        )
    renderer = Renderer(
        tokenizer, config.prompts.template, suffix, template_args=config.prompts.template_args
    )
    return [renderer.prompt_within(prompt.messages, config.prompt_max_len)[0] for prompt in prompts]


def rewards_of(
    request: StageRequest,
    config: Preferences,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[SampledAnswer]],
    texts: Sequence[Sequence[str]],
    own_tokens: Mapping[str, OwnTokens],
    run: RunDir,
) -> Combined:
    """Returns the weighted sums of the rewards of all answers, in prompt order."""
    documents = [
        _document(prompt, answer) for prompt, group in zip(prompts, answers, strict=True) for answer in group
    ]
    samples = [
        Sample(
            prompt.messages,
            text,
            prompt.row,
            answer.finished,
            str(tokenizer.decode(_document(prompt, answer).tokens)),
        )
        for prompt, group, said in zip(prompts, answers, texts, strict=True)
        for answer, text in zip(group, said, strict=True)
    ]
    scores_of = None
    if config.engine.num_engines > 1:
        from rlhf_core.stages.preferences.score_answers import scores_on_ranks  # importing Ray takes seconds

        scores_of = partial(scores_on_ranks, config, trust_remote_code=request.trust_remote_code)
    return reward_batch(
        config.reward,
        request.inputs,
        documents,
        samples,
        config.max_failed_rewards,
        config.scoring_pass.rows,
        request.trust_remote_code,
        config.dtype,
        scores_of,
        own_tokens,
        run / JUDGE_CACHE,
        config.n_samples_per_prompt,
        partial(round_judge, config, request),
        config.scoring_pass.tokens,
    )


def reward_metrics(scores: Sequence[Sequence[float]]) -> dict[str, float]:
    """Returns metrics of the weighted sums of each prompt's answers, in the form in which they are compared
    and written. A nan means that there is no reward."""
    given = [[value for value in group if not math.isnan(value)] for group in scores]
    flat = [value for group in given for value in group]
    groups = [group for group in given if group]
    return {
        "reward/mean": fmean(flat),
        "reward/std": pstdev(flat),
        "reward/best": fmean(map(max, groups)),
        "reward/worst": fmean(map(min, groups)),
        "reward/failed": float(sum(map(len, scores)) - len(flat)),
    }


def length_metrics(prompts: Sequence[Prompt], answers: Sequence[Sequence[SampledAnswer]]) -> dict[str, float]:
    """Returns the mean number of tokens per answer, and the fractions of truncated answers and prompts."""
    given = [answer for group in answers for answer in group]
    return {
        "response/length": sum(len(answer.tokens) for answer in given) / len(given),
        "response/truncated": sum(not answer.finished for answer in given) / len(given),
        "prompt/truncated": sum(prompt.truncated for prompt in prompts) / len(prompts),
    }


def _document(prompt: Prompt, answer: SampledAnswer) -> Document:
    return compact(prompt.tokens, answer.tokens, pictures=prompt.pictures)
