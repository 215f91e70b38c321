"""Declares metrics that several kinds of stages share."""

from __future__ import annotations

from rlhf_core.config.metrics.metric import Condition, Metric

BALANCE = "router/balance"  # mixture-of-experts models only
# for merged adapters: the share of their update that survives rounding of the weights
SURVIVES = "lora/survives"
BAD_DATA = "The data is not what was expected: `alignflow data RECIPE` shows what was dropped or cut and why."
MERGED_AWAY = (
    "Merging lost part of the adapters' update, or the update is too small to survive rounding: export only"
    " the adapter (lora.export)."
)
FLOAT16 = Condition("with `dtype: float16`", lambda config: config.dtype == "float16")
OVERFLOWS = (
    "Gradients overflow float16. A few such steps at the start are normal; later ones mean that activations"
    " are too large: set dtype to bfloat16."
)
EXPERTS = Metric(
    BALANCE,
    "load-balancing loss of the experts, without the coefficient, mean over documents and layers;"
    " `num_experts_per_tok` if experts are used evenly",
    "",
    Condition("with `router_aux_coef`", lambda config: config.router_aux_coef > 0),
    failed="The experts are used unevenly: raise router_aux_coef.",
)

DATA = (
    Metric(
        "data/rows",
        "documents, pairs, answers or prompts in the data; for KTO, a preference row counts as two answers",
        "count",
        failed=BAD_DATA,
    ),
    Metric("data/kept", "items of the data that are used", "count", failed=BAD_DATA),
    Metric("data/truncated", "used items that were cut at the length limit", "count", failed=BAD_DATA),
    Metric("data/dropped", "items that were left out, for any reason", "count", failed=BAD_DATA),
    Metric("data/tokens", "tokens of the used items", "tokens", failed=BAD_DATA),
)
ANSWERS = (
    Metric(
        "response/length",
        "mean number of tokens per answer; for episodes: of all answers together",
        "tokens",
        failed=(
            "Answers are longer or shorter than expected: the usual cause is a reward model that prefers long"
            " answers."
        ),
    ),
    Metric(
        "response/truncated",
        "share of answers that are cut; an episode is cut if a limit on tokens, turns or time ended it",
        "share",
        failed=(
            "Answers are cut at generate_max_len, or episodes at max_turns: raise the limit, or check whether"
            " the policy ever learned to stop (a bad SFT)."
        ),
    ),
    Metric(
        "prompt/truncated",
        "share of prompts that are cut",
        "share",
        failed="Prompts are cut at prompt_max_len: raise this limit.",
    ),
)
