"""Seconds of SFT passes on the ranks of `torchrun`, without Ray, data or a loop: what the engine and
DeepSpeed make of a card.

    torchrun --nproc-per-node 4 tests/benchmarks/passes.py --model FOLDER [--zero-stage 3] [--tokens 16384
    ...] [--profile]

Random documents of 200 to 1,000 tokens fill each pass; every optimiser step has 4 passes. `launched` is when
the host was through with a pass that began on an idle card: as long as it is below the pass's own seconds,
the card sets the pace. --profile tells for each of the card's streams how long it worked and how long it
waited, and where the busiest waited longest. --score: passes without gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from record import add_options, figure, save

from rlhf_core.config import Lora
from rlhf_core.data.documents import Document
from rlhf_core.models.kernels.float8 import pays, use_float8
from rlhf_core.models.load_model import recompute, trained_policy
from rlhf_core.models.lora import lora_layers
from rlhf_core.models.policy import masked_logprobs
from rlhf_core.objectives.collate import collate
from rlhf_core.training.engine import AdamW, TorchEngine
from rlhf_core.training.zero.zero_engine import ZeroEngine
from rlhf_core.training.zero.zero_options import ZeroOptions

PASSES = 4
STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--zero-stage", type=int, default=3, help="0: plain torch, on one card")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[16384], help="of a pass; several sizes one after the other"
    )
    parser.add_argument("--vocabulary", type=int, default=150000, help="tokens are drawn below this")
    parser.add_argument(
        "--options", default="{}", help="JSON of ZeroOptions: adam_offload, param_offload, hpz_ranks, more"
    )
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--kernels", type=int, default=6, help="that --profile names, of each stream")
    parser.add_argument(
        "--float8",
        choices=("ours", "tensorwise", "rowwise", "rowwise_with_gw_hp"),
        help="FP8; ours, or torchao's recipe",
    )
    parser.add_argument("--score", action="store_true", help="compute log-probs alone")
    parser.add_argument("--lora", type=int, help="train adapters of this rank alone")
    parser.add_argument("--peft", action="store_true", help="adapters compute as peft's own layers do")
    parser.add_argument("--checkpointing", action="store_true")
    add_options(parser, "passes")
    arguments = parser.parse_args()
    on_card = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_card else torch.device("cpu")
    if on_card:
        torch.cuda.set_device(device)
    lora = Lora(rank=arguments.lora) if arguments.lora else None
    policy = trained_policy(str(arguments.model), "bfloat16", False, lora, 0).to(device).train()
    if arguments.peft:
        for layer in lora_layers(policy.model).values():
            vars(layer).pop("forward", None)
    recompute(policy.model, float(arguments.checkpointing))
    if arguments.float8:
        multiply_in_float8(policy.model, arguments.float8)
    size = sum(weight.numel() for weight in policy.parameters())
    adamw = AdamW((0.9, 0.95), 0.0, 1.0)
    stage = arguments.zero_stage
    options = ZeroOptions(**json.loads(arguments.options))
    engine = ZeroEngine(policy, adamw, stage, "bfloat16", 1, options) if stage else TorchEngine(policy, adamw)
    found: dict[str, dict[str, Any]] = {}
    for tokens in arguments.tokens:
        found |= measure(engine, tokens, size, arguments, device)
    if engine.rank == 0:
        save(arguments, f"Training passes, ZeRO-{stage}, {engine.world_size} ranks", found)


def multiply_in_float8(model: Any, recipe: str) -> None:
    if recipe == "ours":
        use_float8(model)
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def wanted(layer: torch.nn.Module, name: str) -> bool:
        return layer is not model.get_output_embeddings() and pays(*layer.weight.shape)

    convert_to_float8_training(
        model, config=Float8LinearConfig.from_recipe_name(recipe), module_filter_fn=wanted
    )
    for layer in model.modules():
        if type(layer).__name__ == "Float8Linear":
            layer.forward = torch.compile(layer.forward)


def measure(
    engine: TorchEngine | ZeroEngine,
    tokens: int,
    size: int,
    arguments: argparse.Namespace,
    device: torch.device,
) -> dict[str, Any]:
    """Prints and returns what a pass of so many tokens takes."""
    on_card = device.type == "cuda"
    stage = arguments.zero_stage
    batch = collate([made_up(tokens, arguments.vocabulary)], 0).to(device)
    if on_card:
        torch.cuda.reset_peak_memory_stats()

    def one_pass(last: bool) -> None:
        if arguments.score:
            with torch.no_grad():
                masked_logprobs(engine, batch)
            return
        logprobs = masked_logprobs(engine, batch).logprobs
        engine.backward(-(logprobs * batch.mask).sum() / tokens / PASSES / engine.world_size, last)

    def step() -> float:
        start = time.monotonic()
        for number in range(PASSES):
            one_pass(number == PASSES - 1)
        if not arguments.score:
            engine.step(1e-6)
        wait()
        return time.monotonic() - start

    def wait() -> None:
        if on_card:
            torch.cuda.synchronize()

    for _ in range(3):
        step()
    engine.barrier()
    seconds = statistics.median(step() for _ in range(STEPS)) / PASSES
    wait()
    start = time.monotonic()
    one_pass(False)
    launched = time.monotonic() - start
    wait()
    alone = time.monotonic() - start
    one_pass(True)
    if not arguments.score:
        engine.step(1e-6)
    if engine.rank == 0:
        rate = tokens / seconds
        operations = (2 if arguments.score else 6) * size
        peak = torch.cuda.max_memory_allocated() / 2**30 if on_card else float("nan")
        whole = (
            f"{rate:,.0f} tokens/s a card, {rate * engine.world_size:,.0f} in all, MFU"
            f" {operations * rate / 790e12:.1%}"
        )
        print(
            f"ZeRO-{stage}, {engine.world_size} ranks, {tokens} tokens: {seconds * 1e3:.1f} ms a pass with"
            f" its part of the step, {whole}"
        )
        print(
            f"one pass alone: launched {launched * 1e3:.0f} ms, done {alone * 1e3:.0f}; peak {peak:.1f} GiB",
            flush=True,
        )
    if arguments.profile and on_card:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
        if engine.rank == 0:
            show(profile, arguments.kernels)
    whole_rate = figure(round(tokens / seconds * engine.world_size), "tokens/s", "higher")
    return {f"pass of {tokens:,}": figure(round(seconds * 1e3, 1), "ms"), f"rate, {tokens:,}": whole_rate}


def made_up(tokens: int, vocabulary: int) -> list[Document]:
    rng = random.Random(int(os.environ["RANK"]))
    lengths = (202, 1002, 844) * (tokens // 2048) or (tokens // 2, tokens // 2)
    return [
        Document([rng.randrange(2, vocabulary) for _ in range(length)], [True] * length) for length in lengths
    ]


def show(profile: torch.profiler.profile, number: int) -> None:
    """Work and gaps of each stream over a step, and its `number` longest kernels; of the busiest one also its
    longest gaps."""
    import json

    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    streams = defaultdict(list)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            streams[event["args"]["stream"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    longest = max(streams.values(), key=lambda kernels: sum(end - start for start, end, _ in kernels))
    for stream, kernels in streams.items():
        kernels.sort()
        gaps = [after[0] - before[1] for before, after in pairwise(kernels)]
        busy = sum(end - start for start, end, _ in kernels)
        print(
            f"stream {stream}: {len(kernels)} kernels, {busy / 1e3:.0f} ms; gaps above 50 us"
            f" {sum(g for g in gaps if g > 50) / 1e3:.0f} ms"
        )
        by_name: dict[str, float] = defaultdict(float)
        for start, end, name in kernels:
            by_name[name] += end - start
        for name, spent in sorted(by_name.items(), key=lambda item: -item[1])[:number]:
            print(f"    {spent / 1e3:7.1f} ms {name[:90]}")
        if kernels is longest:
            first = kernels[0][0]
            for before, after in sorted(pairwise(kernels), key=lambda pair: pair[0][1] - pair[1][0])[:10]:
                waited = (after[0] - before[1]) / 1e3
                at = (before[1] - first) / 1e3
                print(f"    waited {waited:6.1f} ms, {at:.0f} ms in, {before[2][:50]} -> {after[2][:50]}")


if __name__ == "__main__":
    main()
