"""verl's log as our phases, and its settings for the same work."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import pytest

verl_ppo = importlib.import_module("verl_ppo")
LINE = (
    "(TaskRunner pid=7) step:2 - actor/loss:0.1 - timing_s/gen:4.0 - timing_s/reward:0.5 -"
    " timing_s/old_log_prob:1.0 - timing_s/ref:1.25 - timing_s/values:1 - timing_s/update_critic:3.0 -"
    " timing_s/update_actor:3.5 - timing_s/step:15.0 - timing_per_token_ms/gen:0.1"
)


def test_timers_are_added_by_phase_and_absent_phases_left_out() -> None:
    (step,) = verl_ppo.read_phases(f"step: begins\n{LINE}\nthe end")
    assert step == {"generate": 4.0, "score": 3.75, "train": 6.5, "step": 15.0}
    assert verl_ppo.read_phases("") == []
    assert len(verl_ppo.read_phases(f"{LINE}\n{LINE} - timing_s/update_weights:2e-1")) == 2
    assert verl_ppo.read_phases(f"{LINE} - timing_s/update_weights:2e-1")[0]["sync"] == pytest.approx(0.2)


@pytest.mark.parametrize("why", [None, "verl is not installed"])
def test_the_seconds_of_its_last_step_are_for_the_record(
    why: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ppo_step = importlib.import_module("ppo_step")
    gpus = list[int]()

    def run(_: argparse.Namespace, count: int) -> tuple[list[dict[str, float]], float]:
        gpus.append(count)
        return verl_ppo.read_phases(f"{LINE}\n{LINE.replace('step:15.0', 'step:14.0')}"), 0.0

    monkeypatch.setattr(verl_ppo, "missing", lambda: why)
    monkeypatch.setattr(verl_ppo, "run", run)
    lines = [{"phase/generate": 2.0, "phase/train": 5.0}]
    arguments = ppo_step.command_line().parse_args(
        ["--model", "m", "--out", "o", "--placement", "all-8", "--peer", "verl"]
    )
    found = ppo_step.beside(lines, arguments)
    if why:
        assert found == {} and not gpus and why in capsys.readouterr().out
    else:
        assert found["step"] == 14.0 and gpus == [8]
        assert "2.00" in capsys.readouterr().out.split("step")[-1], "14 s by 7 s"


def test_settings_are_those_of_our_work() -> None:
    arguments = argparse.Namespace(prompts=256, steps=3, prompt_len=1024, generate_len=512, micro_tokens=1024)
    found = verl_ppo.ppo_settings(arguments, Path("/folder"), Path("/model"), 8)
    assert found["trainer.n_gpus_per_node"] == 8 and found["algorithm.adv_estimator"] == "gae"
    assert found["data.train_batch_size"] == 256
    assert found["actor_rollout_ref.actor.ppo_mini_batch_size"] == 128
    assert found["critic.ppo_max_token_len_per_gpu"] == 1536, "a whole sequence fits a pass"
    assert found["actor_rollout_ref.rollout.n"] == 1


def test_the_model_has_a_template_that_adds_nothing(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "chat_template.jinja").write_text("<user>{{ messages }}")
    linked = verl_ppo.with_template(model, tmp_path / "out")
    assert (linked / "config.json").resolve() == (model / "config.json").resolve()
    assert "<user>" not in (linked / "chat_template.jinja").read_text()
    assert "<user>" in (model / "chat_template.jinja").read_text()
