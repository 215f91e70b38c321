"""Every formula in plain Python, for comparison and easy to read: lists of floats, loops, `math`; no torch,
no broadcasting.

Per-token arguments are flat lists over all tokens of a batch unless a docstring says rows. A loss returns its
metrics by name, the loss first.
"""

from __future__ import annotations

import math

Row = list[float]
Mask = list[bool]


# masked


def masked_sum(x: Row, mask: Mask) -> float:
    total = 0.0
    for value, counts in zip(x, mask, strict=True):
        if counts:
            total += value
    return total


def masked_mean(x: Row, mask: Mask) -> float:
    return masked_sum(x, mask) / sum(mask) if any(mask) else 0.0


def whiten(x: Row, mask: Mask, eps: float) -> Row:
    mean = masked_mean(x, mask)
    variance = masked_mean([(value - mean) ** 2 for value in x], mask)
    return [
        (value - mean) / math.sqrt(variance + eps) if counts else 0.0
        for value, counts in zip(x, mask, strict=True)
    ]


def document_sum(x: Row, mask: Mask, documents: list[int], num_documents: int) -> Row:
    return [
        masked_sum(x, [counts and d == k for counts, d in zip(mask, documents, strict=True)])
        for k in range(num_documents)
    ]


def document_mean(x: Row, mask: Mask, documents: list[int], num_documents: int) -> Row:
    return [
        masked_mean(x, [counts and d == k for counts, d in zip(mask, documents, strict=True)])
        for k in range(num_documents)
    ]


def gather_last(x: Row, documents: list[int], num_documents: int) -> Row:
    last = [0.0] * num_documents
    for value, d in zip(x, documents, strict=True):
        if d >= 0:
            last[d] = value
    return last


def shift_right(rows: list[Row], documents: list[list[int]]) -> list[Row]:
    """Rows."""
    shifted = []
    for row, marks in zip(rows, documents, strict=True):
        new = []
        for t in range(len(row)):
            is_first = t == 0 or marks[t] != marks[t - 1]
            is_pad = marks[t] == -1
            new.append(0.0 if is_first or is_pad else row[t - 1])
        shifted.append(new)
    return shifted


# advantages: one row, one document


def kl(logprob: float, ref_logprob: float, estimator: str) -> float:
    d = logprob - ref_logprob
    return {"k1": d, "k2": d**2 / 2, "k3": math.exp(-d) - 1 + d}[estimator]


def token_rewards(kls: Row, coef: float, score: float, mask: Mask) -> Row:
    rewards = [-coef * k if counts else 0.0 for k, counts in zip(kls, mask, strict=True)]
    response = [t for t in range(len(mask)) if mask[t]]
    if response:
        rewards[response[-1]] += score
    return rewards


def gae(
    rewards: Row, values: Row, mask: Mask, gamma: float, lambd: float, after: float = 0.0
) -> tuple[Row, Row]:
    """The sum the recursion stands for: A_i = sum_l (gamma lambda)^l delta_{i+l} over response tokens i, i+1,
    ...; `after`: the value after the last one."""
    response = [t for t in range(len(mask)) if mask[t]]
    r = [rewards[t] for t in response]
    v = [values[t] for t in response] + [after]
    delta = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(r))]
    advantages = [0.0] * len(mask)
    returns = [0.0] * len(mask)
    for i, t in enumerate(response):
        advantages[t] = sum((gamma * lambd) ** (j - i) * delta[j] for j in range(i, len(r)))
        returns[t] = advantages[t] + values[t]
    return advantages, returns


def discounted_returns(rewards: Row, mask: Mask, gamma: float) -> Row:
    response = [t for t in range(len(mask)) if mask[t]]
    result = [0.0] * len(mask)
    for i, t in enumerate(response):
        result[t] = sum(gamma ** (j - i) * rewards[response[j]] for j in range(i, len(response)))
    return result


def explained_variance(values: Row, returns: Row, mask: Mask) -> float:
    def variance(x: Row) -> float:
        mean = masked_mean(x, mask)
        return masked_mean([(value - mean) ** 2 for value in x], mask)

    return 1 - variance([g - v for g, v in zip(returns, values, strict=True)]) / variance(returns)


def grpo(scores: Row, eps: float) -> Row:
    mean = sum(scores) / len(scores)
    std = math.sqrt(sum((r - mean) ** 2 for r in scores) / (len(scores) - 1))
    return [(r - mean) / (std + eps) for r in scores]


def dr_grpo(scores: Row) -> Row:
    return [r - sum(scores) / len(scores) for r in scores]


def rloo(scores: Row) -> Row:
    advantages = []
    for i, r in enumerate(scores):
        others = [other for j, other in enumerate(scores) if j != i]
        advantages.append(r - sum(others) / len(others))
    return advantages


# losses


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def sft_loss(logprobs: Row, mask: Mask, denominator: float) -> dict[str, float]:
    return {"loss": -masked_sum(logprobs, mask) / denominator}


def reward_loss(
    chosen: Row, rejected: Row, margin: Row, centering: float, denominator: float
) -> dict[str, float]:
    loss = accuracy = difference = 0.0
    for c, r, m in zip(chosen, rejected, margin, strict=True):
        loss += -math.log(sigmoid(c - r - m)) + centering * (c + r) ** 2
        accuracy += c > r
        difference += c - r
    totals = {
        "loss": loss,
        "accuracy": accuracy,
        "margin": difference,
        "scores/chosen": sum(chosen),
        "scores/rejected": sum(rejected),
    }
    return {name: total / denominator for name, total in totals.items()}


def preference_metrics(losses: Row, chosen: Row, rejected: Row, denominator: float) -> dict[str, float]:
    """`chosen`, `rejected`: implicit rewards."""
    return {
        "loss": sum(losses) / denominator,
        "accuracy": sum(c > r for c, r in zip(chosen, rejected, strict=True)) / denominator,
        "margin": sum(c - r for c, r in zip(chosen, rejected, strict=True)) / denominator,
        "rewards/chosen": sum(chosen) / denominator,
        "rewards/rejected": sum(rejected) / denominator,
    }


def dpo_loss(
    policy_chosen: Row,
    policy_rejected: Row,
    ref_chosen: Row,
    ref_rejected: Row,
    beta: float,
    label_smoothing: float,
    loss: str,
    denominator: float,
) -> dict[str, float]:
    losses = []
    chosen = []
    rejected = []
    for pc, pr, rc, rr in zip(policy_chosen, policy_rejected, ref_chosen, ref_rejected, strict=True):
        h = (pc - rc) - (pr - rr)
        if loss == "ipo":
            losses.append((h - 1 / (2 * beta)) ** 2)
        else:
            right = -math.log(sigmoid(beta * h))
            flipped = -math.log(sigmoid(-beta * h))
            losses.append((1 - label_smoothing) * right + label_smoothing * flipped)
        chosen.append(beta * (pc - rc))
        rejected.append(beta * (pr - rr))
    return preference_metrics(losses, chosen, rejected, denominator)


def simpo_loss(
    policy_chosen: Row, policy_rejected: Row, beta: float, gamma: float, denominator: float
) -> dict[str, float]:
    losses = [
        -math.log(sigmoid(beta * (c - r) - gamma))
        for c, r in zip(policy_chosen, policy_rejected, strict=True)
    ]
    return preference_metrics(
        losses, [beta * c for c in policy_chosen], [beta * r for r in policy_rejected], denominator
    )


def orpo_loss(policy_chosen: Row, policy_rejected: Row, lambd: float, denominator: float) -> dict[str, float]:
    losses = []
    for c, r in zip(policy_chosen, policy_rejected, strict=True):
        odds_c = math.exp(c) / (1 - math.exp(c))
        odds_r = math.exp(r) / (1 - math.exp(r))
        losses.append(-c - lambd * math.log(sigmoid(math.log(odds_c / odds_r))))
    return preference_metrics(
        losses, [lambd * c for c in policy_chosen], [lambd * r for r in policy_rejected], denominator
    )


def kto_loss(
    policy: Row,
    ref: Row,
    desirable: Mask,
    kl: float,
    beta: float,
    w_desirable: float,
    w_undesirable: float,
    denominator: float,
) -> dict[str, float]:
    kl = max(kl, 0.0)
    totals = {"loss": 0.0, "accuracy": 0.0, "margin": 0.0, "desirable": 0.0}
    for p, q, good in zip(policy, ref, desirable, strict=True):
        r = p - q
        if good:
            totals["loss"] += w_desirable * (1 - sigmoid(beta * (r - kl)))
            totals["accuracy"] += r > kl
            totals["margin"] += beta * (r - kl)
            totals["desirable"] += 1
        else:
            totals["loss"] += w_undesirable * (1 - sigmoid(beta * (kl - r)))
            totals["accuracy"] += r < kl
            totals["margin"] += beta * (kl - r)
    return {name: total / denominator for name, total in totals.items()}


def policy_loss(
    logprobs: Row,
    old_logprobs: Row,
    advantages: Row,
    mask: Mask,
    clip_low: float,
    clip_high: float,
    is_weights: Row,
    denominator: float,
    dual_clip: float | None,
    weights: Row,
) -> dict[str, float]:
    totals = {
        "policy/loss": 0.0,
        "policy/clip_share": 0.0,
        "policy/clip_share_low": 0.0,
        "policy/clip_share_high": 0.0,
        "policy/ratio": 0.0,
        "policy/ratio_gap": 0.0,
        "policy/kl_old": 0.0,
    }
    for t in range(len(mask)):
        if not mask[t]:
            continue
        ratio = math.exp(logprobs[t] - old_logprobs[t])
        a = advantages[t]
        clipped_ratio = min(max(ratio, 1 - clip_low), 1 + clip_high)
        objective = min(ratio * a, clipped_ratio * a)
        if dual_clip is not None and a < 0:
            objective = max(objective, dual_clip * a)
        totals["policy/loss"] -= weights[t] * is_weights[t] * objective
        totals["policy/clip_share"] += weights[t] * (objective != ratio * a)
        side = "low" if ratio < 1 else "high"
        totals[f"policy/clip_share_{side}"] += weights[t] * (objective != ratio * a)
        totals["policy/ratio"] += weights[t] * ratio
        totals["policy/ratio_gap"] += weights[t] * abs(ratio - 1)
        totals["policy/kl_old"] += weights[t] * (ratio - 1 - math.log(ratio))
    return {name: total / denominator for name, total in totals.items()}


def gspo_ratios(
    logprobs: Row, old_logprobs: Row, mask: Mask, documents: list[int], num_documents: int
) -> Row:
    """One ratio per document: the geometric mean of its tokens' ratios."""
    gaps = [p - q for p, q in zip(logprobs, old_logprobs, strict=True)]
    return [math.exp(mean) for mean in document_mean(gaps, mask, documents, num_documents)]


def kl_loss(
    logprobs: Row,
    old_logprobs: Row,
    ref_logprobs: Row,
    mask: Mask,
    is_weights: Row,
    estimator: str,
    denominator: float,
) -> dict[str, float]:
    total = 0.0
    for t in range(len(mask)):
        if mask[t]:
            ratio = math.exp(logprobs[t] - old_logprobs[t])
            total += is_weights[t] * ratio * kl(logprobs[t], ref_logprobs[t], estimator)
    return {"policy/kl_loss": total / denominator}


def value_loss(
    values: Row, old_values: Row, returns: Row, mask: Mask, clip: float, denominator: float
) -> dict[str, float]:
    totals = {"value/loss": 0.0, "value/clip_share": 0.0}
    for v, old, target, counts in zip(values, old_values, returns, mask, strict=True):
        if counts:
            clipped = min(max(v, old - clip), old + clip)
            totals["value/loss"] += 0.5 * max((v - target) ** 2, (clipped - target) ** 2)
            totals["value/clip_share"] += (clipped - target) ** 2 > (v - target) ** 2
    return {name: total / denominator for name, total in totals.items()}
