"""Provides DeepSpeed ZeRO as a training backend (see `training/backends.py`)."""

from __future__ import annotations

from torch import nn

from rlhf_core.config import Optimised, Ranks
from rlhf_core.config.training.zero_fields import QUANTISED_FROZEN, ZERO
from rlhf_core.forecast.memory import copies
from rlhf_core.models.policy import Policy, Scorer
from rlhf_core.models.weights.shards import Shards
from rlhf_core.training.engine import AdamW, Engine
from rlhf_core.training.zero.zero_engine import ZeroEngine
from rlhf_core.training.zero.zero_options import options_of
from rlhf_core.training.zero.zero_shards import FrozenZero, ZeroShards

# ZeRO++ options (Wang et al. 2023)
QUANTISED = ("zero_quantized_weights", QUANTISED_FROZEN)


class ZeroBackend:
    """Shards optimiser states, gradients (stage 2) and weights (stage 3) over the ranks."""

    def shards(self, config: Optimised, role: str) -> Shards | None:
        """Returns None below stage 3. Also returns None with a second copy on each node (hpZ) or quantised
        weights (qwZ), which DeepSpeed can create only from whole weights."""
        quantised = any(config.deepspeed.get(ZERO, {}).get(name) for name in QUANTISED)
        if config.zero_stage != 3 or copies(config, _ranks_of(config, role)) > 1 or quantised:
            return None
        return ZeroShards(config.dtype_in(role), on_host=role in config.offloaded("param"))

    def frozen_shards(self, dtype: str) -> ZeroShards:
        return ZeroShards(dtype)

    def frozen(self, module: nn.Module, dtype: str) -> FrozenZero:
        return FrozenZero(module, dtype)

    def engine(self, module: Policy | Scorer, adamw: AdamW, config: Optimised, role: str) -> Engine:
        assert isinstance(config.zero_stage, int), "decided before"
        options = options_of(config, role, _ranks_of(config, role))
        return ZeroEngine(
            module, adamw, config.zero_stage, config.dtype_in(role), config.train_pass.rows, options
        )


def _ranks_of(config: Optimised, role: str) -> Ranks:
    return config.trained_ranks["ranks" if role == "model" else f"{role}_ranks"]
