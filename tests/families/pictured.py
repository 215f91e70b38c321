"""Measures the families that read images, on documents with images of random colours: prints RESULT and what was
found, by family. python -m tests.families.pictured"""

from __future__ import annotations

import json
import sys
from contextlib import closing, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from rlhf_core.config import EngineConfig
from rlhf_core.models.checkpoint.checkpoint_weights import checkpoint_weights
from rlhf_core.models.checkpoint.save import save_model
from rlhf_core.models.policy import Policy
from rlhf_core.rollout.engine_kinds import open_engine
from tests.families.checks import same, stored
from tests.support.pictured_models import FAMILIES
from tests.support.pictured_pairs import whole_inputs
from tests.unit.models.test_trained_encoder import Trained


def measured(family: str, folder: Path) -> dict[str, Any]:
    """Distances of log-probs in nats, largest over tokens, and of gradients as a share of their norm."""
    material = Trained(family, folder / "base")
    policy = material.opened()
    packed = torch.cat(material.logprobs(policy, [material.documents])).detach()
    own = material.gradients(policy, [[material.documents]])
    theirs = material.expected()
    named = {name if name in theirs else f"model.{name}": gradient for name, gradient in own.items()}
    apart = torch.cat([(named[name] - gradient).flatten() for name, gradient in theirs.items()])
    whole = torch.cat([gradient.flatten() for gradient in theirs.values()])
    policy.zero_grad()
    return {
        "log-probs": rounded(largest(packed, whole_logprobs(material))),
        "gradients": rounded(float(apart.norm() / whole.norm())),
        "export": export_unlike(material, policy, folder / "export") or "as the base",
        **synced(material, policy),
    }


@torch.no_grad()
def whole_logprobs(material: Trained) -> Tensor:
    """What transformers' whole model computes for the tokens of answers."""
    whole = AutoModelForImageTextToText.from_pretrained(material.folder, dtype=torch.float32).eval()
    found = []
    for document in material.documents:
        inputs = whole_inputs(whole, material.reader, document)
        logprobs = whole(**inputs).logits.log_softmax(-1)[0, :-1]
        values = logprobs.gather(1, inputs["input_ids"][0, 1:, None])[:, 0]
        found.append(values[torch.tensor(document.mask)[1:]])
    return torch.cat(found)


def export_unlike(material: Trained, policy: Policy, folder: Path) -> str:
    """The first tensors of an export without training that are not as in the checkpoint."""
    encoder = policy.image_encoder
    weights = checkpoint_weights(policy.model, lambda _: nullcontext(), encoder=encoder)
    save_model(policy.model, weights, str(material.folder), folder, encoder=encoder)
    before = stored(material.folder)
    after = stored(folder)
    unlike = [name for name in before.keys() | after.keys() if not same(before.get(name), after.get(name))]
    return ", ".join(sorted(unlike)[:3])


@torch.no_grad()
def synced(material: Trained, policy: Policy) -> dict[str, float]:
    """Distances of the engine's log-probs from the trainer's, whose encoder alone has changed."""
    assert policy.image_encoder is not None
    generator = torch.Generator().manual_seed(1)
    for weight in policy.image_encoder.parameters():
        weight += 0.02 * torch.randn(weight.shape, generator=generator)
    expected = torch.cat(material.logprobs(policy, [[document] for document in material.documents]))
    tokens = [list(document.tokens) for document in material.documents]
    pictures = [document.pictures for document in material.documents]

    def gap() -> float:
        found = engine.prompt_logprobs(tokens, pictures)
        values = [
            torch.tensor(own)[torch.tensor(document.mask)]
            for own, document in zip(found, material.documents, strict=True)
        ]
        return rounded(largest(torch.cat(values), expected))

    config = EngineConfig(kind="transformers")
    with closing(open_engine(str(material.folder), config, seed=0, max_model_len=512)) as engine:
        before = gap()
        engine.update(checkpoint_weights(policy.model, lambda _: nullcontext(), encoder=policy.image_encoder))
        return {"sent": gap(), "before it": before}


def largest(own: Tensor, other: Tensor) -> float:
    return float((own - other).abs().max())


def rounded(value: float) -> float:
    return float(f"{value:.1e}")


def main() -> int:
    found = {}
    for family in FAMILIES:
        with TemporaryDirectory() as folder:
            try:
                found[family] = measured(family, Path(folder))
            except Exception as error:
                found[family] = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"}
        print(family, found[family], flush=True)
    print("RESULT " + json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
