"""Holds and adapts the coefficient of PPO's KL penalty. rlhf_core/stages/ppo/iteration_loop.py updates it
after each iteration."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class KLController:
    """The KL coefficient, adapted so that the KL moves towards the target (Ziegler et al. 2019, section 2.2).
    Without `target` the coefficient does not adapt, and PPO's config determines the coefficient of each
    iteration. `target`: nats per token; `horizon`: answers."""

    coef: float
    target: float | None = None
    horizon: int = 10000

    def update(self, kl: float, n: int) -> KLController:
        """Returns the controller after `n` answers with mean KL `kl`, in nats per token.

        The coefficient is multiplied by `(1 + error / horizon)^n`, which applies the paper's factor once per
        answer. It therefore stays positive for any number of answers, and does not depend on how the answers
        are split into iterations. One update changes it by at most a factor of e.
        """
        if self.target is None:
            return self
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        growth = n * math.log1p(error / self.horizon)
        return replace(self, coef=self.coef * math.exp(min(max(growth, -1.0), 1.0)))
