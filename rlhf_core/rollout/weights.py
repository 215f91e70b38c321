"""The worker side of a weight sync. vLLM imports this class into its workers by name."""

from __future__ import annotations

from typing import Any

import torch


class WeightReceiver:
    """Mixed into vLLM's worker."""

    model_runner: Any

    def receive_weights(self, named: list[tuple[str, torch.Tensor]]) -> None:
        """Loads weights under checkpoint names; `load_weights` alone fails after start, since CPU linears are repacked."""
        self.model_runner.reload_weights(weights_iterator=iter(named))
