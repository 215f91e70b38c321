"""Creates the judges of an evaluation's config, and reports their requests and costs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from evaluation.answers.local_answers import file_name, model_config
from evaluation.judges.chat_judge import LlmJudge
from evaluation.judges.offline import Judge, KnownAnswerJudge, RewardModelJudge
from rlhf_core import config as configs
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.chat.template_arguments import read_arguments
from rlhf_core.hub.ids import shown
from rlhf_core.judging.chat_client import ChatClient, Connection, cost_of, remote
from rlhf_core.models.precision import stored_dtype
from rlhf_core.records import Judging, Judgment
from rlhf_core.runs.run_dir import RunDir, StageRequest
from rlhf_core.system.files import digest

if TYPE_CHECKING:
    from rlhf_core.models.reward_scoring import RewardScorer

CACHE = "judge_cache"
LOGS = "servers"
JudgingStage = configs.Evaluation | configs.Calibration  # the config of a stage with judges


def judge_names(judges: Sequence[configs.Judge]) -> dict[str, configs.Judge]:
    """Returns judges by name: `rule`, the reward model's name, or the chat model's name. Later judges with
    the same name get a number."""
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


def make_judge(
    name: str,
    judge: configs.Judge,
    request: StageRequest,
    config: JudgingStage,
    run: RunDir,
    stack: ExitStack,
) -> Judge:
    """Returns the judge for one judge config. A local server starts with the judge's first request and ends
    with `stack`.

    Raises ValueError when a local judge's model is too short or has no chat template.
    """
    if isinstance(judge, configs.RuleJudge):
        return KnownAnswerJudge(name, judge.answer_key)
    if isinstance(judge, configs.RewardJudge):
        scorer, renderer = load_reward_model(judge.reward, request, config, config)
        return RewardModelJudge(
            name, scorer.score, renderer, judge.tie, config.prompt_max_len, config.generate_max_len
        )
    if isinstance(judge, configs.VllmJudge):
        # slow to import, and only local judges need it
        from evaluation.answers.served_models import local_model, served
        from rlhf_core.rollout.chat_models import require_room, require_template

        trust = request.trust_remote_code
        model = local_model(f"judge {name}", request.inputs[judge.model], judge, run, trust)
        require_room(f"judge {name}", judge.max_tokens, model.max_model_len)
        require_template(f"judge {name}", load_tokenizer(model.path, trust))
        cache_name = f"{file_name(name)}-{digest(model.identity)[:8]}.jsonl"
        identity = model.identity

        @functools.cache
        def connect() -> Connection:
            log = run / LOGS / f"{file_name(name)}.log"
            server = stack.enter_context(served(model, name, log, judge.engine, request.seed, trust))
            return Connection(server.url, server.key, "", server.check, local=True)

        model_name = name
    else:
        cache_name = remote_cache_name(judge)
        identity = judge.model
        model_name = judge.model
        connect = functools.cache(functools.partial(remote, judge))
    cache = cache_of(name, judge, cache_name, run)
    client = ChatClient(
        f"judge {name}", model_name, connect, {"max_tokens": judge.max_tokens, "temperature": 0}, judge
    )
    return LlmJudge(name, client, cache, identity, judge.max_failed)


def remote_cache_name(judge: configs.OpenAIJudge) -> str:
    """Returns the name of a judge's file in a shared cache. The name depends only on model and endpoint, so
    that recipes with other names for the judge share the file."""
    return f"{file_name(judge.model)}-{digest(judge.base_url)[:8]}.jsonl"


def cache_of(name: str, judge: configs.ChatJudge, cache_name: str, run: RunDir) -> Path:
    """Returns the file of a judge's verdicts: the file `cache_name` in the folder that evaluations share, or
    a file in the run directory."""
    if judge.verdict_cache is not None:
        return Path(judge.verdict_cache).expanduser() / cache_name
    return run / CACHE / f"{file_name(name)}.jsonl"


def judges_with_verdicts(judges: Sequence[configs.Judge], run: RunDir) -> list[str]:
    """Returns the remote judges that have verdicts of earlier attempts or evaluations, under their names in
    messages."""
    return [
        f"the judge {judge.model}"
        for name, judge in judge_names(judges).items()
        if isinstance(judge, configs.OpenAIJudge)
        and cache_of(name, judge, remote_cache_name(judge), run).is_file()
    ]


def load_reward_model(
    name: str, request: StageRequest, config: JudgingStage, rendering: JudgingStage | configs.Data
) -> tuple[RewardScorer, Renderer]:
    """Loads a reward model onto the device. Returns the model and the renderer for its inputs. The renderer
    has the template of `rendering`, and only the template arguments that the reward model's template
    reads."""
    # imports torch's model code, so only when needed
    from rlhf_core.models.reward_scoring import RewardScorer

    path = request.inputs[name]
    reward_config = model_config(
        path, config.prompt_max_len + config.generate_max_len, request.trust_remote_code
    )
    rows, tokens = config.scoring_pass
    scorer = RewardScorer(path, stored_dtype(reward_config), rows, request.trust_remote_code, tokens)
    tokenizer = load_tokenizer(path, request.trust_remote_code)
    arguments = read_arguments(tokenizer, rendering.template_args)
    return scorer, Renderer(tokenizer, rendering.template, template_args=arguments)


def judging(judged: Sequence[Judgment], judge: Judge, config: configs.Judge) -> Judging:
    """Returns a judge's counts of questions, games and requests, and its cost."""
    games = [game for judgment in judged for game in judgment.games]
    found = Judging(
        questions=len({judgment.uid for judgment in judged}),
        games=sum(game.score is not None for game in games),
        failed=sum(game.score is None for game in games),
    )
    if not isinstance(judge, LlmJudge):
        return found
    cost = cost_of(config, *judge.tokens) if isinstance(config, configs.Remote) else None
    tokens = dict(zip(("input_tokens", "output_tokens"), judge.tokens, strict=True))
    return found.model_copy(update={"requests": judge.client.requests, **tokens, "cost": cost})
