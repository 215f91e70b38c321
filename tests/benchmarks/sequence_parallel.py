"""Long sequences on one GPU and on several that compute each pass together: tokens a second, memory, and
whether the losses are the same.

    python tests/benchmarks/sequence_parallel.py [--gpus 1 2] [--shape 7b] [--lora 16] [--tokens 32768 131072]
    torchrun --nproc-per-node 2 tests/benchmarks/sequence_parallel.py [...]      # one number of GPUs

The model has random weights, in memory (--shape) or from a folder (--model). Each pass of --tokens is one
document, and each optimiser step one pass, with all layers recomputed. Losses and gradient norms are compared
before, on packed documents (SFT) and on pairs with shared prompts (DPO), of --check tokens; the learning rate
is 0. Exits with 1 where they differ by more than --noise of their size.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import add_options, figure, save
from transformers import AutoModelForCausalLM, Qwen2Config

from rlhf_core.cluster.rank_environment import STORE, store_address
from rlhf_core.config import DPO, SFT, Lora, Ranks
from rlhf_core.data.documents import Document, Pair
from rlhf_core.data.packing import Passes
from rlhf_core.models.kernels.attention import attention_for, can_share, set_attention
from rlhf_core.models.kernels.liger import fuse
from rlhf_core.models.load_model import trained_policy, without_dropout
from rlhf_core.models.lora import add_lora
from rlhf_core.models.policy import Policy, masked_logprobs
from rlhf_core.objectives.collate import collate
from rlhf_core.objectives.losses import preference_loss, sft_loss
from rlhf_core.stages.dpo import pair_logprobs
from rlhf_core.training.engine import Engine
from rlhf_core.training.ranks import make_engine

GIB = 2**30
SHAPES: dict[str, dict[str, Any]] = {  # those of Qwen2.5, and one of Qwen3
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "8b": {  # Qwen3's: eight ranks can share its heads, but not the 28 of 7b
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
VOCABULARY = 152064
TIMED = 2  # steps, after one that is not


def command_line() -> argparse.ArgumentParser:
    """The options of this command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gpus",
        type=int,
        nargs="+",
        default=[1, 2],
        help="one run with each number; without GPUs, processes",
    )
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--model", type=Path, help="a folder with a model, in place of --shape")
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters; 0: all weights are trained")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072], help="tokens of a pass")
    parser.add_argument(
        "--mlp-tokens", type=int, help="tokens that a feed-forward block computes at a time; default: all"
    )
    parser.add_argument(
        "--check", type=int, default=8192, help="tokens of the passes whose losses are compared"
    )
    parser.add_argument(
        "--noise",
        type=float,
        default=0.02,
        help="share by which losses and norms may differ; rounding to bf16 takes less than 0.01",
    )
    parser.add_argument("--zero-stage", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    add_options(parser, "sequence-parallel")
    return parser


def main() -> int:
    arguments = command_line().parse_args()
    if "WORLD_SIZE" in os.environ:
        return rank(arguments, Path(os.environ.get("RESULT", os.devnull)))
    found = {count: run_ranks(count) for count in arguments.gpus}
    return table(arguments, found)


def run_ranks(count: int) -> dict[str, Any]:
    """Runs this file on `count` ranks; what rank 0 measured."""
    with tempfile.TemporaryDirectory() as folder:
        shared = {
            "WORLD_SIZE": str(count),
            STORE: store_address(),
            "RESULT": str(Path(folder) / "result.json"),
        }
        command = [sys.executable, *sys.argv]
        environments = [os.environ | shared | {"RANK": str(i), "LOCAL_RANK": str(i)} for i in range(count)]
        running = [subprocess.Popen(command, env=environment) for environment in environments]
        try:
            while any(process.poll() is None for process in running) and not any(
                process.poll() for process in running
            ):
                time.sleep(0.2)  # a rank that failed leaves the others waiting
        finally:
            for process in running:
                process.kill()
                process.wait()
        result = Path(shared["RESULT"])
        return dict(json.loads(result.read_text())) if result.exists() else {}


def rank(arguments: argparse.Namespace, result: Path) -> int:
    """One rank: compares, then measures until memory ends."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    config = config_of(arguments, int(os.environ["WORLD_SIZE"]), float(torch.cuda.is_available()))
    engine = make_engine(policy_of(arguments), config, packed=True)
    vocabulary = engine.module.model.config.vocab_size
    found: dict[str, Any] = {}
    for name, loss in (("sft", sft), ("dpo", dpo)):
        loss_of = loss(engine, arguments.check, vocabulary)
        value = loss_of()
        engine.backward(value, True)
        found[name] = {"loss": float(value.detach()), "norm": engine.step(0.0)}
    for tokens in arguments.tokens:
        try:
            found[str(tokens)] = measured(engine, tokens, vocabulary)
        except torch.OutOfMemoryError:
            found[str(tokens)] = {}
            break
        finally:
            if engine.rank == 0:
                result.write_text(json.dumps(found))
                print(
                    f"{engine.world_size} GPU(s), {tokens:,} tokens:"
                    f" {found.get(str(tokens)) or 'out of memory'}",
                    flush=True,
                )
    return 0


def policy_of(arguments: argparse.Namespace) -> Policy:
    lora = Lora(rank=arguments.lora) if arguments.lora else None
    if arguments.model:
        return trained_policy(str(arguments.model), arguments.dtype, False, lora, 0)
    dtype = getattr(torch, arguments.dtype)
    small = arguments.shape == "tiny"
    config = Qwen2Config(
        **SHAPES[arguments.shape],
        vocab_size=512 if small else VOCABULARY,
        max_position_embeddings=2**18,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention_for(dtype, config)
        )
    policy = Policy(fuse(set_attention(model)))
    if lora:
        add_lora(policy.model, lora, 0)
    return without_dropout(policy)


def config_of(arguments: argparse.Namespace, world: int, gpus: float) -> SFT:
    """The stage on `world` ranks of `gpus` each, which compute each pass together."""
    return SFT.model_validate(
        {
            "data": {"sources": "none.jsonl"},
            "ranks": Ranks(num_ranks_per_node=world, gpus=gpus),
            "zero_stage": arguments.zero_stage if world > 1 else 0,
            "sequence_parallel_size": world,
            "dtype": arguments.dtype,
            "gradient_checkpointing": True,
            "mlp_tokens": arguments.mlp_tokens,
            "micro_train_tokens": max(arguments.tokens),
        }
    )


def words(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    return [rng.randrange(2, vocabulary) for _ in range(count)]


def sft(engine: Engine, tokens: int, vocabulary: int) -> Callable[[], torch.Tensor]:
    """Packed documents, half of each under the mask."""
    rng = random.Random(0)
    documents = list[Document]()
    left = tokens
    while left > 0:
        length = min(left, rng.randrange(tokens // 32, tokens // 2))
        documents.append(Document(words(rng, length, vocabulary), [i >= length // 2 for i in range(length)]))
        left -= length
    return lambda: nll(engine, documents)


def dpo(engine: Engine, tokens: int, vocabulary: int) -> Callable[[], torch.Tensor]:
    """Pairs whose prompts are stored once where the kernel takes that."""
    rng = random.Random(1)
    pairs = list[Pair]()
    for _ in range(4):
        asked = words(rng, tokens // 8, vocabulary)
        answers = [words(rng, rng.randrange(tokens // 32, tokens // 16), vocabulary) for _ in range(2)]
        both = [Document(asked + said, [False] * len(asked) + [True] * len(said)) for said in answers]
        pairs.append(Pair(both[0], both[1], 0.0))
    passes = Passes(1, 2 * tokens, share=can_share(engine.module.model, engine.device))
    config = DPO(policy="base", pairs="pairs", beta=0.001, loss="sigmoid")

    def loss() -> torch.Tensor:
        chosen, rejected = pair_logprobs(engine, pairs, 0, False, passes).responses
        nothing = torch.zeros_like(chosen)
        return preference_loss(config, chosen, rejected, nothing, nothing, float(len(pairs))).loss

    return loss


def nll(engine: Engine, documents: list[Document]) -> torch.Tensor:
    batch = collate([documents], 0).to(engine.device)
    return sft_loss(masked_logprobs(engine, batch).logprobs, batch.mask, float(batch.mask.sum())).loss


def measured(engine: Engine, tokens: int, vocabulary: int) -> dict[str, float]:
    """Seconds of a step, tokens a second of all ranks, GiB at the peak, and the loss, of one document of
    `tokens`."""
    document = Document(words(random.Random(2), tokens, vocabulary), [True] * tokens)
    seconds = []
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        engine.release()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(1 + TIMED):
        engine.barrier()
        start = time.monotonic()
        loss = nll(engine, [document])
        engine.backward(loss, True)
        engine.step(0.0)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - start)
    step = min(seconds[1:])
    peak = torch.cuda.max_memory_allocated() / GIB if on_gpu else math.nan
    return dict(
        seconds=round(step, 3), rate=round(tokens / step), peak=round(peak, 2), loss=float(loss.detach())
    )


def table(arguments: argparse.Namespace, found: dict[int, dict[str, Any]]) -> int:
    """Prints what was measured; 1 where losses or gradient norms differ."""
    first = found[arguments.gpus[0]]
    differs = False
    print(f"\n{'':>24}" + "".join(f"{count:>18} GPU" for count in found))
    for name in ("sft", "dpo"):
        for what in ("loss", "norm"):
            values = [of.get(name, {}).get(what, math.nan) for of in found.values()]
            differs |= not all(abs(value - values[0]) <= arguments.noise * abs(values[0]) for value in values)
            print(f"{name + ' ' + what:>24}" + "".join(f"{value:>22.6f}" for value in values))
    figures = {}
    for tokens in arguments.tokens:
        for what, unit in (("rate", "tokens/s"), ("peak", "GiB"), ("loss", "")):
            values = [of.get(str(tokens), {}).get(what, math.nan) for of in found.values()]
            print(
                f"{f'{tokens:,} {what} {unit}'.rstrip():>24}"
                + "".join(f"{value:>22,.{0 if what == 'rate' else 3}f}" for value in values)
            )
            if unit:
                shown = zip(found, values, strict=True)
                figures |= {
                    f"{tokens} {what} {n}": figure(v, unit, "higher" if what == "rate" else "lower")
                    for n, v in shown
                }
    print(
        "losses and gradient norms DIFFER"
        if differs or not first
        else "losses and gradient norms are the same"
    )
    save(arguments, "Long sequences over several GPUs", figures)
    return int(differs or not first)


if __name__ == "__main__":
    raise SystemExit(main())
