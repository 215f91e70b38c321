"""The store: run directories there and back, on a real S3 server, a folder and memory; cut, damaged,
unreachable."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlhf_core.stages.sft
from rlhf_core.config import SFT
from rlhf_core.recipe.load_recipe import load_recipe
from rlhf_core.recipe.plan import plan
from rlhf_core.runs.remote.remote_files import RemoteFiles, StoreFault
from rlhf_core.runs.remote.store import Store
from rlhf_core.runs.run_dir import RESULT, Outcome, RunDir, run_in_directory
from rlhf_core.system.files import file_digest
from rlhf_core.training.engine import TorchEngine
from tasks.stored_stages import fetch_stage, states_uploaded, upload_stage
from tests.support.s3_server import s3
from tests.support.stage_request import stage_request
from tests.support.states import wait_until_complete

FAST = {"attempts": 3, "pause": 0.0}
REQUEST = stage_request(SFT.model_validate({"data": {"sources": "d.jsonl"}}), "first/base", digest="00ff")


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3() as url:
        yield url


@pytest.fixture(params=["s3", "file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "s3":
        return Store(f"{request.getfixturevalue('bucket')}/{tmp_path.name}", **FAST)
    return Store(
        f"file://{tmp_path}/store" if request.param == "file" else f"memory://{tmp_path.name}", **FAST
    )


def done(folder: Path, content: str = "weights") -> RunDir:
    """A finished stage of two checkpoint files, with what else lies in a run directory."""
    run = RunDir(folder / "stages" / "sft-00ff")
    run.prepare(REQUEST)
    (run / "checkpoint" / ".hidden").mkdir(parents=True)
    (run / "checkpoint" / "model.safetensors").write_text(content)
    (run / "checkpoint" / ".hidden" / "note.yaml").write_text("kept, it is in the manifest")
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    (run / ".lock").touch()
    (run / "state").mkdir()
    (run / "state" / "left.bin").write_text("not for the store")
    run.finish(REQUEST, Outcome({"loss": 0.5}, {"checkpoint": "checkpoint"}), 1.0)
    return run


def elsewhere(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "other" / "stages" / "sft-00ff")


def test_a_stage_goes_there_and_back(store: Store, tmp_path: Path) -> None:
    here = done(tmp_path)
    there = elsewhere(tmp_path)
    assert not store.has("sft-00ff") and not store.fetch(there, REQUEST)
    assert store.put(here) and store.has("sft-00ff")
    assert not store.put(here), "what is there already is not copied again"
    # nor is what another machine made of the same stage
    assert not store.put(done(tmp_path / "another machine", "other weights"))
    assert store.fetch(there, REQUEST.model_copy(update={"inputs": {"base": "second/base"}}))
    assert there.result() == here.result()
    assert all(file_digest(there / name) == info.sha256 for name, info in there.result().files.items())
    assert (there / "metrics.jsonl").read_text() == '{"step": 1}\n'
    # lineage is followed on the machine where it is asked for
    assert there.request().inputs == {"base": "second/base"}
    assert sorted(path.name for path in there.path.iterdir()) == [
        "checkpoint",
        "config.json",
        "metrics.jsonl",
        "result.json",
    ]


def test_what_lies_outside_of_the_run_directory_is_made_anew_elsewhere(store: Store, tmp_path: Path) -> None:
    """A publication whose `folder` is somewhere else: a copy would never be whole."""
    run = RunDir(tmp_path / "here" / "stages" / "publication-00ff")
    run.prepare(REQUEST.model_copy(update={"name": "publication"}))
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "model.safetensors").write_text("weights")
    run.finish(run.request(), Outcome({}, {"published": "../../../published"}), 1.0)
    assert run.result() is not None
    assert not store.put(run) and not store.has(run.path.name)


def test_a_cut_upload_does_not_count(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = done(tmp_path)
    send = RemoteFiles.send
    sent: list[str] = []
    cut_at = 0

    def cut(self: RemoteFiles, file: Path, place: str) -> None:
        sent.append(place)
        if len(sent) == cut_at:
            raise KeyboardInterrupt
        send(self, file, place)

    monkeypatch.setattr(RemoteFiles, "send", cut)
    for number in range(1, 6):  # four files, and the result
        sent.clear()
        cut_at = number
        with pytest.raises(KeyboardInterrupt):
            store.put(here)
        assert not store.has("sft-00ff") and not store.fetch(elsewhere(tmp_path), REQUEST), sent
    cut_at = 0
    assert store.put(here) and store.fetch(elsewhere(tmp_path), REQUEST)

    # In the place of the same stage with another outcome: while the copies are mixed, none counts.
    again = done(tmp_path / "again", "other weights")
    cut_at = 3
    sent.clear()
    with pytest.raises(KeyboardInterrupt):
        store.replace(again)
    assert not store.has("sft-00ff")


@pytest.mark.parametrize(
    "place",
    "checkpoint/model.safetensors checkpoint/.hidden/note.yaml metrics.jsonl config.json files.json".split(),
)
def test_a_corrupt_object_is_noticed(store: Store, tmp_path: Path, place: str) -> None:
    here = done(tmp_path)
    there = elsewhere(tmp_path)
    store.put(here)
    content = store.files.read(f"stages/sft-00ff/{place}")
    assert content
    store.files.write(content[:-1] + b"?", f"stages/sft-00ff/{place}")
    with pytest.raises(
        StoreFault,
        match=(
            r"the copy stages/sft-00ff is damaged \(.*\); remove stages/sft-00ff from the store and run again"
        ),
    ):
        store.fetch(there, REQUEST)
    assert there.result() is None and not (there / "checkpoint").exists()
    store.files.remove("stages/sft-00ff")
    assert not store.fetch(there, REQUEST), "then the stage is done anew"


def test_a_cut_result_is_no_result(store: Store, tmp_path: Path) -> None:
    store.put(done(tmp_path))
    store.files.write(
        (store.files.read(f"stages/sft-00ff/{RESULT}") or b"")[:-20], f"stages/sft-00ff/{RESULT}"
    )
    assert not store.has("sft-00ff")


def test_a_cut_fetch_leaves_nothing_that_counts(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(done(tmp_path))
    there = elsewhere(tmp_path)
    get = RemoteFiles.get

    def cut(self: RemoteFiles, place: str, file: Path) -> None:
        if place.endswith("metrics.jsonl"):
            raise KeyboardInterrupt
        get(self, place, file)

    monkeypatch.setattr(RemoteFiles, "get", cut)
    with pytest.raises(KeyboardInterrupt):
        store.fetch(there, REQUEST)
    assert there.result() is None
    monkeypatch.setattr(RemoteFiles, "get", get)
    assert store.fetch(there, REQUEST) and there.result() is not None


def test_files_outside_of_the_copy_are_refused(store: Store, tmp_path: Path) -> None:
    store.put(done(tmp_path))
    listing = json.loads(store.files.read("stages/sft-00ff/files.json") or b"") | {
        "../../evil": {"size": 1, "sha256": ""}
    }
    store.files.write(json.dumps(listing).encode(), "stages/sft-00ff/files.json")
    with pytest.raises(StoreFault, match="names files outside of it"):
        store.fetch(elsewhere(tmp_path), REQUEST)


def state(run: RunDir, step: int, whole: bool = True) -> None:
    folder = run / "state" / f"step-{step}"
    folder.mkdir(parents=True)
    (folder / "state.pt").write_text(f"state {step}")
    if whole:
        (folder / "loop.json").write_text("{}")


def test_the_newest_whole_resume_state_is_kept(store: Store, tmp_path: Path) -> None:
    here = RunDir(tmp_path / "stages" / "sft-00ff")
    there = elsewhere(tmp_path)
    here.prepare(REQUEST)
    (here / "metrics.jsonl").write_text('{"step": 9}\n')
    for step in (9, 10):
        state(here, step)
        store.put_state(here, f"step-{step}")
    assert store.files.names("states/sft-00ff") == ["step-10"]
    store.files.write(b"cut off", "states/sft-00ff/step-11/state/step-11/state.pt")
    assert store.fetch_state(there) == "step-10"
    assert (there / "state/step-10/state.pt").read_text() == "state 10" and (there / "metrics.jsonl").exists()
    store.drop_states(here)
    assert store.fetch_state(elsewhere(tmp_path / "third")) is None


@pytest.mark.parametrize("damage", ["a changed file", "a missing file", "a cut loop.json"])
def test_a_damaged_state_is_left_out(
    store: Store, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    here = RunDir(tmp_path / "stages" / "sft-00ff")
    there = elsewhere(tmp_path)
    place = "states/sft-00ff/step-{0}/state/step-{0}/{1}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "drop_states", lambda *_, **__: None)
        for step in (9, 10):
            state(here, step)
            store.put_state(here, f"step-{step}")
    for step, name in ((10, "step-9"), (9, None)):
        file = place.format(step, "loop.json" if damage == "a cut loop.json" else "state.pt")
        store.files.remove(file)
        if damage != "a missing file":
            store.files.write(b"{", file)
        assert store.fetch_state(there) == name
        assert f"the copy states/sft-00ff/step-{step} is damaged (" in capsys.readouterr().out
    assert not (there / ".fetching").exists()


def test_a_wiped_machine_goes_on_from_the_stored_state(
    bucket: str, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real training, killed and moved to another folder, ends bit for bit where an undisturbed one ends."""
    config = SFT.model_validate(
        {
            "data": {"sources": str(material / "sft.jsonl"), "max_samples": 48},
            "max_len": 96,
            "train_batch_size": 8,
            "micro_train_batch_size": 4,
            "learning_rate": 1e-3,
            "save_steps": 2,
        }
    )
    request = stage_request(config, material / "base", seed=3)
    store = Store(f"{bucket}/moved", checkpoints=True, **FAST)
    real_step = TorchEngine.step
    steps = []
    warnings = []

    def warn(text: str, *values: object) -> None:
        warnings.append(text % values)

    def dies(self: TorchEngine, rate: float) -> float:
        steps.append(rate)
        if len(steps) == 4:
            wait_until_complete()
            raise OSError("the machine is gone")
        return real_step(self, rate)

    whole, first, second = (RunDir(tmp_path / name / "sft-0") for name in ("whole", "first", "second"))
    for run in (whole, first):
        run.prepare(request)
    run_in_directory(whole.path, rlhf_core.stages.sft.run)
    monkeypatch.setattr(TorchEngine, "step", dies)
    with pytest.raises(OSError, match="gone"), states_uploaded(store, first, warn):
        run_in_directory(first.path, rlhf_core.stages.sft.run)
    said: list[str] = []
    fetch_stage(store, second, request, lambda text, *values: said.append(text % values))
    assert said == [f"sft resumes from step-2 of {store.files.url}"]
    second.prepare(request)
    with states_uploaded(store, second, warn, every=0.05):
        run_in_directory(second.path, rlhf_core.stages.sft.run)
    assert len(steps) == 4 + 4 and not warnings
    assert second.result().files == whole.result().files and second.result().metrics == whole.result().metrics
    upload_stage(store, second, lambda *_: None)
    assert store.has("sft-0") and store.files.names("states/sft-0") == []


def recipe(store: str) -> str:
    return f"{{name: t, base_model: org/m, {store} stages: {{sft: {{data: {{sources: d.jsonl}}}}}}}}"


def test_a_store_in_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(recipe(""))
    plain = plan(load_recipe("r.yaml"))
    stored = plan(load_recipe("r.yaml", ["store=s3://bucket/x", "store_checkpoints=true"]))
    assert stored["sft"].digest == plain["sft"].digest, "where copies lie decides no result"
    for url, told in {
        "s4://bucket": "unknown protocol 's4'",
        "s3://": "does not name a location:",
        "s3://KEY:SECRET@bucket/x": "leave keys and options out of the URL",
    }.items():
        with pytest.raises(ValueError, match=told):
            load_recipe("r.yaml", [f"store='{url}'"])
