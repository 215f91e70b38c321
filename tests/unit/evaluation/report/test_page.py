"""The report page from run directories of real records: what it says, escaping, self-containment, missing
parts."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from evaluation.report.drawing.evaluation_charts import win_rate_chart
from evaluation.report.run_page import write_report
from evaluation.report.summary import StageView, read, read_evaluation
from evaluation.report.verdict import verdict
from rlhf_core.runs.run_dir import LOG, METRICS
from tests.support.finished_run import (
    CONFIGS,
    DIGESTS,
    ROUND1,
    ROUND2,
    finish,
    finished,
    report,
    reward_reports,
    run_dir,
    view,
)
from tests.support.text_rows import rows_of_text

VOID = {"meta", "br", "path", "rect", "use", "circle", "line", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Visible text, tags and attributes; fails on tags that do not nest."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(html)
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page(folder: Path, stages: list[StageView]) -> Page:
    return Page(write_report(folder / "demo", "demo", stages).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a whole run; tests only read it."""
    artifacts = tmp_path_factory.mktemp("whole") / "artifacts"
    return write_report(artifacts / "demo", "demo", finished(artifacts))


def test_a_whole_run_tells_everything(whole: Path) -> None:
    path = whole
    assert path.name == "report.html" and path.stat().st_size < 2_000_000
    assert sorted(file.name for file in path.parent.iterdir()) == ["report.html", "summary.json"]
    assert json.loads((path.parent / "summary.json").read_text())["evaluation"]["model"] == ROUND2
    text = Page(path.read_text(encoding="utf-8")).text
    counted = "won 198, lost 72 and tied 30 of 300 battles"
    rate = "a win rate of 71 % with ties as half (95 % interval 66–76 %, judge: rule)."
    assert f"The final model ({ROUND2}) is better than SFT: it {counted}, {rate}" in text
    assert f"66–76 % against SFT: {counted}" in text and "198 / 30 / 72" in text
    assert "battles won" not in text.lower() and "beats SFT" not in text
    for stage, digest in DIGESTS.items():
        assert stage in text and digest in text
    assert "47 % → 83 %" in text  # right answers
    assert "reward_model: 66 % (61–71 %)" in text  # second opinion on the final model
    assert "reward_model in 88 % of the battles" in text
    assert "2 min 12 s" in text  # PPO's time
    assert "210 of 300 battles" in text and "60 of 300 battles" in text and "30 of 300 battles" in text
    assert "Maybe it is 1?" in text and "The answer is 0." in text
    for panel in (
        "Loss",
        "Share of pairs ranked correctly",
        "KL to the reference",
        "Policy ratio",
        "Where an iteration's time goes (s)",
    ):
        assert panel in text
    assert "round by round of iterative DPO" in text and "round 2" in text
    assert "98,214" in text  # tokens of the data report
    assert '"actor_learning_rate": 1e-06' in text
    assert "transformers" in text  # versions
    assert str(path.parents[2]) not in path.read_text(encoding="utf-8")


def test_judges_style_parents_and_reward_models_are_told(whole: Path) -> None:
    text = Page(whole.read_text(encoding="utf-8")).text
    assert "68 % (62–74)" in text  # the final model, length-controlled
    assert "56 % (51–61 %)" in text  # against its parent
    for words in ("against sft, length-controlled", "against its parent, length-controlled", "Win rate (%)"):
        assert words in text
    assert "1,234,567 / 98,765" in text and "12.35 USD" in text and "rule (decides)" in text
    assert "length +0.42 +0.22 to +0.62" in text and "Effect of style on rule" in text
    assert "B is right, A is wrong." in text
    assert "Swapped (A: iterative_dpo.round2, B: sft): by the rule" in text
    (first, second), (agreement,) = reward_reports().models, reward_reports().agreement
    assert f"{100 * first.overall.accuracy:.1f} %" in text
    assert second.model in text
    assert "by confidence" in text
    assert f"prefer the same answer in {100 * agreement.agreement:.0f} % of the pairs" in text


def test_over_optimisation_is_named_where_it_is_sure(whole: Path) -> None:
    page = whole.read_text()
    assert "Is the reward model over-optimised?" in page
    told = re.search(r"<p><b>([^<]*)</b>: ([^<]*)</p>", page)
    assert told and told[1] == ROUND2
    assert told[2].startswith(
        f"reward_model scores it higher than {ROUND1}, and rule prefers it less: the reward model is"
        " over-optimised."
    )
    assert page.count("is over-optimised") == 1 and 'aria-label="over-optimisation"' in page


def test_quality_comes_first_and_what_was_run_after_it(whole: Path) -> None:
    text = Page(whole.read_text()).text
    order = (
        "Is it better?",
        "Before and after",
        "What was run",
        "How the training went",
        "Lineage",
        "Published",
        "Configuration",
    )
    places = [text.index(f" {title} ") for title in order]
    assert places == sorted(places)
    assert "Of 300 questions the final model won 210, lost 60, tied 30." in text
    assert (
        "A rule compares every answer with the known answer: right beats wrong. A reward model prefers the"
        " answer that it scores higher." in text
    )


def test_the_page_says_where_a_model_was_published(tmp_path: Path) -> None:
    stages = finished(tmp_path / "artifacts")
    told = page(tmp_path / "artifacts", stages).text
    # no number is known
    assert f"iterative_dpo not sent to the Hub; in stages/publication-{DIGESTS['publication']} – –" in told
    directory = run_dir(tmp_path / "artifacts", "publication")
    result = json.loads((directory / "result.json").read_text())
    result["outputs"]["hub"] = "hub.json"
    result["metrics"] = {"files": 9.0, "bytes": 12_345_678.0}
    (directory / "result.json").write_text(json.dumps(result))
    (directory / "hub.json").write_text(
        json.dumps({"repo_id": "me/model", "commit": "ab" * 20, "tag": "publication-1", "url": ""})
    )
    told = page(tmp_path / "artifacts", stages).text
    assert (
        "publication iterative_dpo me/model, branch main, tag publication-1, commit abababababab 9 12.3"
        in told
    )


def test_an_old_report_without_the_newer_numbers_is_drawn(tmp_path: Path) -> None:
    stages = finished(tmp_path, lines=1)
    folder = run_dir(tmp_path, "evaluation") / "report"
    whole = report("rule", 0.0)
    plain = whole.model_dump(mode="json", exclude={"against_parent", "style", "judging"})
    for rate in plain["win_rates"]:
        for name in ("length_controlled", "lc_low", "lc_high", "num_won", "num_tied", "num_lost"):
            del rate[name]
    size = (folder / "eval.json").stat().st_size
    (folder / "eval.json").write_text(json.dumps(plain).ljust(size))
    text = page(tmp_path, stages).text
    assert "is better than SFT: it played 300 battles, a win rate of 71 %" in text
    assert "Win rate against sft (%)" in text and "Effect of style" not in text


def test_nothing_is_fetched_and_nothing_runs(whole: Path) -> None:
    found = Page(whole.read_text(encoding="utf-8"))
    assert not {"script", "link", "img", "iframe", "object", "image"} & set(found.tags)
    for name, value in found.attributes:
        assert not name.startswith("on")
        if name in ("src", "href", "xlink:href"):
            assert value and value.startswith("#"), f"{name}={value}"
        assert "url(" not in (value or "") or re.search(r"url\(#[^)]*\)", value or "")


def test_every_reference_inside_the_charts_resolves_once(whole: Path) -> None:
    html = whole.read_text(encoding="utf-8")
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    used = {a or b for a, b in re.findall(r'url\(#([^)"]+)\)|href="#([^"]+)"', html)}
    assert used and used <= set(ids)


def test_answers_are_escaped(tmp_path: Path) -> None:
    bad = "<script>alert('x')</script><img src=x onerror=alert(1)>{{ 7 * 7 }} \ud800"
    html = write_report(
        tmp_path / "demo", "demo", finished(tmp_path, lines=1, answer=lambda i: bad)
    ).read_text(encoding="utf-8")
    assert "<script" not in html and "<img" not in html
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;" in html and "{{ 7 * 7 }}" in html


def test_names_in_charts_are_escaped() -> None:
    rate = report("rule", 0.0).win_rates[0].model_copy(update={"model": "</svg><b>$x_1$"})
    svg = win_rate_chart([rate], rate.model)
    assert "<b>" not in svg and "&lt;b&gt;$x_1$" in svg


def test_a_long_answer_is_cut_and_says_so(tmp_path: Path) -> None:
    text = page(tmp_path, finished(tmp_path, lines=1, answer=lambda i: "word " * 1000)).text
    assert "(3500 more characters)" in text
    assert text.count("word") < 4000


def test_the_page_is_the_same_when_it_is_made_again(whole: Path, tmp_path: Path) -> None:
    stages = [view(whole.parents[1], name) for name in CONFIGS]
    assert write_report(tmp_path / "demo", "demo", stages).read_bytes() == whole.read_bytes()


def test_an_interrupted_stage_is_no_failed_one(tmp_path: Path) -> None:
    stages = [finish(tmp_path, "sft"), *(view(tmp_path, name, "not run") for name in list(CONFIGS)[1:])]
    stages[2] = view(tmp_path, "ppo", "interrupted")
    text = page(tmp_path, stages).text
    assert (
        "The run was interrupted in ppo: run it again to continue." in text and "Stage ppo failed" not in text
    )


def test_a_failed_stage_shows_its_log_and_the_rest_is_said_to_be_missing(tmp_path: Path) -> None:
    stages = [finish(tmp_path, "sft"), *(view(tmp_path, name, "not run") for name in list(CONFIGS)[1:])]
    stages[2] = view(tmp_path, "ppo", "failed")
    stages[2].run_dir.mkdir(parents=True)
    (stages[2].run_dir / LOG).write_text(
        "begin\n" + "line\n" * 100 + "\x1b[31mValueError: <the prompt> is empty\x1b[0m\n"
    )
    text = page(tmp_path, stages).text
    assert "The run stopped at ppo: there is no evaluation." in text
    assert "ValueError: <the prompt> is empty" in text and "begin" not in text and "[31m" not in text
    assert "There is no finished evaluation" in text and "There are no judged answers" in text
    assert "No metrics were written." in text and "the stage has not started" in text


@pytest.mark.parametrize(
    "name", [ROUND1, "evaluation", *(pytest.param(name, marks=pytest.mark.long) for name in CONFIGS)]
)
def test_any_single_stage_missing_is_no_error(tmp_path: Path, name: str) -> None:
    stages = [
        view(tmp_path, other, "not run") if other == name else finish(tmp_path, other, lines=1)
        for other in CONFIGS
    ]
    assert "Lineage" in page(tmp_path, stages).text


def test_an_empty_run_and_a_run_without_metrics(tmp_path: Path) -> None:
    assert "This run has no evaluation (yet)." in page(tmp_path, []).text
    stages = finished(tmp_path)
    for stage in stages:
        (stage.run_dir / METRICS).unlink()
    text = page(tmp_path, stages).text
    assert "Policy ratio" not in text and "a win rate of 71 % with ties as half" in text


def test_answers_that_are_gone_leave_the_tables(tmp_path: Path) -> None:
    stages = finished(tmp_path, lines=1)
    folder = run_dir(tmp_path, "evaluation") / "report" / "judgments"
    (folder / "rule.jsonl").write_text("not json\n".ljust((folder / "rule.jsonl").stat().st_size))
    text = page(tmp_path, stages).text
    assert "There are no judged answers" in text and "Win rate by category" in text


@pytest.mark.parametrize(
    ("baseline", "low", "rate", "high", "words"),
    rows_of_text(
        """
    sft | 0.66 | 0.71 | 0.76 | is better than SFT: it {counted}, a win rate of 71 % with ties as half (95 % interval 66–76 %
    dpo | 0.504 | 0.55 | 0.596 | is better than DPO: it {counted}, a win rate of 55.0 % with ties as half (95 % interval 50.4–59.6 %
    sft | 0.47 | 0.52 | 0.57 | is not clearly better or worse than SFT: it {counted}, a win rate of 52 %
    mine | 0.3 | 0.35 | 0.4 | is worse than mine: it {counted}, a win rate of 35 %
    """,
        yaml_columns=(1, 2, 3),
    ),
)
def test_the_verdict_follows_the_interval(
    tmp_path: Path, baseline: str, low: float, rate: float, high: float, words: str
) -> None:
    evaluation = finish(tmp_path, "evaluation")
    whole = report("rule", 0.0)
    update = {"ci_low": low, "win_rate": rate, "ci_high": high, "baseline": baseline}
    update |= {"num_won": 9, "num_tied": 290, "num_lost": 1}
    changed = tuple(r.model_copy(update=update) for r in whole.win_rates)
    file = evaluation.run_dir / "report" / "eval.json"
    size = file.stat().st_size
    file.write_text(whole.model_copy(update={"win_rates": changed}).model_dump_json().ljust(size))
    manifest = json.loads((evaluation.run_dir / "result.json").read_text())
    manifest["files"]["report/eval.json"]["size"] = file.stat().st_size
    (evaluation.run_dir / "result.json").write_text(json.dumps(manifest))
    stages = [read(evaluation)]
    counted = "won 9, lost 1 and tied 290 of 300 battles"
    assert words.format(counted=counted) in verdict(read_evaluation(stages), stages)


def test_urls_lose_their_passwords(tmp_path: Path) -> None:
    stage = finish(tmp_path, "sft", lines=2)
    config = json.loads((stage.run_dir / "config.json").read_text())
    config["config"]["data"]["sources"][0]["path"] = "https://me:secret@example.org/rows.jsonl"
    (stage.run_dir / "config.json").write_text(json.dumps(config))
    text = page(tmp_path, [stage]).text
    assert "secret" not in text and "https://***@example.org/rows.jsonl" in text
