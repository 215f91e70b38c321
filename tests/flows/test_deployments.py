"""Deploys deployments/prefect.yaml with Prefect's command on a real server; refuses wrong schedules."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from uuid import UUID

import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.exceptions import ObjectAlreadyExists
from prefect.workers.process import ProcessWorker

import flows.serving.ended_runs
import flows.serving.services
from flows.cli.app import main
from flows.serving.deployments import deploy, job_template, pause_others, prepare, served
from flows.serving.schedules import schedule_of
from flows.serving.services import POOL
from flows.serving.silent_runs import SILENT
from flows.triggers.events import NEW
from rlhf_core.recipe.load_recipe import load_recipe
from tasks.served import own_recipe
from tests.support.micro import ROOT, ask, build, wait_until
from tests.support.programs import captured

FILE = ROOT / "deployments" / "prefect.yaml"


def test_all_deployments_are_created(prefect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = build(tmp_path / "here") | dict(
        PREFECT_API_URL=prefect, ALIGNFLOW_RECIPE="recipe.yaml", PWD=str(tmp_path / "here")
    )
    template = json.loads((FILE.parent / "process-pool.json").read_text())
    assert template == job_template()
    for pool in ("alignflow-process", "alignflow-ray"):
        ask(prefect, "/work_pools/", {"name": pool, "type": "process", "base_job_template": template})
    # the type kubernetes needs a package and a cluster
    ask(prefect, "/work_pools/", {"name": "alignflow", "type": "process"})
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(FILE)]
    done = captured(command, cwd=tmp_path / "here", env=environment, timeout=200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = {item["name"]: item for item in ask(prefect, "/deployments/filter", {"limit": 100})}
    written = yaml.safe_load(FILE.read_text())["deployments"]
    assert {item["name"] for item in written} <= set(found)
    assert all(found[item["name"]]["parameters"]["recipe"] == "recipe.yaml" for item in written)
    assert all(found[item["name"]]["entrypoint"] == item["entrypoint"] for item in written)
    assert found["weekly"]["parameters"]["latest"] is True
    nightly = found["nightly"]
    (schedule,) = nightly["schedules"]
    assert schedule["active"]
    assert schedule["schedule"]["cron"] == "0 2 * * *"
    assert schedule["schedule"]["timezone"] == "Europe/Berlin"
    assert nightly["concurrency_options"]["collision_strategy"] == "CANCEL_NEW"
    assert nightly["global_concurrency_limit"]["limit"] == 1
    assert {
        name: item["job_variables"]
        for name, item in found.items()
        if item["work_pool_name"] != "alignflow" and item["job_variables"]
    } == {}
    folders = {name: found[name]["pull_steps"] for name in ("nightly", "on-demand-ray")}
    step = "prefect.deployments.steps.set_working_directory"
    assert folders == {
        "nightly": [{step: {"directory": str(tmp_path / "here")}}],
        "on-demand-ray": [{step: {"directory": "/artifacts"}}],
    }
    own = found["on-feedback"]["id"]
    (automation,) = [
        item
        for item in ask(prefect, "/automations/filter", {})
        if item["actions"][0].get("deployment_id") == own
    ]
    trigger = automation["trigger"]
    assert trigger["expect"] == [NEW] and trigger["match"] == {"prefect.resource.id": "alignflow.inbox.*"}
    assert found["on-feedback"]["concurrency_options"]["collision_strategy"] == "ENQUEUE"
    monkeypatch.setenv("PREFECT_API_URL", prefect)
    monkeypatch.chdir(tmp_path / "here")
    numbers = itertools.count()

    def feedback_comes() -> None:
        row = {"prompt": f"p{next(numbers)}", "response": "r", "thumb": "up"}
        Path("rows.jsonl").write_text(json.dumps(row) + "\n")
        assert main(["feedback", "import", "rows.jsonl", "--inbox", "chat.inbox"]) == 0

    feedback_comes()
    started = {"flow_runs": {"deployment_id": {"any_": [own]}}}
    wait_until(
        lambda: ask(prefect, "/flow_runs/count", started) >= 1,
        "the import to start a run of on-feedback",
        again=feedback_comes,
    )
    with SyncPrefectClient(api=prefect) as client:  # other tests use the same server
        client.delete_automation(UUID(automation["id"]))
        for run in ask(prefect, "/flow_runs/filter", started):
            client.delete_flow_run(UUID(run["id"]))
    sweep = [entry["parameters"]["overrides"] for entry in found["evaluation-sweep"]["schedules"]]
    assert sorted(sweep) == [
        ["evaluation.temperature=0", "evaluation.proxy=null"],
        ["evaluation.temperature=1"],
    ]


def test_serve_passes_end_conditions_to_its_loops(
    prefect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    build(tmp_path / "here")
    default = ProcessWorker.get_default_base_job_template()  # as an earlier version made the pool
    with SyncPrefectClient(api=prefect) as client:
        with suppress(ObjectAlreadyExists):
            client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
        client.update_work_pool(POOL, WorkPoolUpdate(base_job_template=default))
        prepare(client)
        command = shlex.join([sys.executable, *flows.serving.services.SAFELY, "prefect.engine"])
        fixed = {"stream_output": True, "command": command, "working_dir": str(tmp_path)}
        assert client.read_work_pool(POOL).base_job_template["job_configuration"] == fixed
    ends = {"max_rounds": 4}
    (one,) = served(["here/recipe.yaml"], [], ends)
    names = deploy(prefect, one, schedule_of(None, "0 2 * * *", "UTC"), ends)
    with SyncPrefectClient(api=prefect) as client:  # other tests use the same server
        for automation in client.read_automations_by_name(SILENT.name):
            client.delete_automation(automation.id)
    made = ask(prefect, "/deployments/filter", {"limit": 100})
    own = [item for item in made if item["entrypoint"]]  # others are of other tests
    found = {f"{item['entrypoint'].rpartition('.')[2]}/{item['name']}": item["parameters"] for item in own}
    assert {name for name in names if found[name].get("max_rounds") == 4} == {
        "loop/micro",
        "loop/micro-scheduled",
    }
    with pytest.raises(ValueError, match="--max-rounds 0: give 1 or more"):
        served(["here/recipe.yaml"], [], {"max_rounds": 0})


def test_schedules_of_an_earlier_serve_are_paused(
    prefect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their runs would start with the overrides of that one."""
    monkeypatch.chdir(build_in(tmp_path))
    (one,) = served(["recipe.yaml"], ["name=earlier"], {})
    every_night = schedule_of(None, "0 2 * * *", "UTC")
    with SyncPrefectClient(api=prefect) as client:
        with suppress(ObjectAlreadyExists):
            client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
        scheduled = deploy(prefect, one, every_night)["loop/earlier-scheduled"]
        mine = {found.id for found in client.read_deployments(limit=200) if found.id != scheduled}
        assert pause_others(client, [*mine, scheduled]) == []
        assert pause_others(client, [*mine]) == ["earlier-scheduled"]
        assert client.read_deployment(scheduled).paused and pause_others(client, [*mine]) == []
        assert deploy(prefect, one, every_night)["loop/earlier-scheduled"] == scheduled
        assert not client.read_deployment(scheduled).paused, "served again"
        client.delete_deployment(scheduled)


def test_an_interval_goes_on_when_serve_starts_again(
    prefect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A day that began anew at each start would never end on a machine that is restarted every day."""
    monkeypatch.chdir(build_in(tmp_path))
    (one,) = served(["recipe.yaml"], ["name=daily"], {})

    def anchor(seconds: float) -> object:
        scheduled = deploy(prefect, one, schedule_of(seconds, "", "UTC"))["loop/daily-scheduled"]
        (found,) = ask(prefect, f"/deployments/{scheduled}")["schedules"]
        assert found["schedule"]["interval"] == seconds
        return found["schedule"]["anchor_date"]

    with SyncPrefectClient(api=prefect) as client:
        with suppress(ObjectAlreadyExists):
            client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
        first = anchor(86400.0)
        assert anchor(86400.0) == first
        assert anchor(43200.0) != first, "another interval begins now"
        client.delete_deployment(client.read_deployment_by_name("loop/daily-scheduled").id)


def test_a_run_on_a_teams_server_has_its_deployments_own_recipe(
    prefect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(build_in(tmp_path))
    flow = ask(prefect, "/flows/", {"name": "team"})["id"]
    schedule = {"schedule": {"cron": "0 6 * * 6"}, "parameters": {"overrides": ["evaluation.proxy=null"]}}
    body = {
        "name": "own",
        "flow_id": flow,
        "parameters": {"recipe": "recipe.yaml", "overrides": ["artifacts=mine"]},
        "schedules": [schedule],
    }
    own = ask(prefect, "/deployments/", body)["id"]
    any_recipe = ask(prefect, "/deployments/", {"name": "any", "flow_id": flow})["id"]
    assert (
        own_recipe("recipe.yaml", ["artifacts=mine", "evaluation.proxy=null", "seed=4"], own).artifacts
        == "mine"
    )
    with pytest.raises(ValueError, match="override artifacts: a run of a deployment may set numbers"):
        own_recipe("recipe.yaml", ["artifacts=other"], own)
    for given, deployment in (
        ("other.yaml", own),
        ({"name": "x"}, own),
        ("recipe.yaml", any_recipe),
        (None, any_recipe),
    ):
        with pytest.raises(
            ValueError, match=r"parameter recipe: a run of .* has the deployment's own recipe"
        ):
            own_recipe(given, [], deployment)


def build_in(folder: Path) -> Path:
    build(folder / "here")
    return folder / "here"


def test_schedules_match_the_demos_recipe() -> None:
    recipe = ROOT / "deployments" / "recipes" / "tiny-cpu.yaml"
    schedules = [
        schedule
        for each in yaml.safe_load(FILE.read_text())["deployments"]
        for schedule in each.get("schedules", [])
    ]
    changed = [
        overrides for schedule in schedules if (overrides := schedule.get("parameters", {}).get("overrides"))
    ]
    assert len(changed) > 1
    for overrides in changed:
        load_recipe(str(recipe), overrides)


def test_wrong_schedules_and_recipes_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    build(tmp_path / "here")
    with pytest.raises(
        ValueError, match=r"timezone 'Europe/Berlim' is unknown: give .* Europe/Berlin or UTC"
    ):
        schedule_of(None, "0 2 * * *", "Europe/Berlim")
    with pytest.raises(ValueError, match="cron '0 25' is not a valid schedule"):
        schedule_of(None, "0 25", "UTC")
    for every in (0.1, float("nan"), float("inf"), 1e300):
        with pytest.raises(
            ValueError, match=r"interval of (0\.1|nan|inf|1e\+300) s is not allowed: give 1 to"
        ):
            schedule_of(every, "", "UTC")
    assert main(["serve", "here/recipe.yaml", "--port", "99999"]) == 2
    assert main(["serve", "here/recipe.yaml", "--port", "0", "--host", "nonsense.invalid"]) == 3
    assert main(["serve", "here/recipe.yaml", "--allow-host", "http://proxy.example"]) == 2
    with pytest.raises(ValueError, match="two recipes are called micro"):
        served(["here/recipe.yaml", f"file://{tmp_path}/here/recipe.yaml"], [])


def test_a_second_serve_says_where_the_first_one_is(tmp_path: Path) -> None:
    build(tmp_path / "here")
    home = tmp_path / "here" / "home"
    home.mkdir()
    script = (
        "import sys, time, pathlib\nfrom flows.serving.services import only_one\nwith"
        " only_one(pathlib.Path(sys.argv[1])):\n"
    )
    script += "    print('held', flush=True)\n    time.sleep(120)\n"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    first = subprocess.Popen(
        [sys.executable, "-c", script, str(home)], stdout=subprocess.PIPE, env=environment
    )
    assert first.stdout is not None and first.stdout.readline() == b"held\n"
    (home / "serve.json").write_text('{"ui": "http://127.0.0.1:4321", "pid": 77}')
    command = [sys.executable, "-m", "flows.cli", "serve", "recipe.yaml", "--home", str(home), "--port", "0"]
    second = captured(command, cwd=tmp_path / "here", env=environment, timeout=100)
    first.kill()
    first.communicate()
    told = " ".join(second.stderr.split())
    assert second.returncode == 3
    assert "is already running on" in told
    assert ", at http://127.0.0.1:4321 (process 77)" in told
