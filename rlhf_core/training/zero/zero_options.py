"""Builds DeepSpeed's configuration for an engine from alignflow's settings; the recipe's `deepspeed`
overrides them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, KeysView, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import ValidationError

from rlhf_core.config import Optimised, Ranks
from rlhf_core.config.training.optimised import HALF
from rlhf_core.config.training.zero_fields import ZERO
from rlhf_core.forecast.fitting_passes import sums_in_fp32
from rlhf_core.forecast.memory import copies
from rlhf_core.training.engine import AdamW
from rlhf_core.training.zero.loss_scale import FP16


class ZeroOptions(NamedTuple):
    """The settings of an engine for DeepSpeed, apart from sharding.

    `adam_offload`: the optimiser keeps its state in pinned host memory and steps on the CPU (ZeRO-Offload,
    Ren et al. 2021). `param_offload`: ZeRO-3 also keeps the shards of the weights in pinned host memory until
    they are fetched (ZeRO-Infinity, Rajbhandari et al. 2021). `hpz_ranks`: number of neighbouring ranks that
    share a second copy of the weights, sharded over them (hpZ of ZeRO++, Wang et al. 2023); 1: no second
    copy. `more`: the recipe's `deepspeed`. `sums_in_fp32`: bf16 gradients of the passes in a step are summed
    in fp32.
    """

    adam_offload: bool = False
    param_offload: bool = False
    hpz_ranks: int = 1
    more: Mapping[str, Any] = MappingProxyType({})
    sums_in_fp32: bool = True


def options_of(config: Optimised, role: str, ranks: Ranks) -> ZeroOptions:
    """Returns the options for one role of a stage. `role`: `actor`, `critic`, or any other name for the model
    of a training stage."""
    return ZeroOptions(
        adam_offload=role in config.offloaded("adam"),
        param_offload=role in config.offloaded("param"),
        hpz_ranks=copies(config, ranks),
        more=config.deepspeed,
        sums_in_fp32=sums_in_fp32(config, ranks.world_size),
    )


def engine_config(
    adamw: AdamW,
    zero_stage: int,
    dtype: str,
    micro_batch_size: int,
    options: ZeroOptions,
    on_gpu: bool,
    fetching: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the configuration for `deepspeed.initialize`. `fetching`: ZeRO-3's prefetch settings."""
    host = {"device": "cpu", "pin_memory": on_gpu}
    zero: dict[str, Any] = {
        "stage": zero_stage,
        "overlap_comm": on_gpu,
        "contiguous_gradients": True,
        **fetching,
    }
    if options.adam_offload:
        zero["offload_optimizer"] = host
    if options.param_offload and zero_stage == 3:
        zero["offload_param"] = host
    if options.hpz_ranks > 1 and zero_stage == 3:
        zero["zero_hpz_partition_size"] = options.hpz_ranks
    theirs = options.more.get(ZERO, {})
    # Several options have two names, with and without stage3_; without this, ours would override the
    # recipe's.
    ours = {name: value for name, value in zero.items() if name.removeprefix("stage3_") not in theirs}
    sums = {"grad_accum_dtype": "fp32"} if options.sums_in_fp32 and dtype in HALF else {}
    return {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": 1,  # the loop marks the boundary itself
        "gradient_clipping": adamw.max_norm,
        "bf16": {"enabled": dtype == "bfloat16"},
        **({"fp16": FP16} if dtype == "float16" else {}),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW runs on the CPU too and needs no compiler
        "steps_per_print": 10**9,
        **options.more,
        "data_types": sums | options.more.get("data_types", {}),
        ZERO: ours | theirs,
    }


def unknown_options(deepspeed: Any, options: Mapping[str, Any]) -> list[str]:
    """Describes the options in `deepspeed` that the installed DeepSpeed does not know or rejects, one
    sentence each."""
    asked = _Asked({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, **options})
    version = deepspeed.__version__
    try:
        deepspeed.runtime.config.DeepSpeedConfig(asked)
    except ValidationError as error:
        inside = f"{ZERO}." if error.title == "DeepSpeedZeroConfig" else ""
        found = [(f"{inside}{'.'.join(map(str, each['loc']))}", each) for each in error.errors()]
        known = [f"{inside}{name}" for name in _fields(deepspeed)]
        return [
            (
                _strange(version, where, known)
                if each["type"] == "extra_forbidden"
                else f"DeepSpeed {version} refuses {where}: {each['msg']}"
            )
            for where, each in found
        ]
    except Exception as error:  # a wrong value can make it fail in many ways
        return [f"DeepSpeed {version} refuses it: {' '.join(str(error).split()) or type(error).__name__}"]
    return [_strange(version, name, sorted(asked.asked)) for name in asked.unread()]


def require_known(deepspeed: Any, options: Mapping[str, Any]) -> None:
    """Raises ValueError with the messages of `unknown_options`."""
    if options and (told := unknown_options(deepspeed, options)):
        raise ValueError("\n".join(f"deepspeed: {line}" for line in told))


def _strange(version: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"DeepSpeed {version} has no option {name!r}{f'; did you mean {near[0]}?' if near else ''}"


def _fields(deepspeed: Any) -> list[str]:
    fields = deepspeed.runtime.zero.config.DeepSpeedZeroConfig.model_fields
    return [str(field.alias or name) for name, field in fields.items()]


class _Asked(dict[str, Any]):
    """A configuration that records which keys DeepSpeed looks up, including keys in nested blocks, because
    DeepSpeed silently ignores unknown keys."""

    def __init__(self, content: Mapping[str, Any]):
        super().__init__(
            {name: _Asked(value) if isinstance(value, dict) else value for name, value in content.items()}
        )
        self.asked: set[str] = set()

    def __copy__(self) -> _Asked:  # DeepSpeed reads a copy
        return self

    def __contains__(self, name: object) -> bool:
        self.asked.add(str(name))
        return super().__contains__(name)

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default

    def keys(self) -> Any:  # `name in options.keys()` looks up a key too
        return KeysView(self)

    def __iter__(self) -> Iterator[str]:  # otherwise Python unpacks `**options` without calling `keys`
        return super().__iter__()

    def unread(self, path: str = "") -> Iterator[str]:
        """Yields the keys that were never looked up."""
        for name, value in super().items():
            if name not in self.asked:
                yield f"{path}{name}"
            elif isinstance(value, _Asked):
                yield from value.unread(f"{path}{name}.")
