"""Holds and adapts the coefficient of PPO's KL penalty. rlhf_core/stages/ppo/train.py updates it after each iteration."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class KLController:
    """Holds the coefficient of the KL: constant without `target`, else adapted so that the KL moves towards it (Ziegler et al. 2019,
    section 2.2)."""

    coef: float
    target: float | None = None
    horizon: int = 10000

    def update(self, kl: float, n: int) -> KLController:
        """Returns the controller after `n` samples of mean KL `kl`, in nats, per token or per answer as `target`."""
        if self.target is None:
            return self
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return replace(self, coef=self.coef * (1 + error * n / self.horizon))
