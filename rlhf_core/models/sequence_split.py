"""Lets ranks compute passes of a model together (see `kernels/sequence_ranks.py`), after testing that the
results stay the same.

Called by training/ranks.py, stages/reference_logprobs.py and stages/ppo/roles/.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_core.models.document_leak import hidden_states
from rlhf_core.models.kernels.sequence_ranks import ALONE, SequenceRanks
from rlhf_core.models.policy import Policy, Scorer

PART = 16
# tokens of the last document; most tokens of each part (PART per rank) have other tokens of their document in
# earlier parts
LAST = 4
DIFFERENT = 0.1  # of a state, relative to its size: rounding is about 0.01 in bf16


def split_sequences(
    forward: Callable[..., object],
    module: Policy | Scorer,
    ranks: SequenceRanks,
    device: torch.device,
    all_reduce: Callable[[Tensor], Tensor],
) -> None:
    """Sets `module.sequence` to `ranks`, once. `forward` runs the module or an engine around it; `all_reduce`
    sums over all ranks, so that all take the same decision. The model's attention must already be prepared
    (see `split_attention`) and tested for leaks (see `document_leak`).

    Raises ValueError when the model needs one document per row, or computes different states from a part of
    the tokens, as layers that look at neighbouring tokens do.
    """
    if ranks.size == 1 or module.sequence.size > 1:
        return
    kind = type(module.model).__name__
    if module.document_leak:
        raise ValueError(
            f"{kind} needs one document a row, which ranks cannot share: set sequence_parallel_size to 1"
        )
    differs = torch.tensor(float(_differs(forward, module, ranks, device)), device=device)
    if all_reduce(differs) > 0:
        raise ValueError(
            f"{kind} computes other states from parts of its tokens than from all of them: set"
            " sequence_parallel_size to 1"
        )
    module.sequence = ranks


def _differs(
    forward: Callable[..., object], module: Policy | Scorer, ranks: SequenceRanks, device: torch.device
) -> bool:
    """Returns whether most states of this rank's tokens differ from the states that it computes alone."""
    count = PART * ranks.size
    vocabulary = module.model.config.get_text_config().vocab_size
    tokens = torch.randint(vocabulary, (1, count), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(count - LAST), torch.arange(LAST)])[None]
    documents = torch.tensor([0] * (count - LAST) + [1] * LAST)[None]

    def states(of: SequenceRanks) -> Tensor:
        module.sequence = of
        try:
            return hidden_states(forward, module, device, tokens, positions, documents).flatten(0, 1).float()
        finally:
            module.sequence = ALONE

    alone = ranks.own(states(ALONE))
    gaps = (states(ranks) - alone).norm(dim=-1) / alone.norm(dim=-1)
    return not bool(gaps.median() < DIFFERENT)
