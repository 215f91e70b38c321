"""Measures one model family, random weights (seed 0): its export, rows with several documents against single
ones, a step of SFT, a reward model, adapters, vLLM before and after a weight sync and with planted faults,
and a step on sampled answers; on a CPU the stages that train, too. Prints one line of JSON.

On a CPU in fp32 with tiny sizes, on a GPU in bf16 with the sizes of sizes.py. The last norm is set to give an
    entropy of 2 nats a token. python tests/families/measure.py gemma4 --material FOLDER
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.managers import BaseManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_core.config import EngineConfig, Lora
from rlhf_core.data.documents import compact
from rlhf_core.models.document_leak import detect_document_leak
from rlhf_core.models.load_model import load_policy, trained_policy, trained_scorer
from rlhf_core.models.policy import Policy, masked_logprobs
from rlhf_core.objectives.collate import collate
from rlhf_core.rollout.engine_contract import Sampling
from rlhf_core.rollout.vllm.vllm_engine import VllmEngine
from tests.families.checks import (
    DEVICE,
    DOCUMENTS,
    export_unlike,
    gaps,
    last_norm,
    logprobs,
    planted,
    stored,
    trained,
    weights_of,
)
from tests.families.sizes import larger
from tests.support.families import WRAPPERS, make_family

ON_GPU = torch.cuda.is_available()
DTYPE = "bfloat16" if ON_GPU else "float32"
ENTROPY = 2.0
STEP = 0.005  # nats a token; relative size of a step, so that a lost sync shows
BaseManager.register("VllmEngine", VllmEngine)


@torch.no_grad()
def scale_logits(folder: Path, whole: bool) -> float:
    """Sets all weights of the last norm to the number that makes the mean entropy ENTROPY; returns the
    entropy."""
    auto = transformers.AutoModelForImageTextToText if whole else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype="auto").to(DEVICE).eval()
    weight = last_norm(model)
    tokens = torch.tensor([DOCUMENTS[2]], device=DEVICE)

    def entropy(scale: float) -> float:
        weight.fill_(scale)
        table = model(input_ids=tokens).logits.float().log_softmax(-1)
        return float(-(table.exp() * table).sum(-1).mean())

    low = 0.125
    least = entropy(0.125)
    # a cap makes the entropy of large logits high, too
    while (found := entropy(high := 1.25 * low)) > ENTROPY and found <= least:
        low = high
        least = found
    for _ in range(8 if found <= ENTROPY else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if entropy(middle) > ENTROPY else (low, middle)
    reached = entropy(high)
    with TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        scaled = stored(Path(saved))
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        save_file(
            tensors | {name: scaled[name] for name in tensors if name in scaled},
            file,
            metadata={"format": "pt"},
        )
    return reached


def changed(policy: Policy) -> None:
    """A step that moves every weight by about STEP of its size, in the direction of SFT's gradient's sign."""
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.grad is not None:
                parameter -= STEP * parameter.abs().mean() * parameter.grad.sign()
    policy.zero_grad()


def measured(family: str, folder: Path, material: Path) -> dict[str, Any]:
    result: dict[str, Any] = {
        "family": family,
        "device": torch.cuda.get_device_name() if ON_GPU else "CPU",
        "dtype": DTYPE,
    }

    def noted(name: str, work: Callable[[], Any]) -> Any:
        try:
            result[name] = work()
        except Exception as error:
            # of another process: its traceback
            lines = [line for line in str(error).splitlines() if line.strip("- ")]
            said = re.sub(r"/\S*/(model|alignflow-text-\w+)", "MODEL", " ".join("".join(lines[-1:]).split()))
            result[name] = f"{type(error).__name__}: {said[-300:]}"

    result["entropy"] = round(scale_logits(folder, family in WRAPPERS), 2)
    policy = load_policy(str(folder), DTYPE).eval().to(DEVICE)
    detect_document_leak(policy, policy, torch.device(DEVICE), packed=True)
    result["rows"] = "one document" if policy.document_leak else "packed"

    def packed() -> float:
        with torch.no_grad():
            return round(float((logprobs(policy, packed=True) - logprobs(policy)).abs().max()), 7)

    if not policy.document_leak:
        noted("packed minus single", packed)

    def sft() -> list[float]:
        losses = []
        for _ in range(2):
            loss = -logprobs(policy).sum() / sum(len(document) - 1 for document in DOCUMENTS)
            losses.append(round(float(loss), 4))
            loss.backward()
            without = [name for name, parameter in policy.named_parameters() if parameter.grad is None]
            assert not without, f"no gradient for {without[0]} and {len(without) - 1} others"
            if len(losses) == 1:
                changed(policy)
        policy.zero_grad()
        return losses

    start = logprobs(policy).detach().cpu()
    if ON_GPU:
        with torch.no_grad():
            exact = logprobs(load_policy(str(folder), "float32").eval().to(DEVICE)).cpu()
        result["rounding"] = gaps([start.tolist()], exact)["mean"]
    noted("export", lambda: export_unlike(policy, folder, folder.parent / "export") or "as the base")
    noted("sft loss", sft)
    noted("reward model", lambda: trained_scorer(str(folder), 0, DTYPE, False, None, 0) and "yes")
    noted("adapters", lambda: trained_policy(str(folder), DTYPE, False, Lora(rank=4, alpha=8), 0) and "yes")
    if not ON_GPU:
        noted("stages", lambda: trained(folder, material, folder.parent))
    result["vllm"] = {}
    noted("engine", lambda: with_engine(folder, policy, start, result["vllm"]) or "yes")
    return result


def with_engine(folder: Path, policy: Policy, start: Tensor, found: dict[str, Any]) -> None:
    """Writes what is measured into `found`."""
    with BaseManager(ctx=get_context("spawn")) as engines:
        vllm = EngineConfig(kv_cache_gib=0.5, gpu_memory_utilization=0.3, start_timeout=300)
        sampler = engines.VllmEngine(
            str(folder), seed=0, max_model_len=128, dtype=DTYPE, config=vllm, routing_replay=True
        )  # type: ignore[attr-defined]

        def send() -> None:
            sampler.update(weights_of(policy))

        found["at start"] = gaps(sampler.prompt_logprobs(DOCUMENTS), start)
        with torch.no_grad():
            now = logprobs(policy)
        found["not sent"] = gaps(sampler.prompt_logprobs(DOCUMENTS), now)
        send()
        theirs = sampler.prompt_logprobs(DOCUMENTS)
        found |= {"sent": gaps(theirs, now), "planted": planted(policy, theirs)}
        found |= on_samples(policy, sampler)
        send()
        with torch.no_grad():
            found["sent again"] = gaps(sampler.prompt_logprobs(DOCUMENTS), logprobs(policy))


def on_samples(policy: Policy, sampler: Any) -> dict[str, Any]:
    """GRPO's first step, where every ratio is 1, on vLLM's answers; with its routing where it returns that,
    too."""
    groups = sampler.generate(DOCUMENTS, range(len(DOCUMENTS)), Sampling(4, 1.0, 24, []))
    answers = [(prompt, answer) for prompt, group in zip(DOCUMENTS, groups, strict=True) for answer in group]
    documents = [compact(p, a.tokens, a.experts) for p, a in answers]
    batch = collate([[d] for d in documents], pad_token_id=0, experts=True).to(DEVICE)
    theirs = [a.logprobs for _, a in answers]
    found = {}
    ours = masked_logprobs(policy, batch).logprobs[batch.mask]
    found["sampled"] = gaps(theirs, ours)
    if batch.experts is not None:
        policy.replay_routing()
        ours = masked_logprobs(policy, batch).logprobs[batch.mask]
        found["sampled, replayed"] = gaps(theirs, ours)
    advantages = torch.cat(
        [torch.full((len(a.tokens),), (-1.0) ** i) for i, (_, a) in enumerate(answers)]
    ).to(DEVICE)
    (-(advantages * ours).mean()).backward()
    changed(policy)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures one model family.")
    parser.add_argument("family")
    parser.add_argument(
        "--material",
        type=Path,
        required=True,
        help="made by make_material.py: data, and a base whose tokenizer is taken",
    )
    arguments = parser.parse_args()
    with TemporaryDirectory() as made:
        folder = make_family(
            *(arguments.family, arguments.material / "base", Path(made) / "model", getattr(torch, DTYPE)),
            larger(arguments.family) if ON_GPU else {},
        )
        print("RESULT " + json.dumps(measured(arguments.family, folder, arguments.material)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
