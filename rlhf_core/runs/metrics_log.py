"""Writes a stage's metrics to `metrics.jsonl`, which all readers use, and copies them to TensorBoard files,
the log and W&B."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from rlhf_core.runs.remote.wandb_mirror import mirror_of
from rlhf_core.runs.run_dir import METRICS, RunDir
from rlhf_core.system.files import write_text


class Tracker:
    """Appends lines to `metrics.jsonl` and scalars to `tensorboard/`, and prints a short progress line.

    A stage that resumes at `first_step` drops the lines from this step on, so that each step has one line.
    """

    def __init__(self, run: RunDir, total_steps: int, first_step: int = 0):
        from torch.utils.tensorboard import SummaryWriter

        self.total_steps = total_steps
        keep = [line for line in read_metrics(run.path) if line["step"] <= first_step]
        write_text(run / METRICS, "".join(json.dumps(line) + "\n" for line in keep))
        self._file = (run / METRICS).open("a")
        self._board = SummaryWriter(str(run / "tensorboard"), purge_step=first_step + 1)
        self._mirror = mirror_of(run)
        for line in keep:
            self._copy(line)

    def log(self, step: int, metrics: Mapping[str, float], show: tuple[str, ...] = ()) -> None:
        """Writes the metrics of one step, and prints the metrics named in `show`."""
        self._file.write(json.dumps({"step": step, "time": time.time(), **metrics}) + "\n")
        self._file.flush()
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)
        self._copy({"step": step, **metrics})
        if show:
            shown = "  ".join(f"{name} {metrics[name]:.4g}" for name in show if name in metrics)
            print(f"step {step}/{self.total_steps}  {shown}", flush=True)

    def _copy(self, line: Mapping[str, float]) -> None:
        if self._mirror:
            self._mirror.log(
                int(line["step"]),
                {name: value for name, value in line.items() if name not in ("step", "time")},
            )

    def close(self) -> None:
        """Closes all files, and waits for W&B (see `wandb_mirror`)."""
        self._file.close()
        self._board.close()
        if self._mirror:
            self._mirror.close()


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """Returns all complete lines of a run's `metrics.jsonl`, without a last line truncated by a kill; [] for
    a missing file."""
    file = run_dir / METRICS
    if not file.is_file():
        return []
    lines = []
    for text in file.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines
