"""Holds the roles that are trained, and the critic. Each method is called on every rank of the role with the
same arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from rlhf_core.config import PPO
from rlhf_core.data.documents import Document
from rlhf_core.models.load_model import trained_scorer
from rlhf_core.models.policy import Policy, Scorer, token_scores
from rlhf_core.objectives.actor_loss import count
from rlhf_core.objectives.collate import Batch
from rlhf_core.objectives.losses import Loss, value_loss
from rlhf_core.objectives.masked import before
from rlhf_core.stages.ppo.by_reference import joined
from rlhf_core.stages.ppo.roles.read_only import ModelRole
from rlhf_core.stages.ppo.roles.role_passes import (
    ModelSpec,
    Read,
    Scored,
    arrays_of,
    collate_rows,
    documents_of,
    parts_of,
    passes_of,
    read_pictures,
    score_share,
    token_values,
)
from rlhf_core.stages.ppo.rollout_records import Experience, StoredColumn
from rlhf_core.system import progress
from rlhf_core.training.engine import at
from rlhf_core.training.ranks import make_engine, shards_of
from rlhf_core.training.train_loop import accumulate


class Update(NamedTuple):
    """Describes one optimiser step: the indices of its experience, its learning rate, the coefficient of a KL
    in the loss, and how far the critic's values may move (None: no limit)."""

    indices: list[int]
    learning_rate: float
    kl_coef: float
    value_clip: float | None = None


class Steps(NamedTuple):
    """Holds the metrics of each optimiser step and, if the actor did not score before training
    (`scores_actor`), this rank's log-probs from the passes of the first step."""

    metrics: list[dict[str, float]]
    logprobs: Scored


class Trained(ModelRole):
    """Trains a model. `name` is the name of the role's group. The ZeRO stage in `config` is already
    decided."""

    def __init__(self, name: str, module: Policy | Scorer, model: ModelSpec, config: PPO):
        self.engine = make_engine(module, config, packed=bool(model.micro_tokens), role=name)
        self.module = module
        self.model = model
        self.config = config
        self.passes = passes_of(self.engine, *config.train_pass)

    def train(
        self,
        experience: Sequence[Experience],
        updates: Sequence[Update],
        places: Sequence[StoredColumn] = (),
        *stored: Any,
    ) -> Steps:
        """Takes one optimiser step per update, until one `ends_iteration`; updates after that one have no
        metrics. `stored`, at `places`, is the data that the experience holds by reference."""
        experience = joined(experience, places, stored) if places else experience
        metrics = []
        logprobs = Scored()
        for number, update in enumerate(updates, 1):
            with at(f"optimiser step {number} of {len(updates)}"):
                items = [experience[i] for i in update.indices]
                read: list[Read] = []
                metrics.append(self.update(items, update, read))
                if number == 1:
                    logprobs = [(update.indices[i], values) for i, values in arrays_of(read)]
            if self.ends_iteration(metrics[-1]):
                break
        metrics += [{}] * (len(updates) - len(metrics))
        return Steps(metrics, logprobs)

    def ends_iteration(self, metrics: Mapping[str, float]) -> bool:
        """Returns whether the step with these metrics is the last on this experience."""
        return False

    def update(self, items: list[Experience], update: Update, read: list[Read]) -> dict[str, float]:
        """Takes one optimiser step on `items` and returns its metrics. Adds the log-probs of its passes to
        `read` if the actor did not score before training."""
        raise NotImplementedError

    def step(self, name: str, learning_rate: float) -> dict[str, float]:
        """Takes the engine's step and returns its metrics, whose names begin with `name`. In float16 these
        include the loss scale after the step, and whether an overflow made it skip the step (1 or 0)."""
        before = self.engine.scaling
        norm = self.engine.step(learning_rate)
        metrics = {} if norm is None else {f"{name}/grad_norm": norm}
        after = self.engine.scaling
        if before is not None and after is not None:
            metrics[f"{name}/loss_scale"] = after.scale
            metrics[f"{name}/overflow"] = float(after.overflows - before.overflows)
        return metrics | {f"{name}/learning_rate": learning_rate}

    def release(self) -> None:
        self.engine.release()

    def save_state(self, folder: str) -> None:
        self.engine.save_state(Path(folder))

    def finish_saving(self) -> None:
        self.engine.finish_saving()

    def load_state(self, folder: str) -> None:
        with progress.files(Path(folder)):
            self.engine.load_state(Path(folder))


class Critic(Trained):
    """Trains the value model, which starts from the reward model including its head."""

    def __init__(self, model: ModelSpec, config: PPO, seed: int):
        scorer = trained_scorer(
            model.path,
            model.pad_token_id,
            model.dtype,
            model.trust_remote_code,
            config.lora,
            seed,
            shards_of(config, "critic"),
        )
        read_pictures(scorer, model)
        super().__init__("critic", scorer, model, config)

    def values(self, documents: Sequence[Document]) -> Scored:
        """Returns `V(tokens[<t])` for every token."""
        return score_share(self.engine, documents, self.model, self._values)

    def end_values(self, documents: Sequence[Document]) -> Scored:
        """Returns `V(tokens)` of each whole document, as an array with one element."""

        def outputs(batch: Batch) -> Tensor:
            return token_scores(self.engine, batch)

        everywhere = score_share(self.engine, documents, self.model, outputs)
        return [(index, values[-1:]) for index, values in everywhere]

    def update(self, items: list[Experience], update: Update, read: list[Read]) -> dict[str, float]:
        """Takes one step on the clipped value loss, and returns the step's metrics."""
        tokens = count([item.document.mask_array for item in items]).tokens

        def loss(part: list[int]) -> Loss:
            here = [items[i] for i in part]
            batch, rows = collate_rows(here, self.passes, self.model.pad_token_id, self.engine)
            old, returns = (
                token_values(batch, rows, [getattr(e, name) for e in here]) for name in ("values", "returns")
            )
            assert old is not None and returns is not None
            return value_loss(self._values(batch), old, returns, batch.mask, update.value_clip, tokens)

        parts = parts_of([item.document for item in items], self.passes)
        metrics = accumulate(self.engine, parts, loss, documents=documents_of(items))
        return metrics | self.step("value", update.learning_rate)

    def _values(self, batch: Batch) -> Tensor:
        return before(token_scores(self.engine, batch), batch.host.positions)
