"""Computes a stage's digest from everything that decides its result. Torch-free, offline.

The digest covers the stage's configuration (without fields marked `NotInDigest`, and without fields marked
`InDigestIfSet` that have their defaults), the digests of its parents and of its local data and model folders,
the seed, and the version of its kind. A Hub id is included by name, so changes to the repository go
unnoticed; `owner/name@REVISION` is included by commit (see `revisions.py`). Image files that a data file
names are included by content, regardless of their location.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlhf_core.config import KINDS, PPO, SFT, AlignmentTax, EngineConfig, Recipe, Source, StageConfig
from rlhf_core.config.engines import SPEED_ONLY
from rlhf_core.config.judging.lm_eval_tasks import is_path, read_task, task_name
from rlhf_core.config.rewarding.environment_config import Environment
from rlhf_core.config.rewarding.verifiers import ReasoningGymReward, VerifierReward
from rlhf_core.config.rewards import FunctionReward
from rlhf_core.config.training.zero_fields import ZeroFields, deciding_options
from rlhf_core.data.image_fields import image_files, image_names
from rlhf_core.data.rows.reasoning_gym_rows import installed_release
from rlhf_core.data.rows.verifiers_rows import NoSuchInstallation, verifiers_release
from rlhf_core.hub.ids import is_remote
from rlhf_core.recipe.named_inputs import renamed
from rlhf_core.records import InDigestIfSet, NotInDigest
from rlhf_core.system.files import ABSENT, Digests, digest

IMAGES_OF = "images of "  # key of `Reading.contents` that precedes a data file's path


class Reading(Digests):
    """Computes digests like `Digests`, and records them in `contents`. A file or folder that exists is
    recorded by its absolute path. The images that a data file names are recorded by `IMAGES_OF` followed by
    the data file's path."""

    def __init__(self, digests: Digests):
        self._digests = digests
        self.contents: dict[str, str] = {}

    def of(self, path: Path) -> str:
        content = self._digests.of(path)
        if content != ABSENT:
            self.contents[os.path.abspath(path)] = content
        return content

    def names_in(self, path: Path, read: Callable[[Path], list[str]]) -> list[str]:
        return self._digests.names_in(path, read)

    def together(self, title: str, files: Mapping[str, Path]) -> str:
        content = self._digests.together(title, files)
        self.contents[title] = content
        return content


def stage_digest(
    recipe: Recipe,
    config: StageConfig,
    stages: Mapping[str, str],
    models: Mapping[str, str],
    digests: Digests,
) -> str:
    """Returns the digest of a stage as 16 hex digits.

    `stages` maps each stage named in its config to that stage's digest; `models` maps all other names to a
    folder or Hub id.
    """
    contents = {named: _content(place, digests) for named, place in models.items()}
    local = {
        named: content
        for named, content in contents.items()
        if named != "base" and not content.startswith("hub:")
    }
    return digest(
        {
            "stage": config.stage,
            "version": KINDS[config.stage].version,
            "config": renamed(deciding(config, digests), local),
            "stages": stages,
            "models": renamed(contents, local),
            "seed": recipe.seed,
            "trust_remote_code": recipe.trust_remote_code,
        }
    )


def deciding(value: Any, digests: Digests) -> Any:
    """Returns a config without the fields marked `NotInDigest`, and with the digests of local files in
    addition to their paths or instead of them."""
    if isinstance(value, BaseModel):
        fields = [name for name, field in type(value).model_fields.items() if _decides(value, name, field)]
        content = {name: deciding(getattr(value, name), digests) for name in fields}
        if isinstance(value, SFT):  # SFT had this field before other stages did
            content.setdefault("float8", False)
        if isinstance(value, Source) and value.reasoning_gym is not None:
            content["path"] = installed_release()
        elif isinstance(value, Source) and value.verifiers is not None:
            content["path"] = _package(value.verifiers.environment, value.verifiers.python)
        elif isinstance(value, Source):
            content["path"] = _content(value.path, digests)
            images = images_content(value.path, digests)
            if images != ABSENT:
                content["images"] = images
        if isinstance(value, PPO) and value.train_only is not None:
            content["train_only"] = digests.of(Path(value.train_only))
        if isinstance(value, FunctionReward):
            content |= {"function": value.function_name, "code": digests.of(value.file)}
        if isinstance(value, VerifierReward):
            content["version"] = value.version
        if isinstance(value, ReasoningGymReward):
            content["release"] = installed_release()
        if isinstance(value, Environment) and value.own:
            content |= {"path": value.class_name, "code": digests.of(value.file)}
        if isinstance(value, Environment):
            content |= _agent_content(value, digests)
            if value.verifiers is not None:
                content["release"] = _package(value.verifiers, value.python)
            unset = [field for field in ("agent", "checker", "mcp") if not getattr(value, field)]
            content = {name: item for name, item in content.items() if name not in unset}
        if isinstance(value, ZeroFields) and not deciding_options(value.deepspeed):
            del content["deepspeed"]
        elif isinstance(value, ZeroFields):
            content["deepspeed"] = deciding_options(value.deepspeed)
        if isinstance(value, EngineConfig):
            content["options"] = {
                name: option for name, option in value.options.items() if name not in SPEED_ONLY
            }
        if isinstance(value, AlignmentTax):
            content["tasks"] = [
                _task_content(task, digests) if is_path(task) else task for task in value.tasks
            ]
        return content
    if isinstance(value, dict):
        return {key: deciding(item, digests) for key, item in value.items()}
    return [deciding(item, digests) for item in value] if isinstance(value, tuple | list) else value


def _decides(config: BaseModel, name: str, field: FieldInfo) -> bool:
    if InDigestIfSet in field.metadata:
        return getattr(config, name) != field.get_default(call_default_factory=True)
    return NotInDigest not in field.metadata


def _agent_content(environment: Environment, digests: Digests) -> dict[str, Any]:
    """Returns an agent's functions by name, with the digests of their files."""
    found = environment.functions
    return {field: [name, digests.of(file)] for field, (file, name) in found.items()}


def _package(environment: str, python: str | None) -> dict[str, str]:
    """Returns the digested content of a verifiers environment: its code and the release. Returns {} if it is
    not installed, which the check before the run reports. Raises ValueError if the release cannot be
    determined."""
    try:
        return dict(found_release(environment, python))
    except NoSuchInstallation:
        return {}


@cache
def found_release(environment: str, python: str | None) -> Mapping[str, str]:
    """Returns the release that this process found first, so that all of its digests use the same one."""
    return verifiers_release(environment, python)


def _content(place: str, digests: Digests) -> str:
    return f"hub:{place}" if is_remote(place) else digests.of(Path(place))


def images_content(path: str, digests: Digests) -> str:
    """Returns the digest of the image files that a local data file names, or `absent` if it names none."""
    if is_remote(path) or not os.path.isfile(path):
        return ABSENT
    names = digests.names_in(Path(path), image_names)
    files = image_files(path, names)
    return digests.together(f"{IMAGES_OF}{os.path.abspath(path)}", files) if files else ABSENT


def content_now(place: str, digests: Digests) -> str:
    """Returns the current digest of the content to which a key of `Reading.contents` refers."""
    if place.startswith(IMAGES_OF):
        return images_content(place.removeprefix(IMAGES_OF), digests)
    return digests.of(Path(place))


def _task_content(task: str, digests: Digests) -> list[str]:
    try:
        return [task_name(task), *(digests.of(file) for file in read_task(task).files)]
    except ValueError:
        # the check before the run and the stage itself report the fault
        return [task_name(task), ABSENT]
