"""Draws the prompts of a curriculum according to the known counts of their right answers (see
`pass_rates.py`).

Prompts form an endless sequence of places. The prompt at a place is drawn when the place is first requested,
using the measurements up to then, and never changes. A resume state therefore contains the draws of the
places that are still needed. Any `batch` consecutive places have different prompts. Each source of a mixture
keeps its share of the places; the weights apply within a source.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

import numpy as np

from rlhf_core.config.ppo.curriculum_fields import Curriculum
from rlhf_core.stages.ppo.sampling.pass_rates import PassCounts, count_group, counts_before, weights_of

NEVER = -(1 << 40)  # the place of a prompt's last draw if it was never drawn
STATE_FILE = "curriculum.npz"
TRIES = 64  # draws from a whole source before drawing only among its eligible prompts
ROUNDING = 1e-6  # largest error of a sum of weighted rewards


class CurriculumDraws:
    """Holds the counts and draws of a run.

    `sources` (N,) holds the index of each prompt's source. `rates` (N,) holds pass rates that are known
    before the run, or nan; each counts as if measured on `answers` answers. `right_from` is the lowest reward
    of a correct answer. One thread may request places while another measures.
    """

    def __init__(
        self,
        config: Curriculum,
        sources: np.ndarray,
        rates: np.ndarray,
        answers: int,
        right_from: float,
        batch: int,
        seed: int,
    ):
        self._config = config
        self._members = [np.flatnonzero(sources == source) for source in range(int(sources.max()) + 1)]
        self._shares = np.array([len(members) for members in self._members]) / len(sources)
        self._right_from = right_from - ROUNDING * max(1.0, abs(right_from))
        self._batch = batch
        self._seed = seed
        self._counts = counts_before(rates, answers)
        self._weights = weights_of(self._counts, config.target)
        self._sums: dict[int, np.ndarray] = {}  # keyed by source; cumulative sums of the current weights
        self._last = np.full(len(sources), NEVER, np.int64)
        self._drawn: dict[int, int] = {}
        self._next = 0
        self._lock = Lock()

    def prompt_at(self, place: int) -> int:
        """Returns the index of the prompt at a place. Places must be requested in order; a place may be
        requested again until it is forgotten."""
        with self._lock:
            if place not in self._drawn:
                assert place == self._next, f"place {place} is asked for after {self._next - 1}"
                self._drawn[place] = self._draw(place)
                self._last[self._drawn[place]] = place
                self._next += 1
            return self._drawn[place]

    def _draw(self, place: int) -> int:
        """Draws a source by its share, then one of its prompts by weight. Repeats the draw of the prompt
        until it is eligible now, so the result is a draw among the eligible prompts."""
        rng = random.Random(f"{self._seed}-curriculum-{place}")
        source = drawn_from(self._shares.cumsum(), rng)
        for _ in range(TRIES):
            prompt = int(self._members[source][drawn_from(self._sums_of(source), rng)])
            if self._may_come(place, np.array([prompt])).any():
                return prompt
        return self._draw_among(place, source, rng)

    def _sums_of(self, source: int) -> np.ndarray:
        """Returns the cumulative weights of a source's prompts."""
        if source not in self._sums:
            self._sums[source] = self._weights[self._members[source]].cumsum()
        return self._sums[source]

    def _is_free(self, place: int, prompts: np.ndarray) -> np.ndarray:
        """Returns a mask of the prompts that do not occur in the last batch - 1 places."""
        free: np.ndarray = place - self._last[prompts] >= self._batch
        return free

    def _may_come(self, place: int, prompts: np.ndarray) -> np.ndarray:
        """Returns a mask of the eligible prompts: the free prompts, without solved prompts that were drawn
        too recently."""
        pause = self._config.solved_every * len(self._last)
        resting = self._counts.solved[prompts] & (place - self._last[prompts] < pause)
        return self._is_free(place, prompts) & ~resting

    def _draw_among(self, place: int, source: int, rng: random.Random) -> int:
        """Draws from a source with few eligible prompts. If none is eligible, takes the free prompt that was
        drawn least recently; if none is free, takes a prompt from another source."""
        members = self._members[source]
        if not self._is_free(place, members).any():
            has_free = [self._is_free(place, each).any() for each in self._members]
            source = drawn_from((self._shares * has_free).cumsum(), rng)
            members = self._members[source]
        candidates = members[self._may_come(place, members)]
        if len(candidates):
            return int(candidates[drawn_from(self._weights[candidates].cumsum(), rng)])
        left = members[self._is_free(place, members)]
        oldest = left[self._last[left] == self._last[left].min()]
        return int(oldest[rng.randrange(len(oldest))])

    def measure(self, places: Sequence[int], rewards: np.ndarray) -> None:
        """Counts the answers to the prompts at `places`. `rewards` (places, n) holds weighted sums before any
        standardisation, nan for an answer without a reward."""
        assert len(places) == len(rewards)
        with self._lock:
            prompts = [self._drawn[place] for place in places]
            given = ~np.isnan(rewards)
            right = given & (np.where(given, rewards, 0.0) >= self._right_from)
            groups = zip(prompts, right.sum(1).tolist(), given.sum(1).tolist(), strict=True)
            for prompt, of_right, answered in groups:
                count_group(self._counts, prompt, of_right, answered, rewards.shape[1], self._config.discount)
            changed = np.unique(prompts)
            self._weights[changed] = weights_of(self._counts, self._config.target, changed)
            self._sums.clear()

    def metrics(self) -> dict[str, float]:
        """Returns the mean pass rate of the prompts that have one, left out if no prompt has one. Also
        returns the fraction of all prompts that are solved, and the fraction without a pass rate."""
        with self._lock:
            known = self._counts.answered > 0
            metrics = {
                "curriculum/solved": float(self._counts.solved.mean()),
                "curriculum/unseen": float(1 - known.mean()),
            }
            if known.any():
                rates = self._counts.right[known] / self._counts.answered[known]
                metrics["curriculum/mean_pass_rate"] = float(rates.mean())
            return metrics

    def write(self, folder: Path, first: int) -> None:
        """Writes the state into a folder, with the draws of place `first` and all later places. Forgets the
        earlier draws."""
        with self._lock:
            self._drawn = {place: prompt for place, prompt in self._drawn.items() if place >= first}
            np.savez(
                folder / STATE_FILE,
                allow_pickle=False,
                right=self._counts.right,
                answered=self._counts.answered,
                solved=self._counts.solved,
                weights=self._weights,
                last=self._last,
                places=np.array(list(self._drawn), np.int64),
                prompts=np.array(list(self._drawn.values()), np.int64),
                next_place=self._next,
            )

    def read(self, folder: Path) -> None:
        """Restores the state written by `write`."""
        with np.load(folder / STATE_FILE, allow_pickle=False) as stored, self._lock:
            self._counts = PassCounts(stored["right"], stored["answered"], stored["solved"])
            self._last = stored["last"]
            self._drawn = dict(zip(stored["places"].tolist(), stored["prompts"].tolist(), strict=True))
            self._next = int(stored["next_place"])
            self._weights = stored["weights"]
            self._sums.clear()


def drawn_from(sums: np.ndarray, rng: random.Random) -> int:
    """Draws an index by the weights whose cumulative sums are `sums`, and returns it. Never draws a weight of
    0."""
    last = np.searchsorted(sums, sums[-1])  # the product may round up to the total
    return int(min(last, np.searchsorted(sums, rng.random() * sums[-1], side="right")))
