"""What the checks before a run import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CHECKED = """
import sys
from pathlib import Path
from rlhf_core.preflight.inputs import require_here
from rlhf_core.recipe.load_recipe import load_recipe
from rlhf_core.recipe.plan import plan

text = Path(sys.argv[1]).read_text().replace("../../demo/material", sys.argv[2])
recipe = Path("recipe.yaml")
recipe.write_text(text)
planned = plan(load_recipe(str(recipe), ("iterative_dpo.prompts_per_round=100",)))
require_here(planned, planned.nodes)
print(sorted({"torch", "vllm", "deepspeed"} & sys.modules.keys()))
"""


def test_the_checks_before_a_run_import_no_engine(material: Path, tmp_path: Path) -> None:
    """Importing torch takes seconds, and changes variables that the first stage's process has already got."""
    root = Path(__file__).parents[3]
    shipped = root / "deployments" / "recipes" / "tiny-cpu.yaml"
    checked = subprocess.run(
        [sys.executable, "-c", CHECKED, str(shipped), str(material)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert checked.returncode == 0, checked.stderr[-2000:]
    assert checked.stdout.split("\n")[-2] == "[]"
