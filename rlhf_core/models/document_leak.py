"""Tests whether documents of a packed row attend to each other, with the attention and on the device used in
training.

Called by training/ranks.py, stages/reference_logprobs.py and stages/ppo/roles/. Some families (AFMoE, Falcon,
OPT) ignore position ids in their mask, so a document silently attends to earlier documents. Layers that carry
state along a row (convolutions, recurrent states) also read across the border, except the layers in
`kernels/state_layers.py`. Such models get one document per row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_core.models.kernels.attention import VARLEN, is_stateful, mask_attention, takes_varlen
from rlhf_core.models.logprobs.logit_scale import backbone_of
from rlhf_core.models.policy import Policy, Scorer

BEFORE = 12
AFTER = 4  # tokens of the two documents: with a leak most keys of the second belong to the first
# relative to the effect inside one document: a leak is about 1, rounding is under 0.01 in bf16 and 0 in fp32
LEAK = 0.1


def detect_document_leak(
    forward: Callable[..., object],
    module: Policy | Scorer,
    device: torch.device,
    packed: bool,
    all_reduce: Callable[[Tensor], Tensor] = lambda values: values,
) -> None:
    """Sets `module.document_leak`, once. `forward` runs the module or an engine around it; if the engine's
    forward pass is a collective operation, so is this function.

    The test is skipped when no row has two documents, that is, when rows are neither `packed` nor
    concatenated for the attention. `all_reduce` sums over the ranks, so that all take the same decision.
    """
    model = module.model
    why = "has layers that carry state along a row"
    if module.document_leak is not None or not (packed or takes_varlen(model)):
        return
    if takes_varlen(model) or not is_stateful(model):
        why = "lets documents of a row attend to each other (no mask between them)"
        module.document_leak = bool(
            all_reduce(torch.tensor(float(leaks(forward, module, device)), device=device)) > 0
        )
        if not module.document_leak:
            return
        if model.config._attn_implementation == VARLEN:  # accepts only one row
            mask_attention(model)
    module.document_leak = True
    print(f"{type(model).__name__} {why}: one document a row", flush=True)


@torch.no_grad()
def leaks(forward: Callable[..., object], module: Policy | Scorer, device: torch.device) -> bool:
    """Returns whether the tokens of a document change the hidden states of the next document.

    Two rows differ in their first `BEFORE` tokens. In one case these are a separate document, in the other
    they are the beginning of the only document. The test compares how much the last `AFTER` states differ in
    both cases, which makes it independent of the weights' scale and of rounding.
    """
    vocabulary = module.model.config.get_text_config().vocab_size
    if isinstance(module, Policy) and module.known is not None:
        vocabulary = module.known  # a policy gives no log-prob of tokens in the vocabulary's padding
    drawn = torch.randint(vocabulary, (2 * BEFORE + AFTER,), generator=torch.Generator().manual_seed(0))
    first, second, last = drawn.split([BEFORE, BEFORE, AFTER])
    tokens = torch.stack([torch.cat([first, last]), torch.cat([second, last])] * 2)
    two = torch.cat([torch.arange(BEFORE), torch.arange(AFTER)])
    one = torch.arange(BEFORE + AFTER)
    positions = torch.stack([two, two, one, one])
    documents = torch.arange(4)[:, None].expand_as(tokens).contiguous()
    states = hidden_states(forward, module, device, tokens, positions, documents)
    ends = states.view(*tokens.shape, -1)[:, BEFORE:].float()
    apart, together = ((ends[row] - ends[row + 1]).norm() for row in (0, 2))
    return bool(apart > LEAK * together)


@torch.no_grad()
def hidden_states(
    forward: Callable[..., object],
    module: Policy | Scorer,
    device: torch.device,
    tokens: Tensor,
    positions: Tensor,
    documents: Tensor,
) -> Tensor:
    """Returns the backbone's last hidden states for (B, T) tokens, from a forward pass of the module or an
    engine around it in evaluation mode."""
    states: list[Tensor] = []
    hook = backbone_of(module.model).register_forward_hook(
        lambda _module, _inputs, output: states.append(output.last_hidden_state)
    )
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        forward(tokens.to(device), positions, *([documents.to(device)] if isinstance(module, Policy) else []))
    finally:
        hook.remove()
        for part, training in modes:
            part.training = training
    return states[0]
