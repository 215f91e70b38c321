"""Defines rollout engines, which turn token ids into token ids and log-probs, with weights from the
trainer."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from rlhf_core.config.sampled.rewarded_sampling import Rewarded
from rlhf_core.data.documents import received, to_send
from rlhf_core.data.pictures.picture_source import EncodedPicture
from rlhf_core.rollout.weight_transfer import Rendezvous, Route

Pictures = tuple[EncodedPicture, ...]  # of one prompt


@dataclass(frozen=True)
class SampledAnswer:
    """Holds a sampled answer (see `answer_of`). `logprobs[i]` is the sampler's log-prob of `tokens[i]` under
    the distribution it sampled from. `versions`: for answers to a `Request`, pairs (first token, version of
    the weights from there on).

    `finished` is False when the length limit truncated the answer; otherwise its last token is a stop token
    or completes a stop text. `experts` (T - 1, layers, k): the experts of each token of prompt and answer,
    except the last token, which is not routed. Only engines with `routing_replay` return them.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    finished: bool
    experts: np.ndarray | None = None
    versions: Sequence[tuple[int, int]] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (
            to_send(self.tokens),
            to_send(self.logprobs),
            self.finished,
            self.experts,
            self.versions,
        )


def _received(tokens: Any, logprobs: Any, *others: Any) -> SampledAnswer:
    return SampledAnswer(received(tokens), received(logprobs), *others)


def answer_of(
    tokens: Sequence[int], logprobs: Sequence[float], finished: bool, experts: np.ndarray | None = None
) -> SampledAnswer:
    """Returns an answer of int32 tokens and fp32 log-probs, which the processes of a node can share without
    copying."""
    return SampledAnswer(array("i", tokens), array("f", logprobs), finished, experts)


class Sampling(NamedTuple):
    """Describes how answers are sampled: `n` per prompt, with log-probs if `logprobs`. A text in `stop` ends
    an answer and stays in it.

    With `seed_whole` all answers share one stream of random numbers, seeded from all seeds. vLLM then draws
    for the whole batch at once instead of per answer, and an answer depends on the other answers of its
    batch.
    """

    n: int
    temperature: float
    max_new_tokens: int
    stop_token_ids: Sequence[int]
    seed_whole: bool = False
    logprobs: bool = True
    top_p: float = 1.0
    top_k: int = 0
    stop: Sequence[str] = ()

    @classmethod
    def of(cls, config: Rewarded, n: int, stop_token_ids: Sequence[int], logprobs: bool = True) -> Sampling:
        """Returns a stage's sampling settings."""
        sizes = (n, config.temperature, config.generate_max_len, list(stop_token_ids))
        return cls(*sizes, False, logprobs, config.top_p, config.top_k, config.stop)


class Request(NamedTuple):
    """Requests one answer (`sampling.n` is ignored); the engine may work on other requests at the same time.
    `key`: a number chosen by the caller. `pictures`: the images of the prompt, whose placeholders in `tokens`
    are already expanded."""

    key: int
    tokens: list[int]
    seed: int
    sampling: Sampling
    pictures: Pictures = ()


class RolloutEngine(Protocol):
    """Samples answers with one model. Each answer has its own seed, a function of the run, the step and the
    prompt, so a resumed run samples the same answers as an uninterrupted one.
    `rlhf_core.config.engines.ABILITIES` lists the abilities of each kind of engine.

    `first`: the total number of processes of earlier engines. `version`: the trainer's version number of the
    weights. `pictures`: the images of each prompt or document, as in `Request`; empty if none has any.
    """

    first: int
    version: int

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
        pictures: Sequence[Pictures] = (),
    ) -> list[list[SampledAnswer]]:
        """Returns `n` answers to each prompt, in the order of the prompts. Answer j of prompt i is sampled
        with seed `seeds[i] + j`."""

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
        pictures: Sequence[Pictures] = (),
    ) -> Iterator[tuple[int, list[SampledAnswer]]]:
        """Works like `generate`, but yields each prompt's index and its `n` answers as soon as they are
        finished."""

    def advance(
        self, requests: Sequence[Request], seconds: float, gone: Sequence[int] = ()
    ) -> list[tuple[int, SampledAnswer]]:
        """Adds requests, aborts the requests with the keys `gone`, and works on all open requests for about
        `seconds`, or until none is left. Returns the finished answers with the keys of their requests; the
        other requests continue in the next call."""

    def prompt_logprobs(
        self, documents: Sequence[Sequence[int]], pictures: Sequence[Pictures] = ()
    ) -> list[list[float]]:
        """Returns the log-prob of every token of each document given the tokens before it (0 for the first),
        to check a weight sync."""

    def load(self, model: str) -> None:
        """Loads another checkpoint of the same architecture from its safetensors files."""

    def gpu_uuids(self) -> list[str | None]:
        """Returns the UUID of the GPU of each process of this engine; None for a process without a GPU."""

    def open_channel(self, route: Route, rendezvous: Rendezvous) -> None:
        """Connects to the trainer, which must open its end of the channel at the same time."""

    def receive_weights(self, version: int = 0) -> None:
        """Loads all weights, or only the adapters if the engine has them, from the trainer, which must send
        them at the same time. `version`: the trainer's version number."""

    def sampled(self) -> tuple[int, int]:
        """Returns, for an engine with speculative decoding, the number of tokens sampled since the last call
        and the number of steps that this took."""

    def sleep(self, keep_weights: bool) -> None:
        """Frees the GPU until `wake`. Weights that are not kept must be sent again after `wake`, before
        sampling."""

    def wake(self) -> None:
        """Resumes using the GPU."""

    def stay(self) -> None:
        """Blocks, in a process that only helps an engine, until the engine ends."""

    def close(self) -> None:
        """Shuts the engine down."""
