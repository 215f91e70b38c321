"""Models that are given another model's token ids must read the same tokens in them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import rlhf_core.stages.dpo
import rlhf_core.stages.kto
import rlhf_core.stages.ppo.train
import rlhf_core.stages.preferences.preferences_stage
from rlhf_core.config import DPO, KTO, PPO, Data, StageConfig
from rlhf_core.hub.vocabulary import difference, known_rows, require_same_vocabulary, stored_vocabulary
from rlhf_core.preflight.inputs import check_inputs
from rlhf_core.runs.run_dir import RunDir
from tests.support.hub_server import Blob, Hub, Repository
from tests.support.publishing import serving_hub
from tests.support.stage_request import stage_request
from tests.unit.preflight.test_check import TEMPLATE, Planned, planned, save_tokenizer

__all__ = ["planned"]


def swap(folder: Path, of: Path) -> Path:
    """A copy of a model whose tokenizer has two characters the other way round."""
    shutil.copytree(of, folder)
    file = folder / "tokenizer.json"
    whole = json.loads(file.read_text())
    vocabulary = whole["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(whole))
    return folder


def test_the_first_token_that_differs_is_named() -> None:
    own = {"a": 0, "b": 1, "c": 2}
    assert difference("x", own, "y", {**own, "<pad>": 3}) is None, "what is never sent may be there"
    assert (
        difference("x", own, "y", {"a": 0, "c": 1, "b": 2})
        == "y is given the token ids of x and has another vocabulary: number 1 is 'b' in x and 'c' in y; name"
        " a model with the same tokenizer"
    )
    assert "number 2 is 'c' in x and no token in y" in str(difference("x", own, "y", {"a": 0, "b": 1}))


def test_what_files_tell_is_what_transformers_reads(material: Path, tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "bytes", TEMPLATE)
    pieces = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -1.0), ("b", -2.0)], unk_id=0))
    PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="</s>", pad_token="<pad>").save_pretrained(
        tmp_path / "pieces"
    )
    for folder in (material / "base", tmp_path / "bytes", tmp_path / "pieces"):
        assert stored_vocabulary(str(folder)) == AutoTokenizer.from_pretrained(folder).get_vocab()
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(tmp_path / "bytes")})
    )
    assert stored_vocabulary(str(adapter)) == stored_vocabulary(str(tmp_path / "bytes"))
    assert stored_vocabulary(str(tmp_path)) is None
    (tmp_path / "tokenizer.json").write_text("[]")
    assert stored_vocabulary(str(tmp_path)) is None


def test_a_tokenizer_without_that_file_is_read_by_transformers(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = swap(tmp_path / "other", material / "base")
    monkeypatch.setattr("rlhf_core.hub.vocabulary.stored_vocabulary", lambda path: None)
    require_same_vocabulary(str(material / "base"), [str(material / "base")])
    with pytest.raises(
        ValueError,
        match=r"number \d+ is 'a' in .*base and 'b' in .*other; name a model with the same tokenizer",
    ):
        require_same_vocabulary(str(material / "base"), [str(other)])


def test_a_folder_without_a_tokenizer_is_not_compared(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require_same_vocabulary(str(material / "base"), [str(tmp_path)])
    assert (
        capsys.readouterr().out
        == f"{tmp_path} has no tokenizer: that it knows the tokens of {material / 'base'} is taken for"
        " granted\n"
    )


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (["ppo.reward=OTHER"], "stages.ppo.critic"),  # which starts from it
        (["ppo.critic=OTHER"], "stages.ppo.critic"),
        (["ppo.reference=OTHER"], "stages.ppo.reference"),
        (["reward_model.model=OTHER"], "stages.ppo.critic"),  # what is trained from it has its tokenizer
    ],
)
def test_it_is_told_before_work(planned: Planned, tmp_path: Path, overrides: list[str], where: str) -> None:
    other = swap(tmp_path / "other", tmp_path / "base")
    base = tmp_path / "base"
    plan = planned(
        *(override.replace("OTHER", str(other)) for override in overrides), "sft.data={sources: none.jsonl}"
    )
    problems = [problem for problem in check_inputs(plan, plan.nodes) if "none.jsonl" not in problem]
    told = (
        f"{other} is given the token ids of {base} and has another vocabulary: number 64 is 'a' in {base} and"
        f" 'b' in {other}; name a model"
    )
    assert problems and problems[0].startswith(f"{where}: {told}")
    shutil.rmtree(other)
    shutil.copytree(base, other)
    assert not [problem for problem in check_inputs(plan, plan.nodes) if "vocabulary" in problem]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub for the clients of alignflow and of transformers, with a cache of its own."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    with serving_hub(monkeypatch) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", running.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield running


def publish(server: Hub, name: str, folder: Path) -> None:
    files = {file.name: Blob(file.read_bytes(), False) for file in folder.iterdir()}
    server.repositories[name] = Repository(private=False)
    server.repositories[name].commit("main", "a model", files)


@pytest.mark.parametrize("revision", ["", "@main"])
@pytest.mark.parametrize("remote", ["its own", "the other", "both"])
def test_vocabularies_of_the_hub_are_compared_before_work(
    planned: Planned, server: Hub, tmp_path: Path, remote: str, revision: str
) -> None:
    base, other, same = tmp_path / "base", swap(tmp_path / "other", tmp_path / "base"), tmp_path / "same"
    shutil.copytree(base, same)
    for folder in (base, other, same):
        publish(server, f"someone/{folder.name}", folder)
    theirs = remote != "its own"
    ours = remote != "the other"
    names = {
        folder.name: f"someone/{folder.name}{revision}" if theirs else str(folder) for folder in (other, same)
    }
    changes = [f"base_model=someone/base{revision}"] if ours else []
    plan = planned(*changes, f"ppo.reward={names['other']}", f"ppo.reference={names['same']}")
    (problem,) = check_inputs(plan, plan.nodes)
    assert problem.startswith(f"stages.ppo.critic: {names['other'].partition('@')[0]}")
    assert "has another vocabulary: number 64 is 'a' in " in problem
    plan = planned(*changes, f"ppo.reward={names['same']}", f"ppo.reference={names['same']}")
    assert check_inputs(plan, plan.nodes) == []


@pytest.mark.parametrize("revision", ["", f"@{'ab' * 20}"])
def test_a_model_that_the_hub_does_not_send_is_told_once_for_each_place(
    planned: Planned, revision: str
) -> None:
    """As the stage's own tokenizer is."""
    own = planned(f"base_model=someone/base{revision}")
    told = [problem.partition(": ")[2] for problem in check_inputs(own, own.nodes)]
    plan = planned(f"ppo.reference=someone/base{revision}", f"loop.reward=someone/base{revision}")
    problems = check_inputs(plan, plan.nodes)
    assert [problem.partition(": ")[0] for problem in problems] == [
        "stages.ppo.reference",
        "stages.loop.round1.preferences.reward",
        "stages.loop.round2.preferences.reward",
    ]
    assert {problem.partition(": ")[2].partition(" (")[0] for problem in problems} == {
        message.partition(" (")[0] for message in told
    }


def test_a_local_model_without_a_tokenizer_is_told_and_with_a_damaged_one_refused(
    planned: Planned, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    other = tmp_path / "other"
    other.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(base / name, other)
    plan = planned(f"ppo.reward={other}", f"loop.reward={other}")
    assert check_inputs(plan, plan.nodes) == []
    assert (
        capsys.readouterr().out
        == f"{other} has no tokenizer: that it knows the tokens of {base} is taken for granted\n"
    )
    for damaged in ("[]", "weights", "{}"):
        (other / "tokenizer.json").write_text(damaged)
        problems = check_inputs(plan, plan.nodes)
        assert problems[0].startswith(f"stages.ppo.reward: {other}: no tokenizer can be loaded from here (")
        assert len(problems) == 3 and not any("\n" in problem for problem in problems)


def test_an_adapter_of_a_hub_model_has_its_vocabulary(server: Hub, material: Path, tmp_path: Path) -> None:
    publish(server, "someone/adapted", swap(tmp_path / "other", material / "base"))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "someone/adapted"}))
    with pytest.raises(ValueError, match=f"{adapter} is given the token ids of .*another vocabulary"):
        require_same_vocabulary(str(material / "base"), [str(adapter)])


def test_without_transformers_the_stages_compare(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("ppo.reward=someone/rm")
    assert check_inputs(plan, plan.nodes) != []
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert check_inputs(plan, plan.nodes) == []


def test_reward_models_with_another_tokenizer_need_a_chat_template(planned: Planned, tmp_path: Path) -> None:
    other = swap(tmp_path / "other", tmp_path / "base")
    plan = planned(f"ppo.reward=[reward_model, {other}]", f"loop.reward={other}")
    assert check_inputs(plan, plan.nodes) == []
    (other / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((other / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (other / "tokenizer_config.json").write_text(json.dumps(config))
    problems = check_inputs(plan, plan.nodes)
    assert [problem.partition(":")[0] for problem in problems] == [
        *(
            "stages.ppo.reward.1",
            "stages.loop.round1.preferences.reward",
            "stages.loop.round2.preferences.reward",
        )
    ]
    assert all("chat template" in problem for problem in problems), problems


def test_judges_and_servers_get_text(planned: Planned, tmp_path: Path) -> None:
    other = swap(tmp_path / "other", tmp_path / "base")
    for judge in (f"evaluation.judges=[{{kind: reward, reward: {other}}}]", f"evaluation.proxy={other}"):
        plan = planned("ppo.reward=[reward_model, 'http://host']", judge, "evaluation.temperature=1")
        assert check_inputs(plan, plan.nodes) == []


def stages(material: Path) -> dict[str, tuple[Callable[..., Any], StageConfig]]:
    prompts = Data(sources=str(material / "prompts.jsonl"))
    pairs = Data(sources=str(material / "preferences.jsonl"), max_samples=8)
    train: Callable[..., Any] = lambda request, run: rlhf_core.stages.ppo.train.train(request, run, {}, 0.0)  # noqa: E731
    return {
        "critic": (train, PPO(actor="base", reward="base", critic="other", prompts=prompts)),
        "ppo-reference": (
            train,
            PPO(actor="base", reward="base", critic="base", reference="other", prompts=prompts),
        ),
        "dpo": (rlhf_core.stages.dpo.run, DPO(policy="base", reference="other", data=pairs)),
        "kto": (rlhf_core.stages.kto.run, KTO(policy="base", reference="other", data=pairs)),
    }


@pytest.mark.parametrize("name", ["critic", "ppo-reference", "dpo", "kto"])
def test_who_loads_it_refuses_it(name: str, material: Path, tmp_path: Path) -> None:
    work, config = stages(material)[name]
    base, other = material / "base", swap(tmp_path / "other", material / "base")
    request = stage_request(config, {"base": str(base), "other": str(other)}, name="s")
    (tmp_path / "run").mkdir()
    with pytest.raises(ValueError) as refused:
        work(request, RunDir(tmp_path / "run"))
    assert str(refused.value).startswith(
        f"{other} is given the token ids of {base} and has another vocabulary: number "
    )


def test_rows_that_pad_a_vocabulary_are_counted(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, TEMPLATE)
    size = len(AutoTokenizer.from_pretrained(tmp_path))
    assert known_rows(str(tmp_path), size + 57) == size
    assert known_rows(str(tmp_path), size) is None
    assert known_rows(str(tmp_path), size - 1) is None, "special tokens may have no row"
    assert known_rows("owner/name", size) is None
    assert known_rows(str(tmp_path / "none"), size) is None
