"""Evaluation with real engines on the bundled tiny model: from the shell, from a cell, in a training loop, stopped and resumed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import rlkit as rl
from rlkit.errors import ConfigError, DataError
from rlkit.eval import compare, evaluate
from rlkit.models import resolve

ROOT = Path(__file__).resolve().parents[2]
TINY = {"max_tokens": 40, "limit": 24}


@pytest.fixture(scope="module")
def cluster(local_cluster, tmp_path_factory):
    return local_cluster(storage=str(tmp_path_factory.mktemp("runs")))


def math_eval(*args, cwd, **env):
    command = [sys.executable, str(ROOT / "eval" / "math_eval.py"), *map(str, args)]
    return subprocess.run(command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=400, check=False)


def trained(tmp_path):
    """A model's folder, as ``learner.save_hf`` leaves one."""
    folder = tmp_path / "trained_model"
    folder.symlink_to(resolve("tiny").path)
    return folder


def data(tmp_path, rows):
    folder = tmp_path / "data" / "gsm8k"
    folder.mkdir(parents=True)
    (folder / "test.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder.parent


SUMS = [{"question": f"What is {a} + {a + 7}?", "answer": f"{a} + {a + 7} = {2 * a + 7}\n#### {2 * a + 7}"} for a in range(100, 130)]


def test_the_command_line_evaluates_saves_and_gives_back_what_is_there(tmp_path):
    trained(tmp_path)
    args = ("--model_path", "./trained_model", "--dataset", "gsm8k", "--data_dir", data(tmp_path, SUMS), "--max_tokens", 40)
    first = math_eval(*args, cwd=tmp_path, RLKIT_HOME=str(tmp_path / "home"))
    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines()[1].split()[:3] == ["gsm8k", "30", "1"]
    folder = next((tmp_path / "runs" / "eval").glob("*/gsm8k-test-*"))
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [r["answer"] for r in rows] == [str(2 * a + 7) for a in range(100, 130)]
    assert all(r["verdict"] == ("correct" if r["extracted"] == r["answer"] else "wrong") for r in rows)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["accuracy"] == sum(r["verdict"] == "correct" for r in rows) / 30
    assert summary["config"]["engine"]["engine"] == "vllm"
    assert f"| accuracy | {summary['accuracy']:.1%}" in (folder / "report.md").read_text()
    assert subprocess.run([sys.executable, "-m", "rlkit.cli", "down"], env=os.environ | {"RLKIT_HOME": str(tmp_path / "home")},
                          capture_output=True, text=True, check=True).stdout == "No local cluster runs.\n"  # fmt: skip
    before = (folder / "samples.jsonl").read_bytes()
    again = math_eval(*args, cwd=tmp_path, RLKIT_HOME=str(tmp_path / "other"))
    assert again.stdout == first.stdout
    assert (folder / "samples.jsonl").read_bytes() == before
    assert not list((tmp_path / "other").glob("clusters/*"))  # no engine was needed


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--model_path", "nowhere", "--dataset", "arithmetic"), "There is no model at 'nowhere'"),
        (("--model_path", "tiny", "--dataset", "arithmetik"), "There is no set 'arithmetik', did you mean 'arithmetic'"),
        (("--model_path", "tiny", "--dataset", "arithmetic", "--max_tokens", "0"), "EvalSpec.max_tokens is 0"),
        (("--model_path", "tiny", "--dataset", "arithmetic", "--n", "3"), "1 at temperature 0"),
        (("--model_path", "tiny", "--dataset", "arithmetic", "--engine_arg", "max_len=9"), "has no setting 'max_len'"),
        (("--model_path", "tiny", "--dataset", "arithmetic", "--template", "qwen"), "did you mean 'qwen-boxed'"),
        (("--model_path", "tiny", "--dataset", "gsm8k", "--data_dir", "absent"), "'absent' is no folder"),
    ],
)
def test_wrong_calls_end_with_2_and_one_line(tmp_path, args, message):
    done = math_eval(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_killed_evaluation_goes_on_and_gives_the_same(tmp_path, cluster):
    code = """
import os, signal, sys, rlkit as rl, rlkit.eval.evaluation as module
from rlkit.eval import evaluate
from rlkit.eval.store import Store
module.FIRST_CHUNK, module.CHUNK_S = 8, 1e-9  # four problems a part, then one
append, parts = Store.append, []
def killed_after_the_third(store, rows, *times):
    append(store, rows, *times)
    parts.append(len(rows))
    if len(parts) == 3:
        with open(store.folder / "samples.jsonl", "a") as out:
            out.write('{"id": "arithmetic/test/6", "sam')
        os.kill(os.getpid(), signal.SIGKILL)
Store.append = killed_after_the_third
evaluate("tiny", "arithmetic", output=sys.argv[1], limit=24, n=2, temperature=1.0, max_tokens=40,
         max_model_len=128, kv_cache_gib=0.25, threads=1,
         cluster=rl.ClusterSpec.make({"name": "killed", "num_cpus": 4, "dashboard": False, "object_store_gib": 0.2}))
"""
    env = os.environ | {"RLKIT_HOME": str(tmp_path / "home")}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], env=env, timeout=200, check=False)
    assert done.returncode == -signal.SIGKILL
    subprocess.run([sys.executable, "-m", "rlkit.cli", "down", "killed"], env=env, check=True)
    file = next((tmp_path / "a").glob("*/*/samples.jsonl"))
    there = file.read_text().splitlines()[:-1]
    assert len(there) == 2 * (4 + 1 + 1)
    same = {"limit": 24, "n": 2, "temperature": 1.0, "max_tokens": 40, "cluster": cluster}
    with pytest.raises(DataError, match="was stopped before its end"):
        rl.eval.load(file.parent)
    whole = evaluate("tiny", "arithmetic", output=tmp_path / "b", **same)
    resumed = evaluate("tiny", "arithmetic", output=tmp_path / "a", **same)
    assert resumed.key == whole.key
    assert resumed.folder == file.parent
    assert file.read_text().splitlines()[: len(there)] == there
    assert [r["response"] for r in resumed.rows] == [r["response"] for r in whole.rows]
    assert not [name for name in cluster.ps() if name.startswith("eval-")]


def test_a_live_sampler_in_a_training_loop(cluster):
    run = rl.Run("evaluated", cluster, seed=1)
    sampler, learner = run.sampler("tiny"), run.learner("tiny", lr=1e-4)
    tasks, found = rl.load_tasks("arithmetic"), []
    for step in run.steps(2, progress=False):
        rollouts = sampler.generate(tasks.batch(4), n=4, max_tokens=32, progress=False)
        scored = rl.score(rollouts, rl.rewards.Math())
        stats = learner.update(rl.advantages(scored, "grpo"))
        sampler.sync(learner)
        found.append(evaluate(sampler, "arithmetic", **TINY))
        run.log(step, scored, stats, **found[-1].metrics)
    assert [f.policy_version for f in found] == [1, 2]
    assert found[0].key != found[1].key
    assert list(run.metrics["eval/arithmetic/accuracy"]) == [f.accuracy for f in found]
    events = [e for e in run.events if e["kind"] == "phase"]
    assert {e["phase"] for e in events if e["phase"].startswith("eval/")} == {"eval/rollout"}
    own = [e["seconds"] for e in events if e["phase"] == "rollout"]
    assert list(run.metrics["time/rollout"]) == pytest.approx(own)
    with pytest.raises(ConfigError, match="engine: settings of a sampler's engines cannot be changed here"):
        evaluate(sampler, "arithmetic", engine="hf")
    change = compare(*found)
    assert (change.n_problems, change.a) == (24, found[0])
    run.close()


@pytest.mark.slow
def test_hf_and_vllm_agree_greedily(cluster, tmp_path):
    """The same accuracy to within two problems in 500."""
    same = {"split": "train", "limit": 500, "max_tokens": 40, "cluster": cluster, "output": tmp_path}
    one = evaluate("tiny", "arithmetic", engine="vllm", **same)
    two = evaluate("tiny", "arithmetic", engine="hf", **same)
    assert one.key != two.key
    change = compare(one, two)
    assert change.n_problems == 500
    assert 0.2 < one.accuracy < 0.6
    assert len(change.gained) + len(change.lost) <= 2


@pytest.mark.slow
def test_samples_shots_and_prompts_that_are_too_long(cluster, tmp_path):
    same = {"cluster": cluster, "output": tmp_path, "n": 4, "temperature": 1.0, "limit": 12, "max_tokens": 32}
    found = evaluate("tiny", ["arithmetic", "word_problems"], **same)
    assert [e.dataset for e in found] == ["arithmetic", "word_problems"]
    one = found["arithmetic"]
    assert set(one.pass_at) == {1, 2, 4}
    assert one.pass_at[1] == pytest.approx(one.accuracy)
    assert one.pass_at[1] <= one.pass_at[2] <= one.pass_at[4]
    assert len(one.rows) == 48
    assert len({(r["id"], r["response"]) for r in one.rows}) > 12
    with_shots = evaluate("tiny", "arithmetic", **same | {"shots": 1, "max_model_len": 120})
    assert with_shots.key != one.key
    short = evaluate("tiny", "arithmetic", **same | {"max_model_len": 16})
    assert (short.dropped, short.accuracy, short.mean_length) == (12, 0.0, 0.0)
    with pytest.raises(DataError, match="shots=2 takes its examples from the train split"):
        evaluate("tiny", "gsm8k", data_dir=data(tmp_path, SUMS), **same | {"shots": 2})
