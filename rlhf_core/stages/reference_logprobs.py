"""Computes the log-probs of answers under a frozen reference once before training, so that training holds
only one model in memory.

They are stored in `state/` of the run directory until the stage is done, so that a resumed run neither
recomputes them nor loads the reference. The file's name contains a digest of the reference, of all tokens,
masks and images, and of the batches, so an outdated file is never read.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import torch

from rlhf_core.data.documents import Document
from rlhf_core.data.packing import Passes
from rlhf_core.models.document_leak import detect_document_leak
from rlhf_core.models.kernels.attention import can_share, split_attention
from rlhf_core.models.policy import Policy, masked_logprobs
from rlhf_core.models.sequence_split import split_sequences
from rlhf_core.objectives.collate import collate
from rlhf_core.objectives.masked import document_mean, document_sum
from rlhf_core.runs.run_dir import STATE, RunDir
from rlhf_core.system import progress
from rlhf_core.system.files import digest, write_bytes
from rlhf_core.training.backends import FrozenModel
from rlhf_core.training.engine import Engine
from rlhf_core.training.train_loop import passes_of_rank

Model = Policy | FrozenModel | Engine  # computes log-probs


def module_of(model: Model) -> Policy:
    return cast(Policy, model if isinstance(model, Policy) else model.module)


def reference_logprobs(
    engine: Engine,
    run: RunDir,
    open_reference: Callable[[], Model],
    source: str,
    micro_batches: Sequence[Sequence[Document]],
    passes: Passes,
    pad_token_id: int,
    mean: bool,
) -> array[float]:
    """Returns the log-prob of each document's answer, summed over its tokens or averaged, in order.

    `open_reference` returns the reference, which `source` names: the engine itself before its first step, or
    another model. The micro-batches are distributed over the ranks, and every rank receives all results.
    """
    file = run / STATE / f"reference-{_key(source, micro_batches, mean)}.f64"
    # All ranks must decide alike: if only some found the file, the others would wait forever.
    seen = engine.all_reduce(torch.tensor(float(file.is_file()), device=engine.device))
    if int(seen) == engine.world_size:
        return array("d", file.read_bytes())
    reference = open_reference()
    values = array(
        "d",
        dealt_logprobs(engine, reference, micro_batches, passes, pad_token_id, mean).cpu().numpy().tobytes(),
    )
    if engine.rank == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, values.tobytes())
    return values


def dealt_logprobs(
    engine: Engine,
    policy: Model,
    micro_batches: Sequence[Sequence[Document]],
    passes: Passes,
    pad_token_id: int,
    mean: bool,
) -> torch.Tensor:
    """Returns the log-probs of all documents in order, (N,) fp64, without gradient. Each rank computes its
    share, and every rank receives all log-probs.

    `passes` defines the layout of a micro-batch.
    """
    module = module_of(policy)
    if policy is not engine:  # the engine was already tested when it was created
        if engine.sharing > 1:
            split_attention(module.model, engine.sharing)
        detect_document_leak(policy, module, engine.device, passes.tokens is not None, engine.all_reduce)
        split_sequences(
            policy, module, cast(Policy, engine.module).sequence, engine.device, engine.all_reduce
        )
    passes = passes._replace(
        share=passes.share and can_share(module.model, engine.device), apart=bool(module.document_leak)
    )
    starts = [0]
    for documents in micro_batches:
        starts.append(starts[-1] + len(documents))
    values = torch.zeros(starts[-1], dtype=torch.float64, device=engine.device)
    module.eval()
    with torch.no_grad():
        for own in passes_of_rank(len(micro_batches), engine):
            part, _ = answer_logprobs_and_balance(
                policy, micro_batches[own.place], pad_token_id, mean, engine.device, passes
            )
            progress.made()
            if own.counted:
                values[starts[own.place] : starts[own.place + 1]] = part.double()
    module.train()
    return engine.all_reduce(values)


def answer_logprobs(
    policy: Model, documents: Sequence[Document], pad_token_id: int, mean: bool, device: torch.device
) -> torch.Tensor:
    """Returns the log-probs of the answers, (N,), from one forward pass, summed or averaged over the tokens
    in the mask."""
    return answer_logprobs_and_balance(policy, documents, pad_token_id, mean, device, Passes(len(documents)))[
        0
    ]


def answer_logprobs_and_balance(
    policy: Model,
    documents: Sequence[Document],
    pad_token_id: int,
    mean: bool,
    device: torch.device,
    passes: Passes,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns `answer_logprobs`, and the experts' balance if the policy computes it (otherwise None)."""
    batch = collate(passes.rows_of(documents), pad_token_id, reader=module_of(policy).reader).to(device)
    out = masked_logprobs(policy, batch)  # log-probs (B, T)
    reduce = document_mean if mean else document_sum
    return reduce(out.logprobs, batch.mask, batch.documents, len(documents)), out.balance


def _key(source: str, micro_batches: Sequence[Sequence[Document]], mean: bool) -> str:
    content = hashlib.sha256()
    for documents in micro_batches:
        content.update(array("q", [-len(documents)]).tobytes())
        for document in documents:
            content.update(array("q", [len(document), *document.tokens]).tobytes() + bytes(document.mask))
            for picture in document.pictures:
                content.update(picture.source.version)
    return digest({"reference": _identity(source), "mean": mean, "content": content.hexdigest()})


def _identity(source: str) -> list[object]:
    """Returns a Hub id, or a folder and properties that identify its weights without reading all of them."""
    files = sorted(Path(source).glob("*.safetensors")) if Path(source).is_dir() else []
    return [source, *([file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files)]
