"""Tries a model's class before training: runs the training steps on a small random copy, on the CPU, in
seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from rlhf_core.config import Lora
from rlhf_core.data.documents import Document
from rlhf_core.hub.model_files import stored_tensors
from rlhf_core.models.checkpoint.checkpoint_weights import checkpoint_weights
from rlhf_core.models.document_leak import detect_document_leak
from rlhf_core.models.load_model import trained_policy, trained_scorer
from rlhf_core.models.multimodal.picture_language_models import causal_from_config, has_causal_class
from rlhf_core.models.policy import Policy, Scorer
from rlhf_core.objectives.collate import Batch, collate
from rlhf_core.preflight.families.small_copy import WORDS, small_copies
from rlhf_core.system.processes import raised_by_us

Use = Literal["policy", "reward model", "adapters"]
USES: tuple[Use, ...] = get_args(Use)
MOST_PARAMETERS = 100_000_000  # limit for a copy; a larger model is not tried
LENGTHS = (9, 5)  # tokens in each of the two documents
CPU = torch.device("cpu")


class Trial(NamedTuple):
    """Holds the result of a trial. `problem` is a sentence, or "" if there is no problem. `tried` is False if
    no small copy could be built, so that nothing is known about the model."""

    tried: bool
    problem: str = ""


def try_family(config: PretrainedConfig, name: str, use: Use, trust_remote_code: bool = False) -> Trial:
    """Tries the class of `config` (of its language model, if multimodal) for one use. Error sentences refer
    to the model as `name`."""
    config = config.get_text_config()
    if not has_causal_class(config) and not hasattr(config, "auto_map"):
        return Trial(True, f"{name}: transformers has no causal language model for {type(config).__name__}")
    torch.manual_seed(0)
    with TemporaryDirectory() as made:
        folder = Path(made) / "model"
        model = _small_model(config, trust_remote_code)
        if model is None:
            return Trial(False)
        model.save_pretrained(folder)
        for step, work in _steps(folder, use, trust_remote_code):
            try:
                work()
            except Exception as error:
                told = " ".join(str(error).split()).replace(str(folder), name)
                if isinstance(error, ValueError) and raised_by_us(error):
                    return Trial(True, told)
                return Trial(
                    True,
                    f"{name}: {type(model).__name__} fails as {use} where it {step} ({type(error).__name__}:"
                    f" {told[:200]})",
                )
    return Trial(True)


def _small_model(config: PretrainedConfig, trust_remote_code: bool) -> PreTrainedModel | None:
    """Returns a small random model that transformers itself can run, or None if the class does not accept
    narrow layers."""
    with suppress(Exception):
        for small in small_copies(config):
            with suppress(Exception):
                with torch.device("meta"):
                    size = causal_from_config(small, trust_remote_code).num_parameters()
                if size > MOST_PARAMETERS:
                    continue
                model = causal_from_config(small, trust_remote_code)
                model(input_ids=torch.arange(3, 12)[None], use_cache=False).logits.sum().backward()
                return model
    return None


def _steps(folder: Path, use: Use, trust_remote_code: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields the training steps in order, each with a phrase for the error sentence."""
    module: list[Policy | Scorer] = []

    def load() -> None:
        place = str(folder)
        lora = Lora(rank=2, alpha=4) if use == "adapters" else None
        module.append(
            trained_scorer(place, 0, "float32", trust_remote_code, lora, 0)
            if use == "reward model"
            else trained_policy(place, "float32", trust_remote_code, lora, 0)
        )

    yield "is loaded", load
    yield "has two documents in a row", lambda: detect_document_leak(module[0], module[0], CPU, packed=True)
    yield "computes a loss and its gradient", lambda: _train(module[0])
    yield "reads the tokens before each token", lambda: _require_causal(module[0], folder)
    yield "is exported", lambda: _require_whole_export(module[0].model, folder, use)


def _batch(changed: bool = False) -> Batch:
    """Returns a batch of two documents. With `changed`, the last token of each document differs."""
    generator = torch.Generator().manual_seed(0)
    documents = []
    for length in LENGTHS:
        tokens = torch.randint(3, WORDS, (length,), generator=generator).tolist()
        tokens[-1] = (tokens[-1] + changed) % WORDS
        documents.append(Document(tokens, [False] + [True] * (length - 1)))
    return collate([[document] for document in documents], pad_token_id=0)


def _outputs(module: Policy | Scorer, changed: bool = False) -> Tensor:
    batch = _batch(changed)
    if isinstance(module, Scorer):
        return module(batch.tokens, batch.positions)
    return module(batch.tokens, batch.positions, batch.documents).logprobs


def _train(module: Policy | Scorer) -> None:
    _outputs(module.train()).sum().backward()
    if not any(
        parameter.grad is not None and parameter.grad.isfinite().all() for parameter in module.parameters()
    ):
        raise ArithmeticError("no parameter has a finite gradient")


@torch.no_grad()
def _require_causal(module: Policy | Scorer, folder: Path) -> None:
    module.eval()
    last = LENGTHS[0] - 1
    before, after = (_outputs(module, changed)[0, :last] for changed in (False, True))
    if not torch.allclose(before, after, atol=1e-4):
        raise ValueError(
            f"{folder}: {type(module.model).__name__} reads the tokens after each token too: it is no causal"
            " language model"
        )


def _require_whole_export(model: PreTrainedModel, folder: Path, use: Use) -> None:
    if use == "reward model":
        return
    stored = {
        name: about["shape"] for tensors in stored_tensors(folder).values() for name, about in tensors.items()
    }
    exported = {
        name: list(weight.shape)
        for name, weight in checkpoint_weights(model, lambda parameters: nullcontext())
    }
    unlike = sorted(
        name
        for name in stored.keys() | exported.keys()
        if stored.get(name, exported.get(name)) != exported.get(name)
    )
    if unlike:
        raise ValueError(
            f"{folder}: the weight {unlike[0]} would not be exported as it was ({len(unlike)} such)"
        )
