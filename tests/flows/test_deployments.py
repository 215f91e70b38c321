"""deployments/prefect.yaml through Prefect's own command and a real server, and schedules that are wrong."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun

import flows.serve
from flows.cli import main
from flows.deployments import SILENT, deploy, prepare, schedule_of, served, sweep
from flows.serve import LOG, Servants
from rlhf_core.recipe import load_recipe
from tests.micro import ROOT, ask, build, wait_until

FILE = ROOT / "deployments" / "prefect.yaml"


def test_all_deployments_are_made(prefect: str, tmp_path: Path) -> None:
    environment = build(tmp_path / "here") | {"PREFECT_API_URL": prefect, "ALIGNFLOW_RECIPE": "recipe.yaml", "PWD": str(tmp_path / "here")}
    for pool in ("alignflow-process", "alignflow-ray", "alignflow"):
        kind = {"name": pool, "type": "process"}  # the Kubernetes pool's own type needs a package and a cluster
        ask(prefect, "/work_pools/", kind)
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(FILE)]
    done = subprocess.run(
        command, cwd=tmp_path / "here", env=environment, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = {item["name"]: item for item in ask(prefect, "/deployments/filter", {"limit": 100})}
    written = yaml.safe_load(FILE.read_text())["deployments"]
    assert {item["name"] for item in written} <= set(found)
    assert all(found[item["name"]]["parameters"]["recipe"] == "recipe.yaml" for item in written)
    assert all(found[item["name"]]["entrypoint"] == item["entrypoint"] for item in written)
    assert found["weekly"]["parameters"]["latest"] is True
    nightly = found["nightly"]
    (schedule,) = nightly["schedules"]
    assert schedule["active"] and schedule["schedule"]["cron"] == "0 2 * * *" and schedule["schedule"]["timezone"] == "Europe/Berlin"
    assert nightly["concurrency_options"]["collision_strategy"] == "CANCEL_NEW" and nightly["global_concurrency_limit"]["limit"] == 1
    assert nightly["job_variables"]["working_dir"] == str(tmp_path / "here")
    assert nightly["job_variables"]["env"]["ALIGNFLOW_LIMIT"] == "alignflow-machine"
    sweep = [entry["parameters"]["overrides"] for entry in found["evaluation-sweep"]["schedules"]]
    assert sorted(sweep) == [["evaluation.temperature=0", "evaluation.proxy=null"], ["evaluation.temperature=1"]]


def test_serve_tells_its_loops_when_to_end(prefect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    build(tmp_path / "here")
    with SyncPrefectClient(api=prefect) as client:
        prepare(client)
    ends = {"max_rounds": 4}
    (one,) = served(["here/recipe.yaml"], [], ends)
    names = deploy(prefect, one, schedule_of(None, "0 2 * * *", "UTC"), ends)
    with SyncPrefectClient(api=prefect) as client:  # the server is that of other tests too
        for automation in client.read_automations_by_name(SILENT.name):
            client.delete_automation(automation.id)
    made = ask(prefect, "/deployments/filter", {"limit": 100})
    found = {f"{item['entrypoint'].rpartition('.')[2]}/{item['name']}": item["parameters"] for item in made}
    assert {name for name in names if found[name].get("max_rounds") == 4} == {"loop/micro", "loop/micro-scheduled"}
    with pytest.raises(ValueError, match="--max-rounds 0: give 1 or more"):
        served(["here/recipe.yaml"], [], {"max_rounds": 0})


def test_schedules_fit_the_demos_recipe() -> None:
    recipe = ROOT / "deployments" / "recipes" / "tiny-cpu.yaml"
    schedules = [schedule for each in yaml.safe_load(FILE.read_text())["deployments"] for schedule in each.get("schedules", [])]
    changed = [overrides for schedule in schedules if (overrides := schedule.get("parameters", {}).get("overrides"))]
    assert len(changed) > 1
    for overrides in changed:
        load_recipe(str(recipe), overrides)


def test_wrong_schedules_and_recipes_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    build(tmp_path / "here")
    with pytest.raises(ValueError, match="timezone 'Europe/Berlim' is unknown: give a name such as Europe/Berlin or UTC"):
        schedule_of(None, "0 2 * * *", "Europe/Berlim")
    with pytest.raises(ValueError, match="cron '0 25' is no schedule"):
        schedule_of(None, "0 25", "UTC")
    for every in (0.1, float("nan"), float("inf"), 1e300):
        with pytest.raises(ValueError, match=r"interval of (0\.1|nan|inf|1e\+300) s is no schedule: give 1 to"):
            schedule_of(every, "", "UTC")
    assert main(["serve", "here/recipe.yaml", "--port", "99999"]) == 2
    assert main(["serve", "here/recipe.yaml", "--port", "0", "--host", "nonsense.invalid"]) == 3
    with pytest.raises(ValueError, match="two recipes are called micro"):
        served(["here/recipe.yaml", f"file://{tmp_path}/here/recipe.yaml"], [])


def test_a_second_serve_says_where_the_first_one_is(tmp_path: Path) -> None:
    build(tmp_path / "here")
    home = tmp_path / "here" / "home"
    home.mkdir()
    script = "import sys, time, pathlib\nfrom flows.serve import only_one\nwith only_one(pathlib.Path(sys.argv[1])):\n"
    script += "    print('held', flush=True)\n    time.sleep(120)\n"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    first = subprocess.Popen([sys.executable, "-c", script, str(home)], stdout=subprocess.PIPE, env=environment)
    assert first.stdout is not None and first.stdout.readline() == b"held\n"
    (home / "serve.json").write_text('{"ui": "http://127.0.0.1:4321", "pid": 77}')
    command = [sys.executable, "-m", "flows.cli", "serve", "recipe.yaml", "--home", str(home), "--port", "0"]
    second = subprocess.run(command, cwd=tmp_path / "here", env=environment, capture_output=True, text=True, timeout=100)
    first.kill()
    first.communicate()
    told = " ".join(second.stderr.split())
    assert second.returncode == 3 and "is running on" in told and "already, at http://127.0.0.1:4321 (process 77)" in told


@pytest.mark.parametrize(
    ("listed", "now", "told"),
    [
        ("RUNNING", "RUNNING", "CRASHED"),
        ("PENDING", "PENDING", "CRASHED"),
        ("CANCELLING", "CANCELLING", "CANCELLED"),  # the worker has ended it, and has not said so yet
        ("CANCELLING", "CANCELLED", "CANCELLED"),
        ("RUNNING", "COMPLETED", "COMPLETED"),  # it ended well after the list was read
    ],
)
def test_runs_whose_process_is_gone(prefect: str, listed: str, now: str, told: str) -> None:
    identity = ask(prefect, "/flows/", {"name": "gone"})["id"]
    deployment = ask(prefect, "/deployments/", {"name": f"{listed}-{now}", "flow_id": identity})["id"]
    run = ask(prefect, f"/deployments/{deployment}/create_flow_run", {"state": {"type": "SCHEDULED"}})["id"]
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True)

    class Client(SyncPrefectClient):
        def read_flow_runs(self, **given: Any) -> list[FlowRun]:
            found = [one for one in super().read_flow_runs(**given) if str(one.id) == run]
            say(now)
            return found

    def say(state: str) -> None:
        ask(prefect, f"/flow_runs/{run}/set_state", {"state": {"type": state}, "force": True})

    with Client(api=prefect) as client:
        say("RUNNING")
        client.update_flow_run(UUID(run), infrastructure_pid=f"{socket.gethostname()}:{ended.stdout.strip()}")
        say(listed)
        assert sweep(client) == (now == listed)
        assert ask(prefect, f"/flow_runs/{run}")["state_type"] == told
        say("COMPLETED")


def test_the_log_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows.serve, "LOG_BYTES", 1000)
    servants, log = Servants(tmp_path, "127.0.0.1", 0), tmp_path / LOG
    command = "import sys\nfor line in sys.stdin: print('x' * 600, line, flush=True)"  # appends, as server and worker do
    with log.open("ab") as out, subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=out) as writer:
        assert writer.stdin is not None
        for number, (size, copy) in enumerate([(604, False), (0, True), (604, True)]):
            writer.stdin.write(b"%d\n" % number)
            writer.stdin.flush()
            wait_until(lambda text=f" {number}\n": text in log.read_text(), "the line")
            servants.bound_log()
            assert (log.stat().st_size, (tmp_path / f"{LOG}.1").exists()) == (size, copy)
        writer.stdin.close()
    assert (tmp_path / f"{LOG}.1").read_text().split()[1::2] == ["0", "1"] and log.read_text().endswith(" 2\n\n")
