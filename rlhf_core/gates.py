"""The gates of a finished stage: which it passed, and what a failed one usually means. Pure functions of a result; torch-free.

Nothing is remembered: the same recipe and the same results give the same verdicts, whichever process asks, and a changed bound counts
at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.config import Publication, StageConfig
from rlhf_core.config.gates import Verdict
from rlhf_core.plan import Node, Plan
from rlhf_core.stage import RunDir
from rlhf_core.types import StageResult

# By kind and the metric's first part, or the whole metric; the more exact one counts.
MEANINGS: dict[str, dict[str, str]] = {
    "sft": {
        "loss": "The SFT did not fit its data: learning rate, number of steps, or a chat template that does not match it.",
        "eval/loss": "The SFT is bad: everything after it starts from this model. A training loss far below it means overfitting, one as "
        "high means too little training or a wrong chat template.",
        "grad_norm": "The SFT is unstable: lower its learning rate, or look for odd rows in its data.",
    },
    "reward_model": {
        "loss": "The reward model did not fit its pairs: learning rate, number of pairs, or contradicting labels.",
        "accuracy": "The reward model does not even rank the pairs it was trained on: labels may be swapped or random, or it was trained "
        "too little.",
        "eval/loss": "The reward model is bad, or too sure of itself: it does not carry over to pairs it has not seen.",
        "eval/accuracy": "The reward model is bad: it ranks unseen pairs little better than a coin (0.5), so PPO and every round would "
        "climb a wrong reward. Look at the labels of its pairs first.",
        "eval/confidence": "The reward model's confidence is not its accuracy: it is badly calibrated, often from too many epochs.",
        "score": "The reward model's scores lie on another scale than expected: normalise them, or set centering.",
    },
    "dpo": {
        "accuracy": "DPO does not tell chosen from rejected answers: learning rate or beta, or pairs without a real difference.",
        "margin": "DPO separates the pairs by another margin than expected: a huge one means it left its reference far behind.",
        "rewards/chosen": "DPO made the chosen answers less likely too: lower its learning rate, raise beta, or add nll_coef.",
        "eval": "DPO does not carry over to pairs it has not seen: overfitting, or another kind of pairs.",
    },
    "kto": {
        "accuracy": "KTO does not tell desirable from undesirable answers: learning rate or beta, or wrong labels.",
        "kl": "KTO left its reference far behind: lower its learning rate or raise beta.",
        "eval": "KTO does not carry over to answers it has not seen: overfitting, or another kind of answers.",
    },
    "preferences": {
        "pairs": "Sampling gave too few pairs: all answers to a prompt score the same; raise temperature or n_samples_per_prompt.",
        "answers": "Sampling gave too few answers to train on: lower min_reward, or raise generate_max_len.",
        "dropped": "Many prompts gave no training row: raise temperature, n_samples_per_prompt or generate_max_len.",
        "reward": "The sampled answers are rewarded otherwise than expected: the policy or the reward model before this stage is bad.",
        "response/truncated": "Answers are cut at generate_max_len: raise it, or the policy never learned to stop (a bad SFT).",
        "prompt/truncated": "Prompts are cut at prompt_max_len: raise it.",
    },
    "ppo": {
        "reward": "PPO's reward is not what was asked for: a low one means it does not learn (learning rate, or a reward model it cannot "
        "climb), a very high one with short or odd answers means it games the reward model.",
        "kl": "PPO left its reference far behind: lower actor_learning_rate or raise init_kl_coef, and distrust its reward.",
        "policy/clip_share": "PPO's steps are too large: many tokens are clipped; lower actor_learning_rate or max_epochs.",
        "policy/ratio": "PPO's steps are too large: the policy moves far within one rollout; lower actor_learning_rate.",
        **dict.fromkeys(
            ("policy/first_ratio", "policy/first_ratio_gap"),
            "Sampling and training disagree before the first step: not PPO is bad, but its log-probs; compare dtypes.",
        ),
        "policy/kl_old": "PPO's steps are too large: lower actor_learning_rate or max_epochs.",
        "policy/entropy": "PPO's policy has collapsed to few answers, or came apart: look at its answers, learning rate and entropy_coef.",
        "policy/grad_norm": "PPO is unstable: lower actor_learning_rate.",
        "value": "PPO's critic does not predict the returns: raise critic_learning_rate or freezing_actor_steps.",
        "sampler": "vLLM's log-probs are far from the trainer's: the samples come from another policy; compare dtypes and versions.",
        "sync": "vLLM's log-probs are far from the trainer's right after a weight update: weights did not arrive whole.",
        "response/truncated": "Answers are cut at generate_max_len: raise it, or the policy never learned to stop (a bad SFT).",
        "response/length": "Answers have another length than expected: a reward model that likes long answers is the usual cause.",
        "prompt/truncated": "Prompts are cut at prompt_max_len: raise it.",
        "rollout": "Many answers could not be learned from: a reward source failed, or a prompt's answers lost their rewards.",
    },
    "evaluation": {
        "win_rate": "The model is not better by as much as was asked: look at the gates of the stages before it for the reason.",
        "ci_low": "It is not sure that the model is better: more questions narrow the interval, a better model moves it.",
        "ci_high": "The interval of the win rate ends elsewhere than asked: look at the gates of the stages before it for the reason.",
        "length_controlled": "The model wins by longer answers: its reward model probably likes length.",
        "swap_consistency": "The judge changes its mind with the order of the answers: the judge is weak, whatever the models are.",
        "failed_games": "The judge gave no verdict in too many games: look at its answers and limits.",
        "judge": "The judges disagree or fail: do not trust the win rates before they are looked at.",
        "right": "The model gives too few right answers: look at the gates of the stages before it for the reason.",
        "truncated": "The model's answers are cut: raise generate_max_len, or it never learned to stop.",
        "reward_accuracy": "The reward model is bad: it does not rank held-out pairs well enough to train on.",
        "reward_calibration_error": "The reward model is badly calibrated: its confidence is not its accuracy.",
        "reward_longer_preferred": "The reward model has a length bias: it prefers the longer answer more often than the labels do.",
    },
    "alignment_tax": {
        "tax": "Alignment cost the model what it could do before: look at its KL to the reference, and at the data it was trained on.",
        "tax_low": "It is sure that alignment cost the model what it could do before: look at its KL to the reference first.",
        "tax_high": "It is not sure that the model kept what it could do before: more documents narrow the interval.",
        "score": "A model scores otherwise than expected on this task: compare it with the baseline's score.",
    },
    "publication": {},
}
ANY = {
    "data": "The data is not what was expected: `alignflow data RECIPE` says what was dropped or cut and why.",
    "router": "The experts are not evenly used: raise router_aux_coef.",
    "loss": "Training did not reach what was asked: learning rate, number of steps, or the data.",
    "grad_norm": "Training is unstable: lower the learning rate.",
}


class GateFailed(RuntimeError):
    """Stages are done, but their results do not pass a gate, so what depends on them was not started."""

    def __init__(self, verdicts: Sequence[Verdict]):
        self.verdicts = tuple(verdicts)
        super().__init__(self.verdicts)

    def __str__(self) -> str:
        told = [f"{verdict.told}: what depends on it was not started. {verdict.meaning}".rstrip() for verdict in self.verdicts]
        return "\n".join(told)


def check(name: str, config: StageConfig, result: StageResult) -> tuple[Verdict, ...]:
    """The verdict of each of a stage's gates. A metric that is missing, nan or infinite does not pass."""
    verdicts = []
    for gate in config.gates:
        value = result.metrics.get(gate.metric)
        passed = gate.passes(value)
        meaning = "" if passed else meaning_of(config.stage, gate.metric)
        verdicts.append(Verdict(stage=name, gate=gate, value=value, passed=passed, meaning=meaning))
    return tuple(verdicts)


def gates_of(node: Node) -> tuple[Verdict, ...]:
    """The verdicts on a stage of a plan; none for one that is not done, or has no gates."""
    result = RunDir(node.run_dir).result() if node.config.gates else None
    return check(node.name, node.config, result) if result else ()


def gates_behind(planned: Plan, node: Node) -> tuple[Verdict, ...]:
    """The verdicts on every stage that a stage depends on, directly or not, parents first."""
    return tuple(verdict for stage in planned.ancestors((node,)) for verdict in gates_of(stage))


def uncheckable(planned: Plan, nodes: Sequence[Node]) -> list[Node]:
    """Stages with gates that publications among `nodes` depend on, whose results are gone (or never were): no gate can be checked there."""
    here = {node.name for node in nodes}
    behind = planned.ancestors([node for node in nodes if isinstance(node.config, Publication) and not node.done])
    return [stage for stage in behind if stage.config.gates and stage.name not in here and not stage.done]


def holding(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The failed gates that keep other stages from starting."""
    return [verdict for verdict in verdicts if not verdict.passed and verdict.gate.on_fail != "warn"]


def meaning_of(kind: str, metric: str) -> str:
    """What a failed gate on this metric usually means, in a sentence or two; '' where nothing general can be said."""
    first = metric.partition("/")[0]
    for name in (metric, first.removesuffix("_vs_parent"), first.partition("_")[0]):
        for table in (MEANINGS.get(kind, {}), ANY):
            if name in table:
                return table[name]
    return ""
