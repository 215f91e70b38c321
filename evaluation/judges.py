"""The judges of an evaluation's config: their names, how they are made, what they cost."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from evaluation.answers import file_name, model_config
from evaluation.chat_client import ChatClient, Connection, remote
from evaluation.judge import Judge, RewardJudge, RuleJudge
from evaluation.openai_judge import OpenAIJudge
from rlhf_core import config as configs
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.lineage import shown
from rlhf_core.models.dtype import stored_dtype
from rlhf_core.stage import RunDir, StageRequest, digest
from rlhf_core.types import Judging, Judgment

if TYPE_CHECKING:
    from rlhf_core.models.scoring import RewardScorer

CACHE, LOGS = "judge_cache", "servers"


def judge_names(judges: Sequence[configs.Judge]) -> dict[str, configs.Judge]:
    """Judges by name: `rule`, the reward model's name, the chat model's name; a second one of the same name gets a number."""
    named: dict[str, configs.Judge] = {}
    for judge in judges:
        base = _name(judge)
        names = (base, *(f"{base}-{number}" for number in range(2, len(judges) + 1)))
        named[next(name for name in names if name not in named)] = judge
    return named


def _name(judge: configs.Judge) -> str:
    if isinstance(judge, configs.RuleJudge):
        return "rule"
    if isinstance(judge, configs.RewardJudge):
        return judge.reward
    return shown(judge.model) if isinstance(judge, configs.VllmJudge) else judge.model


def make_judge(name: str, judge: configs.Judge, request: StageRequest, config: configs.Evaluation, run: RunDir, stack: ExitStack) -> Judge:
    """The judge of one judge config. A server that it needs is started with its first question and ends with `stack`."""
    if isinstance(judge, configs.RuleJudge):
        return RuleJudge(name, judge.answer_key)
    if isinstance(judge, configs.RewardJudge):
        scorer, renderer = load_reward_model(judge.reward, request, config, config.template)
        return RewardJudge(name, scorer.score, renderer, judge.tie, config.prompt_max_len, config.generate_max_len)
    if isinstance(judge, configs.VllmJudge):
        from evaluation.local import local_model, served  # only where a server is wanted

        trust = request.trust_remote_code
        model = local_model(f"judge {name}", request.inputs[judge.model], judge.dtype, judge.max_model_len, trust)
        _check_judge(name, judge, model.max_model_len, model.path, trust)
        cache_name, identity = f"{file_name(name)}-{digest(model.identity)[:8]}.jsonl", model.identity

        @functools.cache
        def connect() -> Connection:
            log = run / LOGS / f"{file_name(name)}.log"
            server = stack.enter_context(served(model, name, log, judge.vllm, request.seed, trust))
            return Connection(server.url, server.key, "", server.check, local=True)

        asked, per_minute = name, None
    else:  # a cache of this model at this endpoint, whatever a recipe calls it
        cache_name, identity = f"{file_name(judge.model)}-{digest(judge.base_url)[:8]}.jsonl", judge.model
        asked, per_minute = judge.model, judge.requests_per_minute
        connect = functools.cache(functools.partial(remote, judge.base_url, judge.api_key_env))
    shared = Path(judge.verdict_cache).expanduser() if judge.verdict_cache is not None else None
    cache = shared / cache_name if shared else run / CACHE / f"{file_name(name)}.jsonl"
    client = ChatClient(
        f"judge {name}",
        asked,
        connect,
        {"max_tokens": judge.max_tokens, "temperature": 0},
        concurrency=judge.concurrency,
        timeout=judge.timeout,
        max_attempts=judge.max_attempts,
        requests_per_minute=per_minute,
    )
    return OpenAIJudge(name, client, cache, identity=identity, max_failed=judge.max_failed)


def _check_judge(name: str, judge: configs.VllmJudge, max_model_len: int, path: str, trust_remote_code: bool) -> None:
    if judge.max_tokens >= max_model_len:
        raise ValueError(
            f"judge {name}: max_tokens={judge.max_tokens} leaves no room for a prompt among its {max_model_len} tokens: lower it"
        )
    if load_tokenizer(path, trust_remote_code).chat_template is None:
        raise ValueError(f"judge {name}: its tokenizer has no chat template, and a judge is asked in a chat: name a chat model")


def load_reward_model(name: str, request: StageRequest, config: configs.Evaluation, template: str) -> tuple[RewardScorer, Renderer]:
    """A reward model on the device, and the renderer of its texts."""
    from rlhf_core.models.scoring import RewardScorer  # only when there is something to score

    path = request.inputs[name]
    reward_config = model_config(path, config.prompt_max_len + config.generate_max_len, request.trust_remote_code)
    scorer = RewardScorer(path, stored_dtype(reward_config), config.micro_rollout_batch_size, request.trust_remote_code)
    return scorer, Renderer(load_tokenizer(path, request.trust_remote_code), template)


def judging(judged: Sequence[Judgment], judge: Judge, config: configs.Judge) -> Judging:
    """What a judge was asked, and what it cost."""
    games = [game for judgment in judged for game in judgment.games]
    found = Judging(
        questions=len({judgment.uid for judgment in judged}),
        games=sum(game.score is not None for game in games),
        failed=sum(game.score is None for game in games),
    )
    if not isinstance(judge, OpenAIJudge):
        return found
    cost = cost_of(config, judge.input_tokens, judge.output_tokens) if isinstance(config, configs.Remote) else None
    tokens = {"requests": judge.requests, "input_tokens": judge.input_tokens, "output_tokens": judge.output_tokens}
    return found.model_copy(update={**tokens, "cost": cost})


def cost_of(remote: configs.Remote, input_tokens: int, output_tokens: int) -> float | None:
    """US dollars; None when the prices are not known."""
    if remote.input_price is None or remote.output_price is None:
        return None
    return (input_tokens * remote.input_price + output_tokens * remote.output_price) / 1e6
