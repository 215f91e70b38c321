"""Under ZeRO-3 no rank holds the whole model: not while it loads, not afterwards. What is exported is what
one rank exports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.config import Lora
from rlhf_core.models.checkpoint.checkpoint_weights import checkpoint_weights, trained_weights
from rlhf_core.models.checkpoint.save import save_adapter, save_model, save_tokenizer
from rlhf_core.models.load_model import trained_policy, trained_scorer
from rlhf_core.training.engine import AdamW, TorchEngine, on_cpu
from tests.support.families import make_family
from tests.support.gloo_ranks import on_gloo_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LOADED = """
import json, logging, sys
from pathlib import Path
logging.disable(logging.WARNING)
from rlhf_core.models.load_model import trained_policy
from rlhf_core.training.zero.zero_shards import ZeroShards

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024

shards = ZeroShards("float32")
trained_policy(sys.argv[2], "float32", False, None, 0, shards=shards)  # imports what it needs
Path("/proc/self/clear_refs").write_text("5")
before = peak()
model = trained_policy(sys.argv[1], "float32", False, None, 0, shards=shards).model
whole = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters()) * 4
held = sum(p.numel() + (p.ds_tensor.numel() if hasattr(p, "ds_id") else 0) for p in model.parameters()) * 4
print(json.dumps({"whole": whole, "held": held, "grown": peak() - before}))
"""
EXPORTED = """
import json, logging, sys
from pathlib import Path
logging.disable(logging.WARNING)
from rlhf_core.config import Lora
from rlhf_core.models.weights import shards
from rlhf_core.models.weights import weight_reader
from rlhf_core.models.load_model import trained_policy, trained_scorer
from rlhf_core.training.engine import AdamW
from rlhf_core.training.ranks import export
from rlhf_core.training.zero.zero_engine import ZeroEngine
from rlhf_core.training.zero.zero_shards import ZeroShards

shards.SMALL, weight_reader.LARGE = 500, 2000
for name, case in json.loads(sys.argv[1]).items():
    lora = Lora(rank=4) if case["lora"] else None
    cut = ZeroShards(case["dtype"])
    if case["scorer"]:
        module = trained_scorer(case["base"], 0, case["dtype"], False, lora, 3, shards=cut)
    else:
        module = trained_policy(case["base"], case["dtype"], False, lora, 3, shards=cut)
    assert any(hasattr(weight, "ds_id") for weight in module.parameters()), name
    export(ZeroEngine(module, AdamW((0.9, 0.95), 0.0, 1.0), 3, case["dtype"], 1), Path(sys.argv[2], name), case["base"], lora, False)
"""

RESUMED = """
import json, logging, sys
from pathlib import Path
logging.disable(logging.WARNING)
import torch
from rlhf_core.models.load_model import trained_policy
from rlhf_core.training.engine import AdamW
from rlhf_core.training.zero.zero_engine import ZeroEngine
from rlhf_core.training.zero.zero_shards import ZeroShards

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024

def engine(source):
    module = trained_policy(source, "bfloat16", False, None, 0, shards=ZeroShards("bfloat16"))
    return ZeroEngine(module, AdamW((0.9, 0.95), 0.0, 1.0), 3, "bfloat16", 1)

def step(made):
    tokens = torch.randint(100, (1, 32), generator=torch.Generator().manual_seed(made.rank))
    out = made(tokens, torch.arange(32)[None], torch.zeros_like(tokens))
    made.backward(-out.logprobs.mean() / made.world_size, True)
    return made.step(1e-4)

state, resumes = Path(sys.argv[2]), sys.argv[3] == "resumes"
if not resumes:
    made = engine(sys.argv[1])
    step(made)
    made.save_state(state)
    made.finish_saving()
    norm = step(made)
else:
    step(engine(sys.argv[4]))  # imports what it needs
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    made = engine(sys.argv[1])
    made.load_state(state)
    norm = step(made)
share = sum(p.ds_tensor.numel() for p in made.module.parameters())
print(json.dumps({"norm": norm, "share": share, "grown": peak() - before if resumes else 0}))
"""


def test_no_rank_holds_the_model_while_it_loads(material: Path, tmp_path: Path) -> None:
    """85e6 parameters, 340 MB in fp32: a rank of four holds a quarter, and one weight at a time besides."""
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=8000,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    for printed in on_gloo_ranks(4, LOADED, tmp_path, material / "base"):
        found = json.loads(printed.splitlines()[-1])
        assert found["held"] < 0.26 * found["whole"]
        # its share, and what the allocator keeps of single weights
        assert found["grown"] < 0.75 * found["whole"]


def test_a_rank_that_resumes_holds_its_share(material: Path, tmp_path: Path) -> None:
    """Weights and gradients in bf16, their copies and moments in fp32 and the gradients that Adam gets are 20
    bytes for each weight of its share; a layer or two are whole at times, and DeepSpeed's bucket of gradients
    is as large as one."""
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=36,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=8000,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    state = tmp_path / "state"
    state.mkdir()
    trained, resumed = (
        [
            json.loads(printed.splitlines()[-1])
            for printed in on_gloo_ranks(2, RESUMED, tmp_path, state, what, material / "base")
        ]
        for what in ("trains", "resumes")
    )
    assert {found["norm"] for found in trained} == {found["norm"] for found in resumed}
    for found in resumed:
        print(f"{found['grown'] / 1e6:.0f} MB, {found['share'] / 1e6:.0f} million weights")
        assert found["grown"] < 27 * found["share"] + 20e6


def test_two_ranks_export_what_one_exports(material: Path, tmp_path: Path) -> None:
    """Right after loading, so that the files are equal byte for byte: heads, adapters, tied weights, experts,
    a part of a larger model."""
    cases: dict[str, dict[str, Any]] = {}
    for family in ("llama", "qwen3", "mixtral", "gemma3-wrapper"):
        cases[family] = {
            "base": str(make_family(family, material / "base", tmp_path / family)),
            "dtype": "float32",
        }
    cases["bfloat16"] = cases["llama"] | {"dtype": "bfloat16"}
    cases["head-of-its-own"] = {
        "base": str(said_to_be_tied(Path(cases["llama"]["base"]), tmp_path / "said")),
        "dtype": "float32",
    }
    cases["adapters"] = cases["llama"] | {"lora": True}
    cases["experts-adapters"] = cases["mixtral"] | {"lora": True}
    cases["new-head"] = cases["llama"] | {"scorer": True}
    cases["head-adapters"] = cases["llama"] | {"scorer": True, "lora": True}
    cases["merged"] = {
        "base": str(save_random_adapter(Path(cases["llama"]["base"]), tmp_path / "adapter")),
        "dtype": "float32",
    }
    cases = {name: {"lora": False, "scorer": False} | case for name, case in cases.items()}
    on_gloo_ranks(2, EXPORTED, json.dumps(cases), tmp_path / "two")
    for name, case in cases.items():
        lora = Lora(rank=4) if case["lora"] else None
        load = trained_scorer if case["scorer"] else trained_policy
        model = load(
            *((case["base"], 0) if case["scorer"] else (case["base"],)), case["dtype"], False, lora, 3
        ).model
        save_model(
            model,
            checkpoint_weights(model, lambda parameters: torch.no_grad()),
            case["base"],
            tmp_path / "one" / name,
        )
        folders = [tmp_path / where / name for where in ("one", "two")]
        one, two = (
            {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
            for folder in folders
        )
        assert (folders[1] / "adapter" / "adapter_model.safetensors").is_file() == case["lora"], name
        assert one.keys() == two.keys() and [file for file in one if one[file] != two[file]] == [], name


def said_to_be_tied(base: Path, folder: Path) -> Path:
    """A checkpoint with a head of its own whose config says otherwise."""
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    return folder


def save_random_adapter(base: Path, folder: Path) -> Path:
    policy = trained_policy(str(base), "float32", False, Lora(rank=4), 3)
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    engine = TorchEngine(policy, AdamW((0.9, 0.95), 0.0, 1.0))
    save_adapter(
        policy.model, on_cpu(engine, trained_weights(policy.model, engine.gathered)), str(base), folder
    )
    save_tokenizer(str(base), folder)
    return folder
