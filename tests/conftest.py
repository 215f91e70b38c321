"""What every test gets: no network, no phoning home, few threads, fixed seeds, and a home of its own for
caches and databases.

The environment is set at import, before any test module imports a library that reads it once.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from rlhf_core.system.gc_pause import uncollected
from tests.support.chat_endpoint import SECRET

SEED = 0
_HOME = tempfile.TemporaryDirectory(prefix="alignflow-tests-", ignore_cleanup_errors=True)

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_HOME=str(Path(_HOME.name) / "huggingface"),
    PREFECT_HOME=str(Path(_HOME.name) / "prefect"),
    HF_HUB_DISABLE_TELEMETRY="1",
    DO_NOT_TRACK="1",
    VLLM_NO_USAGE_STATS="1",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_memory_monitor_refresh_ms="0",
    PREFECT_SERVER_ANALYTICS_ENABLED="false",
    TOKENIZERS_PARALLELISM="false",
)
os.environ.setdefault("OMP_NUM_THREADS", "1")
import_module("rlhf_core.cluster")  # sets what Ray reads at its import; some tests import Ray first

os.environ.setdefault("MPLBACKEND", "Agg")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
for secret in (
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "WANDB_API_KEY",
    "OPENAI_API_KEY",
    "PREFECT_API_KEY",
    "PREFECT_API_URL",
):
    os.environ.pop(secret, None)

# The same examples on every machine and every day; a slow machine is not a failure.
settings.register_profile("alignflow", derandomize=True, deadline=None)
settings.load_profile("alignflow")


TOGETHER = "tests/flows/test_"  # they share a Prefect server; those in tests/flows/servers/ start their own
# What takes long, the longest first.
LONG = (
    TOGETHER,
    "tests/engines/test_lifecycle.py",
    "tests/engines/test_ppo.py",
    "tests/engines/test_zero.py",
    "tests/flows/",
    "tests/engines/",
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    with uncollected():
        return (yield)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--checked",
        default="",
        help="folders whose tests are left out but for slow ones: `make check` runs them",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest first; without what `--checked` leaves out."""
    checked = tuple(config.getoption("--checked").split())
    items[:] = [
        item for item in items if not item.nodeid.startswith(checked) or item.get_closest_marker("slow")
    ]
    items.sort(
        key=lambda item: next((i for i, start in enumerate(LONG) if item.nodeid.startswith(start)), len(LONG))
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`-n` deals out whole files, and those of TOGETHER to one process."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return TOGETHER if nodeid.startswith(TOGETHER) else nodeid.partition("::")[0]

    config.option.loadscopereorder = False  # as collected
    return ByFile(config, log)


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's base model and a twentieth of its data, made by the demo's own script."""
    out = tmp_path_factory.mktemp("demo") / "material"
    script = Path(__file__).parents[1] / "deployments" / "demo" / "make_material.py"
    subprocess.run(
        [sys.executable, str(script), "--out", str(out), "--scale", "0.05"],
        check=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    return out


@pytest.fixture
def judge_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of tests/support/judging.py's judge, whose endpoint is on this machine."""
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Seeds the generators of `random`, and of numpy and torch where a test has already imported them."""
    random.seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)
    torch = sys.modules.get("torch")
    if torch:
        torch.manual_seed(SEED)
    yield
