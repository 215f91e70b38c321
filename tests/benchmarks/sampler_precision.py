"""The gap between the log-probs of vLLM and of the trainer in bf16 and fp16, each with the head's product in
fp32 and without, and what it costs: seconds and memory of sampling, of scoring and of training.

    PYTHONPATH=. python tests/benchmarks/sampler_precision.py --out FOLDER --json new.json

Models of few layers with random weights (seed 0), and hidden sizes and vocabularies as published; on a CPU
small ones. The last norm is set to give an entropy of 2 nats a token. vLLM samples answers, which the trainer
scores. Each family and dtype has a process of its own; what is timed runs alone. FOLDER/FAMILY-DTYPE.json has
all that was measured. The engine runs without torch.compile, with its decoding steps as CUDA graphs.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.config import EngineConfig
from rlhf_core.data.documents import Document, compact
from rlhf_core.models.kernels.attention import VARLEN
from rlhf_core.models.load_model import load_policy
from rlhf_core.models.policy import Policy, masked_logprobs
from rlhf_core.objectives.collate import Batch, collate
from rlhf_core.rollout.engine_contract import SampledAnswer, Sampling
from rlhf_core.rollout.vllm.environment import UNCOMPILED
from rlhf_core.rollout.vllm.vllm_engine import VllmEngine
from tests.benchmarks.record import add_options, figure, write
from tests.benchmarks.shapes import letters
from tests.families.checks import last_norm
from tests.support.families import FAMILIES, SHAPE, config_class, model_class

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
ENTROPY = 2.0  # nats a token
DTYPES = ("bfloat16", "float16")
SMALL_VOCABULARY = 2048
# As published: hidden size, heads, key heads, head size, inner size, vocabulary.
PUBLISHED = {
    "qwen2": (1536, 12, 2, 128, 8960, 151936),
    "qwen3": (2560, 32, 8, 128, 9728, 151936),
    "llama": (4096, 32, 8, 128, 14336, 128256),
    "phi3": (3072, 32, 32, 96, 8192, 32064),
    "olmo3": (4096, 32, 32, 128, 11008, 100278),
    "gemma3": (2560, 8, 4, 256, 10240, 262144),
    "granite": (4096, 32, 8, 128, 12800, 49159),
    "qwen3-moe": (2048, 32, 4, 128, 6144, 151936),
    "ministral3": (3072, 32, 8, 128, 9216, 131072),
    "gemma2": (2304, 8, 4, 256, 9216, 256000),
}
NAMES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 768}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder for models and results")
    parser.add_argument("--families", nargs="+", default=[*PUBLISHED], choices=PUBLISHED)
    parser.add_argument("--layers", type=int, default=4, help="an even number")
    parser.add_argument("--prompts", type=int, default=64 if ON_GPU else 4)
    parser.add_argument("--prompt-len", type=int, default=64 if ON_GPU else 8)
    parser.add_argument("--generate-len", type=int, default=128 if ON_GPU else 16)
    parser.add_argument("--processes", type=int, default=4 if ON_GPU else 1, help="at the same time")
    parser.add_argument("--limit", type=float, default=340.0, help="seconds until what is left is given up")
    parser.add_argument("--only", nargs=2, metavar=("FAMILY", "DTYPE"), help="measure this in this process")
    add_options(parser, "sampler-precision")
    arguments = parser.parse_args()
    if arguments.only:
        measure(*arguments.only, arguments)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = measure_all(arguments)
    told = [f"{name}: {found['error']}" for name, found in results.items() if "error" in found]
    print("\n".join(told), flush=True)


def measure_all(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Runs a process for each family and dtype, and writes the record anew whenever one ends."""
    start = time.monotonic()
    waiting = [(family, dtype) for family in arguments.families for dtype in DTYPES]
    running: dict[str, subprocess.Popen[bytes]] = {}
    results: dict[str, dict[str, Any]] = {}
    while waiting or running:
        while waiting and len(running) < arguments.processes:
            family, dtype = waiting.pop(0)
            command = [sys.executable, *sys.argv, "--only", family, dtype]
            running[f"{family}-{dtype}"] = subprocess.Popen(command)
        time.sleep(0.2)
        late = time.monotonic() - start > arguments.limit
        for name, process in [*running.items()]:
            if late:
                process.kill()
            if late or process.poll() is not None:
                del running[name]
                results[name] = stored(arguments.out / f"{name}.json", process.wait())
                seconds = time.monotonic() - start
                print(f"[{seconds:.0f} s] {name}: {json.dumps(results[name])}", flush=True)
                save_record(results, arguments)
        if late:
            print(f"the limit is reached; not measured: {waiting}", flush=True)
            waiting = []
    return results


def stored(file: Path, code: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if code and "error" not in found:
        found["error"] = f"its process ended with code {code}"
    return found


def save_record(results: dict[str, dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Writes the record: the mean gap of each family, and medians over all families."""
    if not arguments.json:
        return
    settings = {
        name: getattr(arguments, name) for name in ("layers", "prompts", "prompt_len", "generate_len")
    }
    figures = {}
    for dtype in DTYPES:
        for head in ("", " + fp32 head"):
            short = dtype.replace("loat", "p").replace("bfp", "bf") + head
            of_setting = {
                name.rpartition("-")[0]: found[head]
                for name, found in results.items()
                if name.endswith(f"-{dtype}") and head in found
            }
            for family, found in of_setting.items():
                if "gap" in found:
                    figures[f"{family}, {short}, mean gap"] = figure(found["gap"], "nats")
            for key, unit in UNITS.items():
                values = [found[key] for found in of_setting.values() if key in found]
                if values:
                    figures[f"median, {short}, {key}"] = figure(
                        float(f"{statistics.median(values):.3g}"), unit
                    )
    title = "Log-probs of vLLM and of the trainer by precision, families of random weights"
    write(arguments.json, arguments.name, title, settings, figures)


UNITS = {
    "gap": "nats",
    "k3": "nats",
    "largest": "nats",
    "sampling": "s",
    "sampling peak": "MiB",
    "scoring": "ms",
    "scoring peak": "MiB",
    "training": "ms",
    "training peak": "MiB",
}


def measure(family: str, dtype: str, arguments: argparse.Namespace) -> None:
    """Measures a family in one dtype, and writes FAMILY-DTYPE.json after each part."""
    found: dict[str, Any] = {"family": family, "dtype": dtype}
    file = arguments.out / f"{family}-{dtype}.json"
    try:
        folder = model_folder(family, arguments, found)
        for _ in measured(folder, dtype, arguments, found):
            file.write_text(json.dumps(found))
    except Exception as error:
        lines = str(error).strip().splitlines()
        found["error"] = f"{type(error).__name__}: {' '.join(lines[:2])[:300]}"
    file.write_text(json.dumps(found))


@contextmanager
def alone(out: Path, name: str = "gpu") -> Iterator[None]:
    """Waits until no other process is in such a block."""
    with (out / f"{name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def model_folder(family: str, arguments: argparse.Namespace, found: dict[str, Any]) -> Path:
    """Returns the family's model, which the first process that asks makes."""
    folder: Path = arguments.out / family
    with alone(arguments.out, family):
        if not (folder / "entropy.json").exists():
            entropy = make_model(family, arguments.layers, folder)
            (folder / "entropy.json").write_text(json.dumps(entropy))
    found["entropy"] = round(json.loads((folder / "entropy.json").read_text()), 2)
    return folder


def make_model(family: str, layers: int, folder: Path) -> float:
    """Saves a random model in bf16; returns its entropy."""
    *sizes, vocabulary = PUBLISHED[family]
    larger = dict(zip(NAMES, sizes, strict=True)) if ON_GPU else {"initializer_range": 0.2}
    vocabulary = vocabulary if ON_GPU else SMALL_VOCABULARY
    own = FAMILIES[family][1]
    types = {"layer_types": own["layer_types"] * (layers // 2)} if "layer_types" in own else {}
    experts = EXPERTS if ON_GPU and family == "qwen3-moe" else {}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "vocab_size": vocabulary}
    lengths = {"num_hidden_layers": layers, "max_position_embeddings": 1024}
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with DEVICE:
        model = model_class(family)(
            config_class(family)(**{**SHAPE, **own, **larger, **types, **experts, **ids, **lengths})
        )
    torch.set_default_dtype(torch.float32)
    entropy = scale_logits(model.to(DEVICE).eval())
    model.save_pretrained(folder)
    letters(vocabulary).save_pretrained(folder)
    return entropy


@torch.no_grad()
def scale_logits(model: Any) -> float:
    """Sets the weights of the last norm to a number that makes the mean entropy about ENTROPY; returns the
    entropy."""
    weight = last_norm(model)
    tokens = torch.randint(2, model.config.vocab_size, (1, 256), generator=torch.Generator().manual_seed(0))

    def entropy(scale: float) -> float:
        weight.fill_(scale)
        table = model(input_ids=tokens.to(DEVICE)).logits.float().log_softmax(-1)
        return float(-(table.exp() * table).sum(-1).mean())

    scale = 0.0625
    while entropy(scale) > ENTROPY and scale < 4096:
        scale *= 1.5
    low = scale / 1.5
    for _ in range(7):
        middle = (low + scale) / 2
        low, scale = (middle, scale) if entropy(middle) > ENTROPY else (low, middle)
    return entropy(scale)


def measured(folder: Path, dtype: str, arguments: argparse.Namespace, found: dict[str, Any]) -> Iterator[str]:
    """Adds what is measured to `found`: keys "" and " + fp32 head". Yields the name of each part."""
    rng = torch.Generator().manual_seed(1)
    shape = (arguments.prompts, arguments.prompt_len)
    prompts = torch.randint(2, SMALL_VOCABULARY, shape, generator=rng).tolist()
    length = arguments.prompt_len + arguments.generate_len
    options = {"max_num_seqs": max(8, arguments.prompts)}
    if ON_GPU:
        options |= {"compilation_config": UNCOMPILED, "cudagraph_capture_sizes": [arguments.prompts]}
    config = EngineConfig(kv_cache_gib=0.5, gpu_memory_utilization=0.08, options=options)
    engine = VllmEngine(
        str(folder),
        config,
        seed=0,
        max_model_len=length + 1,
        dtype=dtype,
        routing_replay=True,
        fp32_head=True,
    )
    answers = {}
    for head in (" + fp32 head", ""):
        engine.llm.apply_model(partial(set_head, in_fp32=bool(head), dtype=getattr(torch, dtype)))
        sample = partial(sampled, engine, prompts, arguments.generate_len)
        sample()
        with alone(arguments.out):
            seconds, peak, answers[head] = timed(sample, 2)
        found[head] = {"sampling": round(seconds, 4), "sampling peak": peak}
        yield f"sampling{head}"
    engine.close()
    del engine, sample
    gc.collect()
    policy = load_policy(str(folder), dtype).to(DEVICE)
    for head, groups in answers.items():
        documents = [
            compact(prompt, group[0].tokens, group[0].experts)
            for prompt, group in zip(prompts, groups, strict=True)
        ]
        if documents[0].experts is not None and not policy.replays:
            policy.replay_routing()
        policy.fp32_head = bool(head)
        batch = laid_out(policy, documents)
        sampler = torch.tensor([value for group in groups for value in group[0].logprobs], dtype=torch.double)
        found[head] |= gap(scored(policy, batch), sampler) | {"tokens": len(sampler)}
        yield f"gap{head}"
        with alone(arguments.out):
            seconds, peak, _ = timed(partial(scored, policy, batch), 3)
        found[head] |= {"scoring": round(1e3 * seconds, 2), "scoring peak": peak}
        with alone(arguments.out):
            seconds, peak, _ = timed(partial(trained, policy, batch), 3)
        found[head] |= {"training": round(1e3 * seconds, 2), "training peak": peak}
        yield f"seconds{head}"


def set_head(model: nn.Module, in_fp32: bool, dtype: torch.dtype) -> None:
    """Lets the engine that was started with a head in fp32 go on with or without it, so that both are of one
    engine."""
    for part in model.modules():
        if type(part).__name__ == "LogitsProcessor":
            part.head_dtype = torch.float32 if in_fp32 else dtype  # type: ignore[assignment]
            part.in_fp32 = in_fp32  # type: ignore[assignment]


def sampled(engine: VllmEngine, prompts: list[list[int]], new_tokens: int) -> list[list[SampledAnswer]]:
    sampling = Sampling(1, 1.0, new_tokens, [], seed_whole=ON_GPU)
    return engine.generate(prompts, range(len(prompts)), sampling)


def timed(work: Callable[[], Any], rounds: int) -> tuple[float, float, Any]:
    """Returns the seconds of the fastest round, the MiB by which it exceeds the memory before it (0 on a
    CPU), and its last result."""
    seconds = []
    if ON_GPU:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if ON_GPU else 0
    for _ in range(rounds):
        start = time.perf_counter()
        result = work()
        if ON_GPU:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() - before if ON_GPU else 0
    return min(seconds), round(peak / 2**20, 1), result


def laid_out(policy: Policy, documents: Sequence[Document]) -> Batch:
    """Returns the documents in one row where a kernel keeps them apart, otherwise in a row each."""
    packed = policy.model.config._attn_implementation == VARLEN
    rows = [list(documents)] if packed else [[document] for document in documents]
    return collate(rows, pad_token_id=0, experts=True).to(DEVICE)


@torch.no_grad()
def scored(policy: Policy, batch: Batch) -> Tensor:
    return masked_logprobs(policy.eval(), batch).logprobs[batch.mask]


def trained(policy: Policy, batch: Batch) -> None:
    """A pass with its gradients, which are dropped."""
    with torch.enable_grad():
        masked_logprobs(policy.train(), batch).logprobs.sum().backward()
    policy.zero_grad(set_to_none=True)


def gap(trainer: Tensor, sampler: Tensor) -> dict[str, float]:
    """Returns the mean and the largest |difference| of log-probs (N,) of sampled tokens, and the mean of
    `exp(d) - 1 - d` of the differences, which estimates the KL divergence of sampler and trainer (k3,
    Schulman 2020)."""
    difference = trainer.double().cpu() - sampler
    k3 = difference.expm1() - difference
    values = {"gap": difference.abs().mean(), "k3": k3.mean(), "largest": difference.abs().max()}
    return {name: float(f"{float(value):.3g}") for name, value in values.items()}


if __name__ == "__main__":
    main()
