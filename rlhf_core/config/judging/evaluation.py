"""Judges, battles, reward-model evaluation, regression suites, publication."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from rlhf_core.config.data import Data, Source, Text, template_mistakes
from rlhf_core.config.engines import only_in_ppo, without_pipeline
from rlhf_core.config.gates import Gated, Key
from rlhf_core.config.judging.lm_eval_tasks import task_name
from rlhf_core.config.loops import Sampling
from rlhf_core.config.processes import Groups, Served
from rlhf_core.records import RECIPE_ONLY, Config, No, NotInDigest, Positive, Rate, Share, Variable, check


class RuleJudge(Config):
    """A right answer wins against a wrong one. Each question has a known answer."""

    kind: Literal["rule"] = "rule"
    answer_key: str = Field("answer", description="column of the questions with the known answer")


class RewardJudge(Config):
    """The answer with the higher reward model score wins. A difference below `tie` is a tie."""

    kind: Literal["reward"] = "reward"
    reward: str = Field("reward_model", description="reward model")
    tie: float = Field(0.0, ge=0, description="score difference that still counts as a tie")


class RequestLimits(Config):
    """Concurrency, timeout and retries of requests to a chat endpoint."""

    concurrency: Annotated[Positive, NotInDigest] = Field(16, description="requests in flight")
    timeout: Annotated[Rate, NotInDigest] = Field(300.0, description="seconds one request may take")
    max_attempts: Annotated[Positive, NotInDigest] = Field(
        6, description="attempts per request when the endpoint is busy, down or slow"
    )


class Remote(RequestLimits):
    """A model behind an OpenAI-compatible endpoint."""

    model: str = Field(description="model name at the endpoint")
    base_url: str = Field("https://api.openai.com/v1", description="endpoint")
    api_key_env: Annotated[Variable, NotInDigest] = Field(
        "OPENAI_API_KEY", description="environment variable that holds the key"
    )
    requests_per_minute: Annotated[Positive | None, NotInDigest] = Field(
        None, description="requests are spaced so that no more are sent; default: no limit"
    )
    input_price: Annotated[float | None, NotInDigest] = Field(
        None, ge=0, description="US dollars per million input tokens, for the cost in the report"
    )
    output_price: Annotated[float | None, NotInDigest] = Field(
        None, ge=0, description="US dollars per million output tokens"
    )

    @field_validator("base_url")
    @classmethod
    def _is_an_address_without_secret(cls, value: str) -> str:
        if "@" in urlsplit(value).netloc or urlsplit(value).query:
            raise ValueError(
                "the address holds a password or a query, which would end up in files: put a key into the"
                " variable api_key_env names"
            )
        if not re.match("https?://[^/]", value):
            raise ValueError(f"{value!r} is no address: begin it with http:// or https://")
        return value


class ChatJudge(RequestLimits):
    """A chat model as judge, with the prompts of Arena-Hard."""

    max_tokens: Positive = Field(4096, description="longest verdict")
    max_failed: Annotated[Share, NotInDigest] = Field(
        0.02, description="share of failed or unparsed games above which the report fails"
    )
    interval_width: float | None = Field(
        None,
        gt=0,
        lt=1,
        description=(
            "stop judging a model when its 95 % interval is this narrow (0.1: +- 5 points); default: judge"
            " all questions"
        ),
    )
    sequential_questions: Positive = Field(
        50, description="questions between two computations of the interval, in random order"
    )
    verdict_cache: Annotated[str | None, NotInDigest] = Field(
        None,
        description=(
            "folder of verdicts shared by evaluations, so that no game is judged twice; default: in the run"
            " directory"
        ),
    )


class OpenAIJudge(Remote, ChatJudge):
    """A chat model behind an OpenAI-compatible endpoint as judge, with the prompts of Arena-Hard."""

    kind: Literal["openai"] = "openai"


class VllmJudge(ChatJudge, Served):
    """A chat model as judge, on a vLLM server that this stage starts and stops."""

    kind: Literal["vllm"] = "vllm"
    model: str = Field(description="the judge")


Judge = Annotated[RuleJudge | RewardJudge | OpenAIJudge | VllmJudge, Field(discriminator="kind")]


class Endpoint(Remote):
    """A model that answers questions behind an OpenAI-compatible endpoint."""

    temperature: float | None = Field(
        None, ge=0, description="sampling temperature; default: the evaluation's"
    )
    max_tokens: Positive | None = Field(
        None, description="longest answer in its own tokens; default: the evaluation's generate_max_len"
    )
    system: str | None = Field(None, description="system message before each question that has none")
    more: dict[str, Any] = Field(
        {}, description="further fields of each request (top_p, seed, reasoning_effort, ...)"
    )
    max_failed: Annotated[Share, NotInDigest] = Field(
        0.0, description="share of questions that may stay without an answer; these count as empty answers"
    )

    @field_validator("more")
    @classmethod
    def _is_json(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(value, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"cannot be sent as JSON ({error}): write dates in quotes, and leave out what is no text or"
                " number"
            ) from None
        return value


class RewardEvaluation(Config):
    """Evaluates reward models on held-out preference pairs: accuracy, calibration, length bias, agreement
    with each other."""

    models: tuple[str, ...] = Field(("reward_model",), description="reward models", min_length=1)
    data: Data = Field(description="held-out rows with prompt, chosen and rejected")
    subset_key: str = Field("subset", description="column that names a row's subset, for accuracy per subset")
    bins: Positive = Field(10, description="bins of the calibration curve")


class Evaluation(Gated, Sampling):
    """Pairwise battles of each model against the baseline: two games per question, with the answers
    swapped."""

    stage: Literal["evaluation"] = "evaluation"
    models: tuple[str, ...] = Field(
        description="models to judge, in order; the last is the final model", min_length=1
    )
    baseline: str = Field("sft", description="model they are judged against")
    endpoints: dict[str, Endpoint] = Field(
        {}, description="remote models by their names in models, baseline and parents"
    )
    questions: Source = Field(description="rows with a prompt, and what the rule needs")
    max_questions: Positive | None = Field(None, description="at most this many questions")
    template: str = Field("chat", description="'chat' or a plain template with one {}")
    judges: tuple[Judge, ...] = Field(
        (RuleJudge(),), description="the first judge decides, the others are second opinions", min_length=1
    )
    temperature: float = Field(0.0, ge=0, description="sampling temperature of the answers")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of the models that answer; auto: that of each checkpoint"
    )
    bootstrap_rounds: Positive = Field(
        1000, description="bootstrap resamples of the questions, for style control and over-optimisation"
    )
    parents: dict[str, str] | None = Field(
        None,
        description=(
            "model: the model it is also judged against; default: the stage each was trained from; {}: none"
        ),
    )
    # not in the digest itself: the plan replaces a loop by its judged rounds, which are
    last_rounds: Annotated[Positive | None, NotInDigest] = Field(
        None, description="of a loop in models, judge this many rounds, the last ones; default: all"
    )
    style_tokenizer: str | None = Field(
        None,
        description=(
            "counts answers' lengths: gpt-4o (tiktoken, a download), a folder or a Hub id; default: each"
            " model's own"
        ),
    )
    reward_evaluation: RewardEvaluation | None = Field(
        None, description="reward models to evaluate on held-out pairs"
    )
    calibration: Annotated[str | None, NotInDigest] = Field(
        None,
        description="calibration stage of the first judge: the evaluation waits for it and for its gates",
    )
    proxy: str | None = Field(
        None,
        description=(
            "reward model that was optimised: its mean score and the judge's win rate over the KL from the"
            " baseline make the over-optimisation curve (models: a loop, or STAGE.iterationN of ppo's"
            " export_at); needs temperature 1"
        ),
    )

    @check
    def _check_template(self) -> Iterator[str]:
        yield from template_mistakes(self.template)

    @check
    def _check_engine(self) -> Iterator[str]:
        if self.engine.num_engines > 1 or self.engine.sleep:
            yield (
                "an evaluation answers with one engine: leave engine.num_engines and engine.sleep out"
                " (tensor_parallel_size splits a model)"
            )
        yield from only_in_ppo(self.engine)
        yield from without_pipeline(self.engine)

    @check
    def _check_endpoints(self) -> Iterator[str]:
        named = {self.baseline, *self.models, *(self.parents or {}).values()}
        for name in self.endpoints:
            if name not in named:
                yield (
                    f"the endpoint {name!r} is not used: name it in models, as baseline or in parents, or"
                    " remove it"
                )

    @check
    def _sample_for_kl(self) -> Iterator[str]:
        if self.proxy is not None and self.endpoints:
            yield (
                "proxy needs log-probs of all models, which endpoints do not give: put the endpoints into an"
                " evaluation of their own"
            )
        if self.proxy is not None and self.temperature != 1:
            yield (
                "proxy needs the models' own distribution, because the KL is measured on their answers: set"
                " temperature to 1"
            )
        if (
            self.proxy is not None
            and isinstance(self.judges[0], RewardJudge)
            and self.judges[0].reward == self.proxy
        ):
            yield (
                f"the proxy {self.proxy} is also the judge that decides, and would agree with itself: put"
                " another judge first"
            )

    @property
    def asked(self) -> Data:
        """The questions as a data set."""
        return Data(sources=(self.questions,), template=self.template)

    @property
    def turns(self) -> Sequence[Groups]:
        return [
            {"sampler": self.engine},
            *({"judge": judge.engine} for judge in self.judges if isinstance(judge, VllmJudge)),
        ]

    @property
    def texts(self) -> Sequence[Text]:
        pairs = [self.reward_evaluation.data] if self.reward_evaluation else []
        return [
            Text("questions", self.asked, None, "prompt_max_len", self.prompt_max_len),
            *(
                Text("reward_evaluation.data", data, "preference", "prompt_max_len", self.prompt_max_len)
                for data in pairs
            ),
        ]

    @property
    def needed_keys(self) -> Sequence[Key]:
        judges = ((f"the judge {judge.model}", judge) for judge in self.judges if isinstance(judge, Remote))
        endpoints = ((f"the endpoint {name}", endpoint) for name, endpoint in self.endpoints.items())
        return [
            Key(name, one.api_key_env, "api.openai.com" in one.base_url)
            for name, one in (*judges, *endpoints)
        ]


class Regression(Evaluation):
    """A suite of questions that models lost or people reported, judged as in an evaluation. Reports which
    pass, newly fail or recover, and whether the final model's share is within the band of earlier trusted
    results."""

    stage: Literal["regression"] = "regression"  # type: ignore[assignment]
    questions: Source = Field(
        description="the suite: a file that `alignflow suite add` writes, or rows with uid, prompt and reason"
    )
    parents: dict[str, str] | None = Field(
        {}, description="model: the model it is also judged against; default: none"
    )
    history: int = Field(
        5,
        ge=0,
        description=(
            "this many earlier results of the stage, those whose gates passed, make the band; 0: there is"
            " none"
        ),
    )
    band: Rate = Field(3.0, description="half width of the band, in standard deviations")

    @check
    def _check_judges(self) -> Iterator[str]:
        if any(isinstance(judge, ChatJudge) and judge.interval_width is not None for judge in self.judges):
            yield "a regression suite judges all its questions: leave interval_width out of its judges"


class Publication(Gated):
    """Publishes a model with its card and scores, or a data set, to a folder and, with `repo_id`, to the
    Hub."""

    stage: Literal["publication"] = "publication"
    model: str | None = Field(None, description="model to publish")
    dataset: str | None = Field(
        None,
        description=(
            "in place of model: preferences stage whose pairs or answers, or evaluation whose judgments and"
            " answers to publish"
        ),
    )
    evaluation: str | None = Field(None, description="evaluation stage whose scores the model card shows")
    folder: str | None = Field(
        None, description="folder to publish to; default: published/ in the run directory", min_length=1
    )
    repo_id: str | None = Field(None, description="Hub repository, owner/name; the token comes from HF_TOKEN")
    branch: str = Field("main", description="branch of the repository; one that is not there is made")
    round_branch: str | None = Field(
        None,
        description=(
            "of a loop: every round is published too, to a branch of this name with the round's number for {}"
            " (round-{})"
        ),
    )
    champion: Annotated[bool, NotInDigest] = Field(
        False,
        description=(
            "once published, the model is the recipe's champion, until a gate on it fails:"
            " docs/how-to/champion.md"
        ),
    )
    base_repo: str | None = Field(
        None, description="of an adapter whose base is a folder: Hub repository with that base"
    )
    private: bool = Field(
        True,
        description="a new repository is private, and an existing public one is refused",
        json_schema_extra=RECIPE_ONLY,
    )
    gated: Annotated[Literal["base", "auto", "manual", "no"], No] = Field(
        "base",
        description=(
            "whether readers must ask for access, and whom: the Hub (auto) or you (manual); base: as for the"
            " base model"
        ),
        json_schema_extra=RECIPE_ONLY,
    )
    dry_run: bool = Field(
        False,
        description="only show what would be sent and where, and send nothing; needs no token",
        json_schema_extra=RECIPE_ONLY,
    )
    license: str | None = Field(
        None, description="licence on the model card; default: what the base model and the data require"
    )
    licenses: dict[str, str] = Field(
        {}, description="licence of a base model or data set, by Hub id or file, where its card names none"
    )

    @field_validator("repo_id")
    @classmethod
    def _is_a_repository(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", value):
            raise ValueError(f"{value!r} is not a Hub repository: write it as owner/name")
        return value

    @field_validator("branch", "round_branch")
    @classmethod
    def _is_a_branch(cls, value: str | None) -> str | None:
        """Raises ValueError for a name that needs escaping in a URL or looks like a commit."""
        if value is not None and not re.fullmatch(
            r"(?![0-9a-f]{40}$)[A-Za-z0-9](\.?[\w-])*", value.replace("{}", "1")
        ):
            raise ValueError(
                f"{value!r} is no name of a branch: use letters, digits, - and _, with single dots between"
                " them"
            )
        return value

    @check
    def _check_champion(self) -> Iterator[str]:
        if self.champion and self.model is None:
            yield "champion is for a model: leave it out for a data set"
        if self.champion and self.branch == "champion":
            yield "the branch champion is moved to the champion's commit: publish to another branch"
        if self.champion and self.folder is not None:
            yield (
                "folder holds only the last model, and a rollback needs those before it: leave folder out, or"
                " champion"
            )

    @check
    def _check_round_branch(self) -> Iterator[str]:
        if self.round_branch is None:
            return
        if self.round_branch.count("{}") != 1 or self.model is None:
            yield (
                "round_branch is for the model of a loop and holds {} once, for the number of the round:"
                " write round-{}"
            )
        if self.repo_id is None or self.folder is not None:
            yield "round_branch publishes several models to branches: set repo_id, and leave folder out"
        if re.fullmatch(re.escape(self.round_branch).replace(r"\{\}", "[0-9]+"), self.branch):
            yield f"branch {self.branch} is also the branch of a round: name another one"

    @check
    def _check_model_or_dataset(self) -> Iterator[str]:
        if (self.model is None) == (self.dataset is None):
            yield (
                "a publication has either a model or a dataset: name one, and the other in a publication of"
                " its own"
            )
        if self.dataset and (self.evaluation or self.base_repo):
            yield "evaluation and base_repo are for models: leave them out of the publication of a dataset"

    @property
    def needed_keys(self) -> Sequence[Key]:
        return (
            [Key(f"the repository {self.repo_id}", "HF_TOKEN")] if self.repo_id and not self.dry_run else []
        )


class AlignmentTax(Gated, Served):
    """Runs lm-eval tasks (IFEval, GSM8K, MMLU, your own) on each model and on the baseline, through a vLLM
    server that the stage starts."""

    stage: Literal["alignment_tax"] = "alignment_tax"
    models: tuple[str, ...] = Field(description="models to measure, in order", min_length=1)
    baseline: str = Field("sft", description="model that the losses are counted from")
    tasks: tuple[str, ...] = Field(
        description="names of lm-eval's tasks or groups, and paths of task YAML files", min_length=1
    )
    limit: Positive | None = Field(
        None, description="at most this many documents of each task, the first ones; default: all"
    )
    num_fewshot: int | None = Field(
        None, ge=0, description="worked examples before each question; default: those of each task"
    )
    chat_template: bool = Field(
        False, description="questions in the models' chat template; default: plain text, as in lm-eval"
    )
    max_gen_toks: Positive = Field(256, description="longest answer in tokens, where a task sets none")
    batch_size: Annotated[Positive, NotInDigest] = Field(8, description="prompts in one request")
    concurrency: Annotated[Positive, NotInDigest] = Field(8, description="requests in flight")
    timeout: Annotated[Rate, NotInDigest] = Field(300.0, description="seconds lm-eval waits for one request")
    trust_task_code: bool = Field(
        False,
        description="allow a local task YAML to run the Python that it names (`!function`)",
        json_schema_extra=RECIPE_ONLY,
    )
    bootstrap_rounds: Positive = Field(1000, description="bootstrap resamples of the documents")

    @check
    def _check(self) -> Iterator[str]:
        if set(self.models) == {self.baseline}:
            yield (
                f"models names only the baseline {self.baseline!r}, which loses nothing against itself: name"
                " another model"
            )
        names = [task_name(task) for task in self.tasks]
        doubled = next((name for name in names if names.count(name) > 1), None)
        if doubled:
            yield f"tasks names {doubled!r} twice: give each task once, and YAML files different names"

    @property
    def turns(self) -> Sequence[Groups]:
        return [{"sampler": self.engine}]
