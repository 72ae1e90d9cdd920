"""The views without a browser: their pictures, words and answers."""

from __future__ import annotations

import base64
import json
import re
import shutil

import pandas as pd
import pytest
from logs import GIB, Log

from rlkit.errors import ConfigError, RlkitError, RunError
from rlkit.models import ASSETS
from rlkit.tokentexts import TokenTexts
from rlkit.widgets import Dashboard, GpuMonitor, Health, PhaseTimeline, RewardCurves, RolloutBrowser, RunControls, compare
from rlkit.widgets.dashboard import differences
from rlkit.widgets.gpus import recent
from rlkit.widgets.watched import Watched

PANELS = (RunControls, Health, RewardCurves, GpuMonitor, PhaseTimeline, RolloutBrowser, Dashboard)


@pytest.fixture
def log(tmp_path):
    return Log(tmp_path / "sums")


def alts(panel):
    """What its pictures say."""
    return re.findall(r"alt='([^']*)'", panel._repr_html_())


@pytest.mark.parametrize("panel", PANELS, ids=lambda p: p.__name__)
@pytest.mark.parametrize("filled", [False, True])
def test_every_view_has_html_and_text_and_no_widget_without_a_browser(panel, filled, log):
    if filled:
        log.steps(3)
        log.samples(2)
        log.monitor(1000.0, gpus=1)
        log.phase("rollout", 1000.0, 3.0)
    view = panel(log.folder)
    bundle = view._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain"}
    assert "sums" in bundle["text/plain"]
    assert "<script" not in bundle["text/html"]
    assert "http" not in re.sub(r"base64,[^']+", "", bundle["text/html"])
    assert len(bundle["text/html"]) < 100_000
    assert repr(view) == bundle["text/plain"]
    json.dumps(view.spec())
    view.close()
    view.close()


@pytest.mark.parametrize("panel", [*PANELS, lambda run: compare(run, run)])
def test_a_run_that_does_not_exist_is_an_error(panel, tmp_path):
    with pytest.raises(RunError, match="nowhere"):
        panel(tmp_path / "nowhere")


# --- curves ------------------------------------------------------------------------------------------------------------------------------


def test_curves_show_what_is_asked_for_in_that_order(log):
    log.step(0, reward_mean=0.25, policy_entropy=0.5, eval_accuracy=0.75, mine_odd=3.0)
    assert alts(RewardCurves(log.folder, ["mine/odd", "entropy", "reward/mean"])) == [
        "mine/odd: odd 3",
        "Entropy: entropy 0.5",
        "Reward: mean 0.25",
    ]
    assert "Accuracy: accuracy 0.75" in alts(RewardCurves(log.folder))


def test_reward_parts_are_those_that_the_run_has(log):
    log.step(0, reward_mean=1.5, reward_std=0.1, reward_no_spread_groups=0.0, reward_math=1.0, reward_format=0.5)
    assert alts(RewardCurves(log.folder, ["parts"])) == ["Reward parts: math 1, format 0.5"]


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (["entropi"], "did you mean 'entropy'"),
        ("reward", r"\['reward'\]"),
        ([3], "must be a list of names"),
        ([["x"]], "must be a list of names"),
    ],
)
def test_curves_that_cannot_be_are_refused(metrics, words, log):
    with pytest.raises(ConfigError, match=words):
        RewardCurves(log.folder, metrics)


def test_a_picture_follows_the_log(log):
    curves = RewardCurves(log.folder, ["reward"])
    assert alts(curves) == ["Reward: nothing logged yet"]
    log.steps(50)
    curves.read()
    assert alts(curves) == ["Reward: mean 0.49"]


# --- machines and phases -----------------------------------------------------------------------------------------------------------------


def test_without_a_gpu_the_cpu_side_is_shown_and_said(log):
    log.monitor(1000.0, note="no NVML: no NVIDIA driver on this node")
    monitor = GpuMonitor(log.folder)
    assert alts(monitor) == ["CPU: cpu 25 %", "Memory of the node: memory 8 GiB"]
    assert "no GPU" in monitor.text()
    assert "no NVIDIA driver" in monitor.text()
    assert "no sample" in GpuMonitor(Log(log.folder.parent / "other").folder).text()


def test_gpus_of_all_nodes_are_shown_and_one_alone_by_role(log):
    log.monitor(1000.0, gpus=1)
    assert "GPU memory: engine 2 GiB, learner 1 GiB, other 0 GiB" in alts(GpuMonitor(log.folder))
    log.monitor(1001.0, gpus=2, node="10.0.0.2", object_store=GIB)
    words = alts(GpuMonitor(log.folder))
    assert "GPU utilisation: 10.0.0.1 0 H200 50 %, 10.0.0.2 0 H200 50 %, 10.0.0.2 1 H200 51 %" in words
    assert "Object store: 10.0.0.2 1 GiB" in words
    assert "Power: 10.0.0.1 0 H200 300 W, 10.0.0.2 0 H200 300 W, 10.0.0.2 1 H200 300 W" in words


def test_a_node_that_left_long_ago_does_not_break_the_picture(log):
    log.monitor(1000.0, node="10.0.0.2")
    for t in range(1000, 9000, 1000):
        log.monitor(float(t))
    assert "10.0.0.1" in GpuMonitor(log.folder).static_html()


def test_a_batch_that_is_behind_is_told_by_the_update(log):
    log.write({"kind": "begin", "step": 0, "version": 3, "t": 1000.0})
    log.phase("rollout", 1000.0, 1.0, policy_version=3)  # of the next step: it came while this one was trained
    log.write({"kind": "step", "t": 1010.0, "step": 0, "version": 4, "updates": 1, "metrics": {"update/policy_lag": 1.0}})
    log.phase("rollout", 1011.0, 1.0, step=1, policy_version=3)
    assert "1 version behind" in Health(log.folder).text()


def test_phases_have_lanes_and_sums(log):
    log.phase("rollout", 1000.0, 60.0)
    log.phase("update", 1060.0, 30.0)
    log.phase("rollout", 1090.0, 10.0, step=1)
    timeline = PhaseTimeline(log.folder)
    assert timeline.text() == "PhaseTimeline('sums': rollout 70 s, update 30 s)"
    assert alts(timeline) == ["Phases of 1 min 40 s: rollout, update"]
    watched = Watched(log.folder)
    watched.poll()
    assert recent(watched, 1030.0) == [("rollout", 1030.0, 1060.0), ("update", 1060.0, 1090.0), ("rollout", 1090.0, 1100.0)]


def test_many_phases_are_joined_in_a_picture(log):
    for i in range(2000):
        log.phase("update", 1000.0 + i, 0.9)
    watched = Watched(log.folder)
    watched.poll()
    (span,) = recent(watched, 0.0)
    assert span == ("update", 1000.0, 2999.9)


# --- health ------------------------------------------------------------------------------------------------------------------------------


def found(log):
    health = Health(log.folder)
    return health.found()


def test_an_empty_run_has_no_verdicts(log):
    assert {level for level, _ in found(log).values()} == {"none"}


def test_a_healthy_run_is_fine(log):
    log.write({"kind": "begin", "t": 1000.0, "step": 0, "version": 0})
    log.phase("rollout", 1000.0, 1.0, policy_version=0)
    for step in range(12):
        log.step(step, reward_mean=0.5, reward_std=0.4, reward_no_spread_groups=0.25, policy_logprob_gap=0.001, policy_approx_kl=0.01,
                 policy_entropy=1.0 - 0.05 * step, length_truncated=0.0)  # fmt: skip
    assert {gate: level for gate, (level, _) in found(log).items()} == dict.fromkeys(
        ("constant", "spread", "gap", "kl", "entropy", "truncation", "stale", "finite"), "good"
    )
    assert found(log)["entropy"][1] == "0.55, 61% of its start"  # steps 7 to 11: 0.55; steps 0 to 4: 0.9


@pytest.mark.parametrize(
    ("metric", "value", "gate", "level", "words"),
    [
        ("reward_std", 0.0, "constant", "bad", "all equal"),
        ("reward_no_spread_groups", 0.7, "spread", "warn", "70%"),
        ("reward_no_spread_groups", 0.95, "spread", "bad", "95%"),
        ("policy_logprob_gap", 0.05, "gap", "warn", "0.05"),
        ("policy_logprob_gap", 0.5, "gap", "bad", "0.5"),
        ("policy_kl", 0.2, "kl", "warn", "0.2"),
        ("policy_approx_kl", 1.0, "kl", "bad", "1"),
        ("length_truncated", 0.2, "truncation", "warn", "20%"),
        ("length_truncated", 0.8, "truncation", "bad", "80%"),
        ("policy_kl", None, "finite", "bad", "policy/kl at 3 steps"),
    ],
)
def test_a_gate_says_what_is_wrong(metric, value, gate, level, words, log):
    for step in range(3):
        log.step(step, **{metric: value})
    assert found(log)[gate] == (level, words)


def test_the_entropy_s_fall_is_measured_from_its_start(log):
    for step in range(20):
        log.step(step, policy_entropy=1.0 if step < 10 else 0.05 if step < 19 else None)
    assert found(log)["entropy"] == ("warn", "0.05, 5% of its start")
    log.step(20, policy_entropy=0.0)
    for step in range(21, 26):
        log.step(step, policy_entropy=0.01)
    assert found(log)["entropy"] == ("bad", "0.01, 1% of its start")


def test_rollouts_of_an_old_policy_are_told(log):
    log.write({"kind": "begin", "t": 1000.0, "step": 0, "version": 3})
    log.phase("rollout", 1000.0, 1.0, policy_version=2)
    assert found(log)["stale"] == ("warn", "1 version behind")


def test_every_gate_says_why_and_what_to_try(log):
    for gate in Health(log.folder).spec()["gates"]:
        assert len(gate["why"]) > 40
        assert len(gate["fix"]) > 40


# --- rollouts ----------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def rollouts(log):
    log.steps(3)
    log.samples(0)
    log.samples(2)
    return RolloutBrowser(log.folder)


def test_groups_of_a_step_carry_what_filters_need(rollouts):
    first, second = rollouts.answer({"what": "step", "step": 2})["groups"]
    assert first == {"prompt": "p0", "question": "question 0?", "reward": 1.0, "wrong": 0, "unparsed": 0, "truncated": 0, "no_spread": True}
    assert (second["reward"], second["wrong"], second["truncated"], second["no_spread"]) == (0.5, 1, 1, False)


def test_a_group_has_its_samples_as_json(rollouts):
    group = rollouts.answer({"what": "group", "step": 2, "prompt": "p1"})
    right, wrong = group["samples"]
    assert (group["question"], group["answer"]) == ("question 1?", "1")
    assert right["response"] == "it is 1"
    assert (right["verdict"], right["reward"], right["parts"], right["advantage"]) == ("correct", 1.0, {"math": 1.0}, 0.5)
    assert (wrong["verdict"], wrong["finish_reason"], wrong["extracted"]) == ("wrong", "length", "2")
    assert [(s["step"], s["row"]) for s in group["samples"]] == [(2, 2), (2, 3)]
    json.dumps(group, allow_nan=False)


def test_a_sample_has_its_tokens_with_texts_where_the_run_keeps_its_tokenizer(rollouts, log):
    bare = rollouts.answer({"what": "tokens", "step": 2, "row": 3})
    assert (bare["tokens"], bare["texts"], bare["logprobs"]) == ([1, 2, 3], [None] * 3, [-0.5, -1.0, None])
    assert bare["said"].startswith("There is no tokenizer.json of run 'sums'")
    json.dumps(bare, allow_nan=False)
    shutil.copy(ASSETS / "tiny" / "tokenizer.json", log.folder)
    told = rollouts.answer({"what": "tokens", "step": 2, "row": 3})
    assert (told["texts"], told["said"]) == (TokenTexts((ASSETS / "tiny" / "tokenizer.json").read_bytes())([1, 2, 3]), "")
    assert all(told["texts"])
    with pytest.raises(RunError, match="Step 2 has 4 samples: there is no row 4"):
        rollouts.answer({"what": "tokens", "step": 2, "row": 4})


@pytest.mark.parametrize(
    ("ask", "words"),
    [({"what": "step"}, "step is None"), ({"what": "step", "step": "x"}, "step is 'x'"),
     ({"what": "step", "step": float("nan")}, "step is nan"),
     ({"what": "tokens", "step": 2}, "row is None"), ({"what": "tokens", "step": 2, "row": 0.5}, "row is 0.5"),
     ({"what": "group", "step": 2}, "Prompt 'None' is not in step 2")],
)  # fmt: skip
def test_a_question_that_is_none_is_refused(ask, words, rollouts):
    with pytest.raises(RunError, match=words):
        rollouts.answer(ask)


def test_a_file_that_holds_other_rows_is_refused(rollouts, log):
    pd.DataFrame({"reward": [1.0], "prompt_id": ["p0"]}).to_parquet(log.folder / "samples" / "step-000001.parquet")
    with pytest.raises(RunError, match="The file of step 1 holds no samples as a run writes them: it has no answer, extracted"):
        rollouts.answer({"what": "step", "step": 1})


def test_a_damaged_tokenizer_leaves_the_ids(rollouts, log):
    (log.folder / "tokenizer.json").write_text("{}")
    told = rollouts.answer({"what": "tokens", "step": 2, "row": 0})
    assert (told["texts"], told["said"][:41]) == ([None] * 3, "The run's tokenizer.json cannot be read: ")


def test_a_prompt_is_found_in_other_steps_oldest_first(rollouts):
    across = rollouts.answer({"what": "across", "prompt": "p1"})
    assert [step["step"] for step in across["steps"]] == [0, 2]
    assert across["said"] == "In 2 of the newest 3 of 3 steps."


def test_a_step_without_samples_says_so(rollouts):
    with pytest.raises(RunError, match="No samples of step 1"):
        rollouts.answer({"what": "step", "step": 1})
    with pytest.raises(RunError, match="'p9' is not in step 2"):
        rollouts.answer({"what": "group", "step": 2, "prompt": "p9"})
    assert "error" in rollouts.answer({"what": "nonsense"})


def test_the_static_table_is_of_the_newest_step(rollouts, log):
    assert "samples of step 2" in rollouts._repr_html_()
    log.steps(4, since=3)
    assert "No samples of step 3" in rollouts._repr_html_()


def test_answers_are_escaped_in_html(log):
    log.steps(1)
    log.samples(0)
    browser = RolloutBrowser(log.folder)
    browser._samples(0).loc[0, "response"] = "<img src=x onerror=alert(1)>"
    assert "<img src=x" not in browser._repr_html_()


# --- controls, dashboard, compare --------------------------------------------------------------------------------------------------------


def test_printing_a_view_reads_anew_until_it_is_closed(log):
    view = RewardCurves(log.folder)
    assert "no step is complete yet" in repr(view)
    log.steps(2)
    assert "2 steps" in repr(view)
    log.steps(3, since=2)
    assert "Reward: mean 0.02" in view._repr_html_()
    view.close()
    log.steps(4, since=3)
    assert "3 steps" in repr(view)


def test_controls_say_what_runs(log):
    controls = RunControls(log.folder)
    state = {"live": True, "phase": None, "committed": 3, "control": "run", "stale_since": None}
    for more, words in (({"looping": False}, "no loop is running"), ({"looping": True}, "run"), ({"control": "stopped"}, "stopped")):
        controls.watched.state = state | more
        assert controls.words() == f"4 steps complete, {words}"


def test_a_run_on_disk_cannot_be_stopped(log):
    controls = RunControls(log.folder)
    assert controls.answer({"verb": ["stop"]}) == {"error": "There is no control ['stop']."}
    with pytest.raises(RlkitError, match="attach"):
        controls.answer({"what": "control", "verb": "stop"})
    assert "error" in controls.answer({"what": "control", "verb": "explode"})
    assert "which does not say whether it runs" in controls.text()
    log.write({"kind": "close", "t": 2000.0})
    assert "not running" in repr(controls)


def test_damaged_lines_are_counted_and_the_end_is_still_the_end(log):
    with (log.folder / "events.jsonl").open("a") as file:
        file.write("broken\n" + "[" * 100_000 + "\n")
    log.write({"kind": "close", "t": 2000.0})
    controls = RunControls(log.folder)
    assert controls.watched.state["damaged"] == 2
    assert "not running" in controls.text()


def test_a_run_whose_folder_was_written_anew_replaces_what_was_read(tmp_path):
    log = Log(tmp_path / "anew")
    log.steps(3)
    log.samples(2)
    view = RolloutBrowser(log.folder)
    assert len(view.groups(2)) == 2
    shutil.rmtree(log.folder)
    log = Log(tmp_path / "anew", seed=5)
    log.write({"kind": "note", "text": "another run, with a log that is longer", "t": 1500.0})
    log.steps(8)
    log.samples(2, prompts=3)
    assert view.read()
    assert list(view.watched.steps["step"]) == list(range(8))
    assert (view.watched.seed, view.watched.restarts, len(view.groups(2))) == (5, 1, 3)


def test_samples_of_a_step_that_was_logged_again_are_read_again(log):
    log.steps(3)
    log.samples(2)
    view = RolloutBrowser(log.folder)
    assert len(view.groups(2)) == 2
    log.write({"kind": "rewind", "step": 1, "why": "", "t": 1100.0})
    log.step(2, t=1200.0, reward_mean=0.5)
    log.samples(2, prompts=4)
    view.read()
    assert len(view.groups(2)) == 4


def test_sums_of_phases_are_those_of_the_whole_run(log, monkeypatch):
    monkeypatch.setattr("rlkit.widgets.watched.MAX_PHASES", 10)
    for step in range(40):
        log.phase("rollout", 1000.0 + step, 1.0, step)
    assert "rollout 40 s" in PhaseTimeline(log.folder).text()


@pytest.mark.parametrize("column", ["question", "tokens", "n_tokens", "reward"])
def test_samples_of_another_kind_are_refused(column, rollouts, log):
    path = log.folder / "samples" / "step-000002.parquet"
    pd.read_parquet(path).assign(**{column: None}).to_parquet(path)
    with pytest.raises(RunError, match="a column is of another kind"):
        rollouts.answer({"what": "step", "step": 2})


def test_a_dashboard_is_all_parts_over_one_source(log):
    board = Dashboard(log.folder)
    assert [part.kind for part in board.parts()] == ["controls", "health", "curves", "machines", "phases", "rollouts"]
    assert {id(part.watched) for part in board.parts()} == {id(board.watched)}


def test_two_dashboards_on_one_run_each_read_all_of_it(log):
    first, second = Dashboard(log.folder), Dashboard(log.folder)
    log.steps(4)
    assert first.read()
    assert second.read()
    assert len(first.watched.steps) == len(second.watched.steps) == 4
    first.close()
    log.steps(5, since=4)
    assert not first.read()
    assert second.read()


def test_compare_lays_curves_over_each_other_and_lists_differences(log, tmp_path):
    other = Log(tmp_path / "more", seed=1)
    for one, lr in ((log, 1e-4), (other, 2e-4)):
        made = {"kind": "part", "t": 1000.0, "name": "learner", "model": "tiny", "seconds": 1.0}
        one.write(made | {"spec": {"lr": lr, "zero_stage": 2}, "asked": {"lr": lr}})
    log.steps(2)
    other.steps(5)
    both = compare(log.folder, other.folder)
    assert "Reward: sums 0.01, more 0.04" in alts(both)
    assert both.parts()[1].rows == [("seed", "0", "1"), ("learner.lr", "0.0001", "0.0002")]
    assert "learner.lr 0.0001 | 0.0002" in both.text()
    assert [source["table"] for source in both.parts()[0].spec()["sources"]] == ["0 steps", "1 steps"]
    assert compare(log.folder, log.folder).parts()[1].rows == []
    both.close()


def test_a_setting_that_one_run_has_not_is_a_difference():
    assert differences({"a": 1, "b": "x"}, {"a": 1, "c": None, "b": [2]}) == [("b", "x", "[2]")]
    assert differences({}, {"d": True}) == [("d", "–", "true")]


def test_pictures_hold_the_data_itself(log):
    log.steps(3)
    svg = base64.b64decode(re.search(r"base64,([^']+)", RewardCurves(log.folder)._repr_html_()).group(1)).decode()
    assert svg.startswith("<svg")
    assert "0.02" in svg
