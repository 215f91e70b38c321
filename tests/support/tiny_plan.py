"""A small recipe with a loop, work of its stages, and the stages that two plans do not share."""

from __future__ import annotations

from collections.abc import Callable

from rlhf_core.recipe.plan import Node, Plan
from rlhf_core.runs.run_dir import Outcome, RunDir, StageRequest, run_in_directory

Planned = Callable[..., Plan]
TEXT = """
name: tiny
base_model: base
stages:
  publication: {model: loop, evaluation: evaluation}
  sft: {data: {sources: train.jsonl}}
  reward_model: {data: {sources: pairs.jsonl}}
  ppo: {prompts: {sources: prompts.jsonl}}
  loop: {stage: iterative_dpo, policy: ppo, prompts: {sources: prompts.jsonl}, rounds: 2, prompts_per_round: 100, beta: 0.3}
  evaluation: {models: [ppo, loop], questions: {path: q.jsonl}, judges: [{kind: rule}, {kind: reward}]}
"""


def finish(plan: Plan, node: Node, outputs: dict[str, str]) -> None:
    """Does a stage's work in this process: each output is a small file in a folder, or a file."""
    run = RunDir(node.run_dir)
    run.prepare(plan.request(node))

    def work(request: StageRequest, run: RunDir) -> Outcome:
        for path in outputs.values():
            (run / path).parent.mkdir(parents=True, exist_ok=True)
            (run / path).write_text(request.digest)
        return Outcome({"loss": 1.0}, outputs)

    run_in_directory(run.path, work)


def changed(before: Plan, after: Plan) -> set[str]:
    return {node.name for node in after.nodes if node.digest != before[node.name].digest}
