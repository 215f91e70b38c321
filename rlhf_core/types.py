"""Records that cross a process or reach a file: frozen pydantic models, torch-free."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(gt=0)]


class Frozen(BaseModel):
    """Base of every record and config: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=True, ser_json_inf_nan="constants")


class Ranks(Frozen):
    """Processes of one model and what each of them owns. On a CPU machine `gpus` is 0 and `cpus` counts."""

    num_nodes: Positive = Field(1, description="nodes")
    num_ranks_per_node: Positive = Field(1, description="ranks on each node (one per GPU)")
    cpus: float = Field(1.0, gt=0, description="CPUs of one rank")
    gpus: float = Field(0.0, ge=0, description="GPUs of one rank")

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.num_ranks_per_node


class FileInfo(Frozen):
    """One line of a manifest. `size` in bytes, `sha256` in hex."""

    size: int
    sha256: str


class StageResult(Frozen):
    """What a finished stage left behind; `result.json`, always written last.

    `outputs` names the directories or files other stages may ask for, relative to the run directory
    (`checkpoint` for a model, `pairs` for a preference data set, `report` for an evaluation).
    """

    name: str
    stage: str
    digest: str
    seconds: float
    metrics: dict[str, float]
    outputs: dict[str, str]
    files: dict[str, FileInfo]
    environment: dict[str, str]


class PreferencePair(Frozen):
    """One row of a `pairs.jsonl`; `..._cut`: the length limit ended the answer. Chat messages are `{"role": ..., "content": ...}`."""

    prompt: tuple[dict[str, str], ...]
    chosen: str
    rejected: str
    chosen_score: float
    rejected_score: float
    chosen_cut: bool = False
    rejected_cut: bool = False


class ScoredAnswer(Frozen):
    """One row of a preferences stage that makes no pairs: an answer and its reward, in the reward model's own units."""

    prompt: tuple[dict[str, str], ...]
    response: str
    reward: float


class LabelledAnswer(ScoredAnswer):
    """An answer that is desirable (`label`) or not, for KTO."""

    label: bool


Label = Literal["A>>B", "A>B", "A=B", "B>A", "B>>A"]
POINTS: dict[str, float] = {"A>>B": 1.0, "A>B": 1.0, "A=B": 0.5, "B>A": 0.0, "B>>A": 0.0}  # of A


class Game(Frozen):
    """One verdict on two answers, in Arena-Hard's format. `score` speaks of A and B as the judge saw them; None: no verdict."""

    score: Label | None
    judgment: dict[str, str]
    prompt: tuple[dict[str, str], ...] = ()


class Judgment(Frozen):
    """One battle: two games on one question. In game 0 A is the baseline, in game 1 A is the model."""

    uid: str
    category: str
    judge: str
    model: str
    baseline: str
    games: tuple[Game, Game]

    @property
    def scores(self) -> tuple[float | None, float | None]:
        """The model's score in each game, 0, 0.5 or 1; None where there was no verdict."""
        first, second = (None if game.score is None else POINTS[game.score] for game in self.games)
        return None if first is None else 1 - first, second

    @property
    def score(self) -> float | None:
        """Mean of the games played."""
        played = [score for score in self.scores if score is not None]
        return sum(played) / len(played) if played else None


class WinRate(Frozen):
    """Win rate of one model against the baseline with a 95 % question-clustered bootstrap interval.

    `num_failed` counts games without a verdict, `swap_consistency` is the share of questions whose two games name the same
    winner, `arena_score` counts each strong verdict three times, as Arena-Hard does. `length_controlled` is the win rate that the
    judge would give answers as long as the baseline's, by a Bradley-Terry fit with the length difference, with its 95 % interval.
    """

    model: str
    baseline: str
    judge: str
    win_rate: float
    ci_low: float
    ci_high: float
    num_questions: int
    num_failed: int
    swap_consistency: float
    by_category: dict[str, float]
    arena_score: float | None = None
    length_controlled: float | None = None
    lc_low: float | None = None
    lc_high: float | None = None


class StyleEffect(Frozen):
    """What a typical difference (root mean square) in one feature of style adds to the log-odds of winning, with a 95 % interval."""

    feature: str
    effect: float
    ci_low: float
    ci_high: float


class Judging(Frozen):
    """What a judge was asked. `games` counts verdicts and `failed` those without one, of the `questions` put to it.

    Tokens are those of all verdicts used, `requests` only those sent by the run that wrote this; `cost` is in US dollars, None
    when the prices are not known.
    """

    questions: int
    games: int
    failed: int
    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float | None = None


class Answering(Frozen):
    """What a remote model was asked for its answers, and how. `url` is the endpoint, `settings` the sampling fields of each request.

    Tokens are those of all answers used, `requests` only those sent by the run that wrote this; `failed` counts questions without an
    answer; `cost` is in US dollars, None when the prices are not known.
    """

    model: str
    url: str
    settings: dict[str, Any]
    questions: int
    failed: int
    requests: int
    input_tokens: int
    output_tokens: int
    cost: float | None = None


class EvalReport(Frozen):
    """The evaluation of all models of one recipe by one judge.

    `right` is the share of rule-correct answers per model, when a rule exists; `mean_tokens` and `truncated` speak of the
    answers (`truncated`: share cut at the limit); `agreement` is the share of battles in which another judge names the same winner.
    `win_rates` are against the baseline, `against_parent` against the model each was trained from, where that is another one.
    `answering` is about the remote models.
    """

    baseline: str
    judge: str
    win_rates: tuple[WinRate, ...]
    right: dict[str, float]
    mean_tokens: dict[str, float]
    truncated: dict[str, float]
    agreement: dict[str, float] = {}
    against_parent: tuple[WinRate, ...] = ()
    style: tuple[StyleEffect, ...] = ()
    judging: Judging | None = None
    answering: dict[str, Answering] = {}
