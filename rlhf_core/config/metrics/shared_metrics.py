"""Metrics that stages of several kinds have."""

from __future__ import annotations

from rlhf_core.config.metrics.metric import Condition, Metric

BALANCE = "router/balance"  # mixture-of-experts models only
# for merged adapters: the share of their update that survives the rounding of the weights
SURVIVES = "lora/survives"
BAD_DATA = "The data is not what was expected: `alignflow data RECIPE` shows what was dropped or cut and why."
MERGED_AWAY = (
    "Merging lost a part of the adapters' update, or the update is too small for it: export only the adapter"
    " (lora.export)."
)
FLOAT16 = Condition("with `dtype: float16`", lambda config: config.dtype == "float16")
OVERFLOWS = (
    "Gradients overflow float16: a few steps at the start are usual, later ones mean too large activations:"
    " set dtype to bfloat16."
)
EXPERTS = Metric(
    BALANCE,
    "load-balancing loss of the experts without its coefficient, mean over documents and layers:"
    " `num_experts_per_tok` when they are evenly used",
    "",
    Condition("with `router_aux_coef`", lambda config: config.router_aux_coef > 0),
    failed="The experts are not evenly used: raise router_aux_coef.",
)

DATA = (
    Metric(
        "data/rows",
        "documents, pairs, answers or prompts that the rows give; a preference row gives KTO two answers",
        "count",
        failed=BAD_DATA,
    ),
    Metric("data/kept", "how many of them are used", "count", failed=BAD_DATA),
    Metric("data/truncated", "how many of these were cut at the length limit", "count", failed=BAD_DATA),
    Metric("data/dropped", "how many were left out, for any reason", "count", failed=BAD_DATA),
    Metric("data/tokens", "tokens of the used ones", "tokens", failed=BAD_DATA),
)
ANSWERS = (
    Metric(
        "response/length",
        "mean tokens of an answer; of an episode, of all its answers",
        "tokens",
        failed="Answers are longer or shorter than expected: a reward model that likes long answers is the"
        " usual cause.",
    ),
    Metric(
        "response/truncated",
        "share of answers that are cut; an episode is cut if a limit of tokens, turns or time ended it",
        "share",
        failed="Answers are cut at generate_max_len, or episodes at max_turns: raise it, or the policy never"
        " learned to stop (a bad SFT).",
    ),
    Metric(
        "prompt/truncated",
        "share of prompts that are cut",
        "share",
        failed="Prompts are cut at prompt_max_len: raise it.",
    ),
)
