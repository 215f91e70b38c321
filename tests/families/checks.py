"""What is measured of a model family: log-probs of documents, their gaps, an export, planted faults, stages
that train."""

from __future__ import annotations

import json
import random
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_core.config import DPO, KINDS, KTO, SFT, Data, RewardModel, StageConfig
from rlhf_core.data.documents import Document
from rlhf_core.models.checkpoint.checkpoint_weights import checkpoint_weights
from rlhf_core.models.checkpoint.save import save_model
from rlhf_core.models.policy import Policy
from rlhf_core.objectives.collate import collate
from rlhf_core.runs.run_dir import RunDir
from tests.support.stage_request import stage_request

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RNG = random.Random(0)
DOCUMENTS = [[RNG.randrange(3, 80) for _ in range(n)] for n in (24, 7, 40, 16, 33, 12)]


def weights_of(policy: Policy) -> list[tuple[str, Tensor]]:
    """Copies on the host, under checkpoint names."""
    weights = checkpoint_weights(policy.model, lambda parameters: nullcontext())
    return [(name, weight.detach().cpu().clone()) for name, weight in weights]


def last_norm(model: PreTrainedModel) -> nn.Parameter:
    """The weights of the norm before the head."""
    parameters = model.get_decoder().named_parameters()
    return next(parameter for name, parameter in parameters if "norm" in name and "layers" not in name)


def rows(packed: bool) -> list[list[Document]]:
    documents = [Document(tokens, [False] + [True] * (len(tokens) - 1)) for tokens in DOCUMENTS]
    return [documents] if packed else [[document] for document in documents]


def logprobs(policy: Policy, packed: bool = False) -> Tensor:
    batch = collate(rows(packed), pad_token_id=0).to(DEVICE)
    found = policy(batch.tokens, batch.positions, batch.documents).logprobs
    return torch.cat([found[batch.documents == i] for i in range(len(DOCUMENTS))])


def gaps(found: list[list[float]], expected: Tensor) -> dict[str, float]:
    gap = (torch.tensor([value for row in found for value in row]) - expected.detach().float().cpu()).abs()
    return {"mean": round(float(gap.mean()), 6), "p99": round(float(gap.quantile(0.99)), 6)}


def planted(policy: Policy, found: list[list[float]]) -> dict[str, float]:
    """Mean gaps to vLLM's log-probs with one fault each in the trainer's model, which is as before
    afterwards."""
    model = policy.model
    result = {}

    def gap() -> float:
        with torch.no_grad():
            return gaps(found, logprobs(policy))["mean"]

    def scaled(name: str, tensors: list[Tensor], factor: float) -> None:
        if not tensors:
            return
        before = [tensor.detach().clone() for tensor in tensors]
        with torch.no_grad():
            for tensor in tensors:
                tensor.mul_(factor)
            result[name] = gap()
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)

    scaled(
        "rotary frequencies x 0.7",
        [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")],
        0.7,
    )
    scaled("last norm x 1.2", [last_norm(model)], 1.2)
    experts = [
        parameter for name, parameter in model.named_parameters() if parameter.dim() == 3 and "expert" in name
    ]
    scaled("an expert x 0.5", [parameter.data[0] for parameter in experts[-1:]], 0.5)
    if policy.cap is not None:
        cap = policy.cap
        policy.cap = None
        result["no cap"] = gap()
        policy.cap = cap
    return result


def export_unlike(policy: Policy, base: Path, folder: Path) -> str:
    """What in an export of a model without training is not as in the checkpoint: name, shape, dtype or value
    of a tensor, or a key of config.json; "" for nothing."""
    save_model(policy.model, weights_of(policy), str(base), folder)
    before = stored(base)
    after = stored(folder)
    unlike = [name for name in before.keys() | after.keys() if not same(before.get(name), after.get(name))]
    configs = [json.loads((place / "config.json").read_text()) for place in (base, folder)]
    unlike += [
        key for key in configs[0].keys() | configs[1].keys() if configs[0].get(key) != configs[1].get(key)
    ]
    return ", ".join(sorted(unlike)[:3])


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other)


def trained(base: Path, material: Path, folder: Path) -> dict[str, str]:
    """What became of two steps of each stage that trains, with budgets of tokens; packed where the family can
    be."""
    rows = dict(
        max_len=96, train_batch_size=8, micro_train_tokens=200, max_epochs=1, learning_rate=1e-4, zero_stage=0
    )
    pairs, texts = (
        Data(sources=str(material / f"{name}.jsonl"), max_samples=16) for name in ("preferences", "sft")
    )
    stages: list[StageConfig] = [
        SFT(model="base", data=texts, **rows),
        RewardModel(model="base", data=pairs, **rows),
        DPO(policy="base", data=pairs, **rows),
        KTO(policy="base", data=pairs, **rows),
    ]
    result = {}
    for config in stages:
        place = folder / config.stage
        place.mkdir()
        request = stage_request(config, base)
        try:
            import_module(KINDS[config.stage].module).run(request, RunDir(place))
            result[config.stage] = "yes"
        except Exception as error:
            result[config.stage] = f"{type(error).__name__}: {' '.join(str(error).split())[-200:]}"
    return result
