"""Says when two judges of a recipe are the same, so that a calibration of the one holds for the other. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath

from rlhf_core.config import Judge, RewardJudge, VllmJudge
from rlhf_core.records import NotInDigest
from rlhf_core.system.files import digest

STOPPING = ("interval_width", "sequential_questions")  # when a chat judge stops asking changes no verdict


def judge_identity(judge: Judge, inputs: Mapping[str, str]) -> str:
    """Returns a digest of all that decides a judge's verdicts: its fields, and the place of its checkpoint, which in a recipe is a folder
    named by the digest of its stage, a local folder, or a Hub id at a commit. `inputs` maps names to these places, as in a request."""
    decides = [name for name, field in type(judge).model_fields.items() if NotInDigest not in field.metadata and name not in STOPPING]
    values = judge.model_dump(mode="json", include=set(decides))
    match judge:
        case RewardJudge():
            values["reward"] = _place(judge.reward, inputs)
        case VllmJudge():
            values["model"] = _place(judge.model, inputs)
            values["vllm"] = judge.vllm.engine
    return digest(values)


def _place(name: str, inputs: Mapping[str, str]) -> str:
    """Returns the place of a model, of a stage's output without the artifacts folder, which may be another one on another machine."""
    place = inputs.get(name, name)
    parts = PurePath(place).parts
    return "/".join(parts[parts.index("stages") + 1 :]) if "stages" in parts else place
