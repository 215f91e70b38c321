"""Calls each reward function once with made-up answers, a right one (if the data have it) and a wrong one, so
that a bug in it is reported before any work (rlhf_core/preflight/reward_functions.py) and before any engine
starts.

The stage ends only on an error that would occur in every call (see `UsersError.certain`). Other errors may be
due to the made-up answers and cause a warning. Verifiers are called in the same way. Servers and judges are
not asked for rewards, which may cost money (`runs/awaited_servers.py` checks that they can be reached); for a
judge, only the presence of its reference answer in the prompts' rows is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlhf_core.config.rewarding.judge_reward import JudgeReward
from rlhf_core.config.rewarding.verifiers import Verifier
from rlhf_core.config.rewards import FunctionReward, RewardSource
from rlhf_core.data.documents import Prompt
from rlhf_core.data.rows.required_columns import USUAL
from rlhf_core.rewards.functions.function import Function
from rlhf_core.rewards.reward_contract import CodeError, RewardError, Sample

if TYPE_CHECKING:  # chat imports transformers
    from rlhf_core.data.chat import Renderer

SECONDS = 30.0  # for a function's imports, and for its call
ANSWER = "This is an answer."


def made_up_answer(row: dict[str, Any]) -> str:
    """Returns the right answer of a row if a column with a usual name has one, otherwise a fixed sentence."""
    for column in ("answer", *USUAL["answer"]):
        value = row.get(column)
        if isinstance(value, str | int | float) and str(value).strip():
            return str(value)
    return ANSWER


def try_rewards(
    sources: Sequence[RewardSource],
    prompts: Sequence[Prompt],
    renderer: Renderer,
    eval_prompts: Sequence[Prompt] = (),
) -> None:
    """Tries all functions and verifiers of a stage on the first prompt, and checks that its judges have their
    references. Prints warnings. Raises ValueError for a function that cannot be loaded or whose code fails
    for every answer, and for a row without a judge's reference."""
    prompt = prompts[0]
    for source in sources:
        if isinstance(source, FunctionReward | Verifier):
            samples = [sample_of(prompt, text, renderer) for text in made_up_answers(prompt.row)]
            failed = call_once(source, samples, SECONDS)
            if failed:
                _warn(source, failed)
        elif isinstance(source, JudgeReward):
            require_references(source, "prompts", prompts)
            require_references(source, "eval_prompts", eval_prompts)


def made_up_answers(row: dict[str, Any]) -> list[str]:
    """Returns the right answer of a row, if it is known, and a fixed sentence."""
    return list(dict.fromkeys([made_up_answer(row), ANSWER]))


def sample_of(prompt: Prompt, text: str, renderer: Renderer) -> Sample:
    """Returns an answer to a prompt in the form passed to reward sources."""
    document = renderer.answer_tokens(prompt.tokens, text)
    return Sample(prompt.messages, text, prompt.row, True, renderer.decoded(document.tokens, False))


def call_once(source: FunctionReward | Verifier, samples: Sequence[Sample], seconds: float) -> str:
    """Calls a function or a verifier with made-up answers. Returns the failure that these answers may have
    caused, or "". Raises ValueError for a function that cannot be loaded or whose code fails for every
    answer."""
    patience = min(source.request_seconds if isinstance(source, Verifier) else source.timeout, seconds)
    options = source.options if isinstance(source, Verifier) else {}
    function = Function(source.file, source.function_name, patience, 1, options)
    try:
        function.score(samples)
    except CodeError as error:
        if not error.certain:
            return f"raised {error}"
        told = f"a call with a made-up answer raised {error}"
        raise ValueError(f"the reward function {source.title}: {told}; correct it, then run again") from None
    except RewardError as error:
        return f"failed: {error}"
    finally:
        function.close()
    return ""


def _warn(source: FunctionReward | Verifier, what: str) -> None:
    told = (
        f"a call with a made-up answer {what}; the stage goes on, and ends if it does so with the model's"
        " answers too"
    )
    print(f"warning: the reward function {source.title}: {told}", flush=True)


def require_references(source: JudgeReward, field: str, prompts: Sequence[Prompt]) -> None:
    """Raises ValueError when a row of the prompts has no reference answer in the column that a judge
    reads."""
    column = source.reference
    if column is None:
        return
    for number, prompt in enumerate(prompts, 1):
        if prompt.row.get(column) is None:
            raise ValueError(
                f"{field}: number {number}: the reward {source.title} finds no reference answer in the column"
                f" {column!r}; the row's columns are {', '.join(prompt.row)}: set reference to the column"
                " with the reference answers, or correct the row"
            )
