"""Runs one vLLM engine, a `RolloutEngine`, in this process. Tokens are decoded only to find stop strings;
weights arrive as (name, tensor) pairs under checkpoint names."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlhf_core.config.engines import EngineConfig
from rlhf_core.hub.model_config import wraps_text_by_config
from rlhf_core.rollout.engine_contract import Pictures, Request, SampledAnswer, Sampling
from rlhf_core.rollout.vllm.engine_arguments import engine_arguments, library, token_rows
from rlhf_core.rollout.vllm.environment import config_of, require_known_options, whole_model
from rlhf_core.rollout.vllm.patches.fp32_heads import FP32_HEAD
from rlhf_core.rollout.vllm.pictured_prompts import PicturedPrompts, WaitingRequests
from rlhf_core.rollout.vllm.pipeline import Followers, PipelineStage
from rlhf_core.rollout.vllm.vllm_answers import answer_in
from rlhf_core.rollout.vllm.weight_receiver import adapter_request
from rlhf_core.rollout.weight_transfer import Rendezvous, Route
from rlhf_core.system import progress
from rlhf_core.system.gc_pause import uncollected
from rlhf_core.system.torchvision_check import require_torchvision

ASKED = "asked-"  # prefix of the IDs of requests from `advance`
TIED = "tie_word_embeddings"  # name in configs
COUNTERS = ("vllm:generation_tokens", "vllm:spec_decode_num_accepted_tokens")  # names of public vLLM metrics


class OpenRequest(NamedTuple):
    """The engine's own name for a request, and the request's pairs of a token index and the version of the
    weights used from that token on."""

    own: str
    versions: list[tuple[int, int]]


class VllmEngine:
    """Starts a vLLM engine and loads a model, one per process; `close` ends it.

    `first`: the number of processes of all engines before it. `adapter_rank`: the rank of the adapters; if
    set, the engine receives only adapters. `fp32_head`: whether logits are computed in fp32
    (`models/logprobs/fp32_head.py`). `pictures`: whether prompts may have images; if so, vLLM runs the whole
    of a multimodal model. `stage`: the values of a `PipelineStage`. A process of a later pipeline
    stage starts only the engine's worker processes, and `stay` waits for them to end.
    """

    first = 0

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        *,
        seed: int,
        max_model_len: int,
        dtype: str = "float32",
        trust_remote_code: bool = False,
        can_sleep: bool = False,
        routing_replay: bool = False,
        adapter_rank: int = 0,
        fp32_head: bool = False,
        pictures: bool = False,
        stage: tuple[Any, ...] = (),
    ):
        self._dtype = dtype
        self._pictures = pictures
        self._trust_remote_code = trust_remote_code
        require_known_options(config.options)
        merged = ExitStack()
        source = model
        model = merged.enter_context(whole_model(model, dtype, trust_remote_code, pictures))
        of_model = config_of(model)
        if wraps_text_by_config(of_model):
            require_torchvision()
        self._library = library(config.kv_cache_gib)
        known = token_rows(source, of_model)
        options = engine_arguments(
            self._library,
            model,
            config,
            seed=seed,
            max_model_len=max_model_len,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            can_sleep=can_sleep,
            routing_replay=routing_replay,
            adapter_rank=adapter_rank,
            pictures=pictures,
        )
        place = PipelineStage(*stage)
        options |= place.options() | config.options
        if fp32_head:
            options["hf_overrides"] = FP32_HEAD | (config.options.get("hf_overrides") or {})
        self._store = place.open()
        if place.number:
            self._followers = Followers(self._library, options)
            merged.close()
            return
        self.llm = self._library.LLM(**options)
        self.llm.collective_rpc("prepare_runner", args=(known,))
        if adapter_rank:
            self.llm.collective_rpc("keep_plain_head")
        self._counted = (0, 0)  # the totals at the last call of `sampled`
        about = self.llm.llm_engine.model_config
        # some families say it only for the whole model
        self.tied = bool(getattr(about.hf_text_config, TIED, getattr(about.hf_config, TIED, False)))
        self._adapter_rank = adapter_rank
        self._adapter: Any = None  # attached to requests, once adapters are loaded
        self.version = 0
        self._loads = 0  # `version` is the trainer's count, `_loads` counts how often weights were loaded
        self._begun = dict[str, OpenRequest]()  # unfinished requests from `advance`
        # answers to requests from `advance` that have finished since it last returned
        self._finished = list[tuple[int, SampledAnswer]]()
        self._waiting = WaitingRequests()  # from `advance`
        self._pictured = PicturedPrompts(self.llm, model, trust_remote_code) if pictures else None
        merged.close()  # here, since Ray ends its processes without letting them clean up

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
        pictures: Sequence[Pictures] = (),
    ) -> list[list[SampledAnswer]]:
        """Returns `n` answers to each prompt, in the order of the prompts. Answer j of prompt i is sampled
        with seed `seeds[i] + j`."""
        with uncollected():
            answers = dict(self.stream(prompts, seeds, sampling, pictures))
        return [answers[i] for i in range(len(prompts))]

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
        pictures: Sequence[Pictures] = (),
    ) -> Iterator[tuple[int, list[SampledAnswer]]]:
        """Works like `generate`, but yields each prompt's index and `n` answers as soon as they finish."""
        n = sampling.n
        found = dict[int, dict[int, SampledAnswer]]()
        left = n * len(prompts)
        adding = self._adding(prompts, self._params(seeds, sampling), n, pictures)
        most = self._most_open if any(pictures) else left
        unasked = left
        while left:
            while unasked and left - unasked < most:
                next(adding)
                unasked = unasked - 1
            for output in self._step():
                prompt, which = divmod(int(output.request_id), n)
                group = found.setdefault(prompt, {})
                group[which] = answer_in(output)
                left = left - 1
                if len(group) == n:
                    yield prompt, [answer for _, answer in sorted(found.pop(prompt).items())]

    def _adding(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[Any],
        n: int,
        pictures: Sequence[Pictures],
    ) -> Iterator[None]:
        """Adds the next of the `n` requests of each prompt, one per step of the iterator."""
        for i, prompt in enumerate(self._built(prompts, pictures)):
            for j in range(i * n, i * n + n):
                self._add(str(j), prompt, params[j])
                yield

    def _built(
        self, prompts: Sequence[Sequence[int]], pictures: Sequence[Pictures]
    ) -> Iterator[dict[str, Any]]:
        """Yields vLLM's form of each prompt. Raises ValueError for images that this engine cannot read."""
        if not any(pictures):
            yield from ({"prompt_token_ids": list(tokens)} for tokens in prompts)
        elif self._pictured is None:
            raise ValueError("a prompt has images, and this engine was started without: restart the stage")
        else:
            yield from self._pictured.built(prompts, pictures)

    @property
    def _most_open(self) -> int:
        """The number of requests that run at once. More would only hold the tensors of their images."""
        return int(self.llm.llm_engine.vllm_config.scheduler_config.max_num_seqs)

    def _add(self, key: str, prompt: dict[str, Any], params: Any) -> str:
        """Adds a request and returns the engine's own name for it."""
        # Cache entries from other weights have a different salt, because the cache cannot be cleared while
        # requests are using it.
        salted = prompt | {"cache_salt": str(self._loads)}
        return self.llm.llm_engine.add_request(key, salted, params, lora_request=self._adapter) or key

    def _step(self) -> list[Any]:
        """Runs one engine step. Returns finished outputs, except the answers to requests from `advance`,
        which it stores."""
        outputs = [output for output in self.llm.llm_engine.step() if output.finished]
        progress.made()
        others = []
        for output in outputs:
            begun = self._begun.pop(output.request_id, None)
            if begun is None:
                others.append(output)
            else:
                self._finished.append(
                    (
                        int(output.request_id.removeprefix(ASKED)),
                        replace(answer_in(output), versions=begun.versions),
                    )
                )
        return others

    def advance(
        self, requests: Sequence[Request], seconds: float, gone: Sequence[int] = ()
    ) -> list[tuple[int, SampledAnswer]]:
        """Adds requests, aborts the requests with the keys `gone`, and works on all open requests for
        `seconds` or until none is left. Returns the finished answers with the keys of their requests;
        unfinished requests continue in the next call."""
        engine = self.llm.llm_engine
        until = time.monotonic() + seconds
        self._abort(gone)
        prompts = self._built(
            [request.tokens for request in requests], [request.pictures for request in requests]
        )
        self._waiting.add(requests, prompts)
        self._admit()
        with uncollected():
            while engine.has_unfinished_requests() and time.monotonic() < until:
                self._step()
                self._admit()
        finished = self._finished
        self._finished = []
        return finished

    def _admit(self) -> None:
        """Adds waiting requests to the engine: all of them or, where prompts may have images, no more than
        run at once."""
        if self._pictured is not None and len(self._begun) >= self._most_open:
            return
        for request, prompt in self._waiting.taken():
            key = f"{ASKED}{request.key}"
            own = self._add(key, prompt, self._parameters(request.seed, request.sampling))
            self._begun[key] = OpenRequest(own, [(0, self.version)])
            if self._pictured is not None and len(self._begun) >= self._most_open:
                return

    def _abort(self, keys: Sequence[int]) -> None:
        """Aborts unfinished requests from `advance` and frees their memory."""
        self._waiting.drop(keys)
        unfinished = [f"{ASKED}{key}" for key in keys if f"{ASKED}{key}" in self._begun]
        if unfinished:
            self.llm.llm_engine.abort_request(unfinished)
        for name in unfinished:
            del self._begun[name]

    def _params(self, seeds: Sequence[int], sampling: Sampling) -> list[Any]:
        """Returns vLLM's parameters for each answer; with `seed_whole`, also seeds the engine."""
        if sampling.seed_whole:
            self.llm.collective_rpc("seed", args=(random.Random(repr(list(seeds))).getrandbits(48),))
        return [self._parameters(seed + j, sampling) for seed in seeds for j in range(sampling.n)]

    def _parameters(self, seed: int, sampling: Sampling) -> Any:
        return self._library.SamplingParams(
            temperature=sampling.temperature,
            max_tokens=sampling.max_new_tokens,
            seed=seed if sampling.temperature > 0 and not sampling.seed_whole else None,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=list(sampling.stop_token_ids),
            stop=list(sampling.stop),
            logprobs=0 if sampling.logprobs else None,
            flat_logprobs=True,
            detokenize=bool(sampling.stop),
            skip_special_tokens=not sampling.stop,  # a special token may be a stop string
            output_kind=self._library.sampling_params.RequestOutputKind.FINAL_ONLY,
        )

    def prompt_logprobs(
        self, documents: Sequence[Sequence[int]], pictures: Sequence[Pictures] = ()
    ) -> list[list[float]]:
        """Returns the log-prob of every token of each document given the tokens before it (0 for the first),
        in order to check a weight sync."""
        params = self._library.SamplingParams(
            temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False
        )
        for i, document in enumerate(self._built(documents, pictures)):
            self._add(str(i), document, params)
        found = dict[int, list[float]]()
        while len(found) < len(documents):
            for output in self._step():
                of_token = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
                found[int(output.request_id)] = [0.0] + [
                    position[token].logprob for position, token in of_token
                ]
        return [found[i] for i in range(len(documents))]

    def update(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replaces all weights."""
        self.llm.collective_rpc("take_weights", args=(list(weights), self.tied))
        self._loaded(self.version + 1)

    def _loaded(self, version: int) -> None:
        """Records that new weights are loaded. Running requests continue with the new weights and keep their
        cached keys and values (Piché et al. 2025, "PipelineRL")."""
        self.version = version
        self._loads = self._loads + 1
        known = self.llm.llm_engine.engine_core.engine_core.scheduler.requests
        for begun in self._begun.values():
            begun.versions.append((known[begun.own].num_output_tokens, version))
        if self._pictures:  # the runner has dropped the features of images, which the scheduler must know
            self.llm.llm_engine.reset_encoder_cache()
        if not self._begun:
            self.llm.reset_prefix_cache()

    def load(self, model: str) -> None:
        """Loads another checkpoint of the same architecture from its safetensors files."""
        with whole_model(model, self._dtype, self._trust_remote_code, self._pictures) as whole:
            if not any(Path(whole).glob("*.safetensors")):
                raise ValueError(
                    f"{whole} holds no safetensors file to load into the running engine: name a local"
                    " checkpoint folder"
                )
            with progress.files(Path(whole)):
                self.llm.collective_rpc("load_checkpoint", args=(whole, self.tied))
        self._loaded(self.version + 1)

    def sampled(self) -> tuple[int, int]:
        """Returns how many tokens an engine that drafts tokens has sampled since the last call, and in how
        many steps. In each step an answer gains one token plus the accepted drafts."""
        counters = {metric.name: metric.value for metric in self.llm.get_metrics() if metric.name in COUNTERS}
        tokens, accepted = (counters.get(name, 0) for name in COUNTERS)
        told = self._counted
        self._counted = (tokens, tokens - accepted)
        return self._counted[0] - told[0], self._counted[1] - told[1]

    def gpu_uuids(self) -> list[str | None]:
        """Returns the UUID of the GPU of each process of this engine (None: no GPU)."""
        return list(self.llm.collective_rpc("gpu_uuid"))

    def open_channel(self, route: Route, rendezvous: Rendezvous) -> None:
        """Connects to the trainer, which must open its end of the channel at the same time."""
        self.llm.collective_rpc("open_channel", args=(route, rendezvous, self.first))

    def receive_weights(self, version: int = 0) -> None:
        """Loads all weights from the trainer, or only the adapters if the engine has them. The trainer must
        send them at the same time. `version`: the trainer's version number of the weights."""
        if self._adapter_rank:
            self.llm.collective_rpc("receive_adapters", args=(self._adapter_rank,))
            self._adapter = adapter_request()
        else:
            self.llm.collective_rpc("receive_weights", args=(self.tied,))
        self._loaded(version)

    def sleep(self, keep_weights: bool) -> None:
        """Frees the GPU until `wake` is called: drops the KV cache, and drops the weights or moves them to
        (pinned) host memory.

        Weights that were not kept must be sent again after `wake`, before sampling. An image encoder is not
        sent, so a model with one is always kept.
        """
        self.llm.sleep(level=1 if keep_weights or self._pictures else 2)

    def wake(self) -> None:
        self.llm.wake_up()

    def stay(self) -> None:
        """Blocks until a worker process ends, in a process of a later pipeline stage."""
        self._followers.wait()

    def close(self) -> None:
        """Shuts the engine down."""
        engine: Any = self.llm.llm_engine
        engine.engine_core.shutdown()
        del self.llm
