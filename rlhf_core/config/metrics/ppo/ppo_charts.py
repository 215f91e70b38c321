"""Declares charts of PPO and its relatives, in the order of three questions: does it learn, is it healthy,
does it exploit the reward."""

from __future__ import annotations

from rlhf_core.config.metrics.metric import Panel

PPO_CHARTS = (
    Panel("Reward of the answers (band: ± 1 std)", {"reward/mean": "mean"}, band="reward/std"),
    Panel(
        "Reward on eval_prompts",
        {"eval/reward/mean": "mean", "eval/reward/ci_low": "95 % interval", "eval/reward/ci_high": ""},
    ),
    Panel("Right answers on eval_prompts", {"eval/right/mean": ""}),
    Panel("Share of prompts whose answers all have the same reward", {"reward/equal_groups": ""}),
    Panel(
        "Prompts of the curriculum",
        {
            "curriculum/mean_pass_rate": "mean pass rate",
            "curriculum/solved": "solved",
            "curriculum/unseen": "not answered yet",
        },
    ),
    Panel(
        "KL to the reference",
        {
            "kl/mean": "mean",
            "kl/p10": "10th percentile",
            "kl/p90": "90th",
            "kl/p99": "99th percentile of tokens",
        },
        level=0.0,
    ),
    Panel(
        "Entropy of the policy (nats per token)",
        {
            "policy/entropy": "mean",
            "policy/entropy_p10": "10th percentile of tokens",
            "policy/entropy_p90": "90th percentile",
        },
    ),
    Panel("Policy ratio", {"policy/ratio": ""}, level=1.0),
    Panel(
        "Share of clipped tokens",
        {"policy/clip_share_low": "less likely", "policy/clip_share_high": "more likely"},
    ),
    Panel("Gradient norm of the actor", {"policy/grad_norm": ""}),
    Panel("Value loss", {"value/loss": ""}),
    Panel("Explained variance of the values", {"value/explained_variance": ""}, level=0.0),
    Panel("Log-prob gap, sampler to trainer", {"sampler/gap": ""}),
    Panel("Effective sample size of the sampler's weights", {"sampler/ess": ""}, level=1.0),
    Panel(
        "Answer length (tokens)",
        {
            "response/length": "mean",
            "response/length_p10": "10th percentile",
            "response/length_p90": "90th percentile",
        },
    ),
    Panel("Correlation of reward and length", {"reward/length_correlation": ""}, level=0.0),
    Panel("Share of truncated answers", {"response/truncated": ""}),
    Panel(
        "Share of episodes ended by a limit",
        {
            "environment/ended_by_turns": "turns",
            "environment/ended_by_tokens": "tokens",
            "environment/ended_by_time": "time",
        },
    ),
)
