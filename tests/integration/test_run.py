"""A run with real engines and ranks on the bundled tiny model: log, samples, resume, and every way to call it wrongly."""

import asyncio
import json
import subprocess
import sys
import time
import types

import numpy as np
import pytest
import ray

import rlkit as rl
from rlkit import actors
from rlkit.config import as_plain
from rlkit.errors import (
    ActorDiedError,
    BatchError,
    CheckpointError,
    ConfigError,
    LearnerError,
    ResourceError,
    RlkitError,
    RunError,
    SpecChangedError,
    SyncError,
)


@pytest.fixture(scope="module")
def cluster(local_cluster, tmp_path_factory):
    return local_cluster(storage=str(tmp_path_factory.mktemp("runs")))


@pytest.fixture(scope="module")
def run(cluster):
    made = rl.Run("house", cluster, seed=5)
    made.sampler("tiny")
    made.learner("tiny", lr=1e-3)
    yield made
    made.close()


def one_step(run, tasks, step=None):
    sampler, learner = run.sampler(), run.learner()
    rollouts = sampler.generate(tasks.batch(2), n=4, max_tokens=16, progress=False)
    scored = rl.score(rollouts, rl.rewards.Math())
    stats = learner.update(rl.advantages(scored, "grpo"))
    sampler.sync(learner)
    if step is not None:
        run.log(step, scored, stats)
    return scored, stats


def test_steps_log_and_metrics(run):
    tasks = rl.load_tasks("arithmetic")
    done = []
    for step in run.steps(2, progress=False):
        one_step(run, tasks, step)
        done.append(step)
    assert done == [0, 1]
    frame = run.metrics
    assert list(frame.index) == [0, 1]
    assert list(frame["policy_version"]) == [1, 2]
    for name in ("reward/mean", "length/mean", "policy/logprob_gap", "policy/entropy", "time/rollout", "time/update", "time/sync"):
        assert np.isfinite(frame[name]).all(), name
    assert (frame["policy/logprob_gap"] < 1e-3).all()
    samples = run.samples(1)
    assert len(samples) == 8
    assert set(samples["verdict"]) <= {"correct", "wrong", "unparsed", "timeout"}
    assert (samples["n_tokens"] == samples["tokens"].map(len)).all()


def test_a_finished_run_yields_nothing_more(run):
    assert list(run.steps(run.committed + 1, progress=False)) == []


def test_a_loop_may_be_async(run):
    tasks = rl.load_tasks("arithmetic")

    async def loop():
        seen = []
        async for step in run.steps(run.committed + 2, progress=False):
            one_step(run, tasks, step)
            seen.append(step)
        return seen

    before = run.committed
    assert asyncio.run(loop()) == [before + 1]


def test_a_loop_without_log_still_counts_its_steps(run):
    tasks = rl.load_tasks("arithmetic")
    before = run.committed
    for _ in run.steps(before + 2, progress=False):
        one_step(run, tasks)
    assert run.committed == before + 1
    assert np.isfinite(run.metrics["time/update"].iloc[-1])


def test_logging_twice_or_out_of_order_is_refused(run):
    with pytest.raises(RunError, match="logged already"):
        run.log(run.committed)
    with pytest.raises(RunError, match="out of order"):
        run.log(run.committed + 5)


def test_values_of_the_wrong_stage_are_refused(run):
    rollouts = run.sampler().generate(rl.load_tasks("arithmetic").take(1), n=2, max_tokens=4, progress=False)
    with pytest.raises(BatchError, match=r"rlkit.score"):
        run.log(run.committed + 1, rollouts)
    with pytest.raises(BatchError, match="advantages"):
        run.learner().update(rollouts)
    with pytest.raises(BatchError):
        run.learner().update(rl.score(rollouts, lambda prompt, sample: 1.0))


def test_the_same_cell_twice_gives_the_same_parts(run, cluster):
    assert rl.Run("house", cluster, seed=5) is run
    there = run.ps()
    run.sampler("tiny")
    run.learner("tiny", lr=1e-3)
    assert run.ps() == there
    assert run.learner().version == run.metrics["policy_version"].iloc[-1]


def test_other_settings_for_a_living_part_are_refused_by_name(run):
    with pytest.raises(SpecChangedError, match="lr"):
        run.learner("tiny", lr=5e-3)
    with pytest.raises(ConfigError, match="zero_stage"):
        run.learner("tiny", zero_stag=3)


def test_another_number_of_engines_is_refused_at_once(run):
    start = time.monotonic()
    with pytest.raises(SpecChangedError, match="engines"):
        run.sampler("tiny", engines=99)
    assert time.monotonic() - start < 8  # a seat is waited for ten seconds


def test_a_part_without_a_seat_is_refused_and_names_who_sits_there(run, cluster):
    other = rl.Run("no-room", cluster)
    with pytest.raises(ResourceError, match=r"asks for 1 x 99 CPUs.*Other living runs: .*house"):
        other.sampler("tiny", cpus_per_engine=99)
    assert other.ps() == ["recorder"]
    other.close()


@pytest.mark.parametrize(("part", "start"), [("sampler", "rlkit.sampler.Sampler.start"), ("reference", "rlkit.reference.Reference.start")])
def test_a_part_that_is_started_again_may_take_the_seats_that_it_had(cluster, monkeypatch, part, start):
    class Sitter:  # here, so that it travels by value
        pass

    again = rl.Run(f"again-{part}", cluster)
    name, setting = {"sampler": ("engine-0", "cpus_per_engine"), "reference": ("reference-0", "cpus_per_actor")}[part]
    ray.get(actors.spawn(Sitter, name, again.namespace, cpus=10).__ray_ready__.remote())  # of 16
    started = types.SimpleNamespace(engines=[])
    monkeypatch.setattr(start, lambda *_, **__: started)
    assert getattr(again, part)("tiny", restart=True, **{setting: 10}) is started
    assert [name for name in again.ps() if not name.startswith("monitor-")] == ["recorder"]
    again.close()


def test_a_new_learner_that_could_not_be_restored_is_not_found_again(cluster, monkeypatch):
    closed = []

    def restore():
        raise CheckpointError("of another model")

    again = rl.Run("unrestored", cluster)
    with again._making("learner", "tiny", rl.TrainSpec()):
        pass
    monkeypatch.setattr("rlkit.learner.Learner.start", lambda *_: types.SimpleNamespace(close=lambda: closed.append(True)))
    monkeypatch.setattr(again, "restore", restore)
    with pytest.raises(CheckpointError, match="of another model"):
        again.learner("tiny")
    assert closed == [True]
    assert again.part("learner") is None
    again.close()


def test_another_seed_is_refused(run, cluster):
    with pytest.raises(SpecChangedError, match="seed 5"):
        rl.Run("house", cluster, seed=6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cluster": None}, "the cluster is None; it must be what rlkit.connect"),
        ({"cluster": "laptop"}, "the cluster is 'laptop'; it must be what rlkit.connect"),
        ({"seed": "x"}, "seed='x'.: it must be a whole number of at least 0"),
        ({"checkpoint_every": -1}, "checkpoint_every=-1.: it must be a whole number of at least 0"),
        ({"keep": 0}, "keep=0.: it must be a whole number of at least 1"),
    ],
)
def test_a_run_with_wrong_arguments_is_refused(cluster, change, message):
    with pytest.raises(ConfigError, match=message):
        rl.Run("refused", **({"cluster": cluster} | change))
    assert "refused" not in cluster.ps()


def test_sync_without_a_learner_is_refused(run):
    with pytest.raises(SyncError, match="it was given None"):
        run.sampler().sync(None)


def test_a_reference_without_a_seat_is_refused_and_one_with_a_seat_is_found_again(run):
    with pytest.raises(ResourceError, match=r"asks for 99 x 0\.5 CPUs"):
        run.reference(actors=99, cpus_per_actor=0.5)
    made = run.reference(cpus_per_actor=0.5)
    assert made.version.startswith("tiny@")
    assert run.reference().info[0]["pid"] == made.info[0]["pid"]
    made.close()


@pytest.mark.slow
def test_steps_before_there_was_a_learner_are_kept(cluster):
    alone = rl.Run("only-rollouts", cluster)
    alone.sampler("tiny", cpus_per_engine=0.1)
    for step in alone.steps(2, progress=False):
        rollouts = alone.sampler().generate(rl.load_tasks("arithmetic").take(2), n=2, max_tokens=8, progress=False)
        alone.log(step, rl.score(rollouts, rl.rewards.Math()))
    alone.learner("tiny", cpus_per_rank=0.1)
    assert alone.committed == 1
    assert list(alone.steps(3, progress=False)) == [2]
    alone.close()


def test_attach_to_nothing_names_what_is_alive(run, cluster):
    with pytest.raises(RunError, match="house"):
        rl.attach("no-such-run", cluster)


def test_a_batch_that_is_too_old_is_refused(run):
    sampler, learner = run.sampler(), run.learner()
    scored = rl.score(sampler.generate(rl.load_tasks("arithmetic").take(2), n=4, max_tokens=8, progress=False), lambda p, s: len(s.text))
    batch = rl.advantages(scored, "grpo")
    version = learner.version
    learner.update(batch)
    with pytest.raises(BatchError, match="max_lag"):
        learner.update(batch)
    assert learner.version == version + 1
    sampler.sync(learner)


SECOND = """
import json, os, sys
import rlkit as rl
options = json.loads(sys.argv[1])
cluster = rl.connect(rl.ClusterSpec.make(options["spec"]))
run = rl.attach("house", cluster)
out = {"rows": len(run.metrics), "errors": []}
changes = (
    lambda: next(iter(run.steps(99, progress=False))),
    lambda: run.learner(),
    lambda: rl.Run("house", cluster, seed=5, resume=False),
)
for change in changes:
    try:
        change()
    except rl.errors.RunBusyError as error:
        out["errors"].append(str(error))
print(json.dumps(out))
"""


def test_updates_by_hand_between_two_loops_are_kept(run):
    tasks = rl.load_tasks("arithmetic")
    before = run.committed
    for _ in run.steps(before + 2, progress=False):
        break  # the step was begun, and nothing of it applied
    one_step(run, tasks)
    version = run.learner().version
    done = []
    for step in run.steps(before + 2, progress=False):
        one_step(run, tasks, step)
        done.append(step)
    assert done == [before + 1]
    assert run.learner().version == version + 1


def test_an_unfinished_step_without_a_checkpoint_throws_nothing_away(run):
    tasks = rl.load_tasks("arithmetic")
    before = run.committed
    for _ in run.steps(before + 2, progress=False):
        one_step(run, tasks)
        one_step(run, tasks)
        break
    version = run.learner().version
    with pytest.raises(RunError, match=rf"no checkpoint .*run.log\({before + 1}\)"):
        list(run.steps(before + 2, progress=False))
    assert (run.committed, run.learner().version) == (before, version)
    run.log(before + 1)
    for step in run.steps(before + 3, progress=False):
        one_step(run, tasks, step)
        one_step(run, tasks)  # as many updates as the step before, for what comes after
    assert run.committed == before + 2
    with pytest.raises(RunError, match="whole number"):
        run.steps("3")


def test_after_a_rank_or_the_recorder_died_the_same_cell_starts_it_again(cluster):
    tasks = rl.load_tasks("arithmetic")
    run = rl.Run("deaths", cluster, checkpoint_every=1)
    run.sampler("tiny", engine="hf")
    run.learner("tiny", lr=1e-3)
    for step in run.steps(1, progress=False):
        one_step(run, tasks, step)
    for name in ("rank-0", "learner"):
        learner = run.learner()
        actors.end([actors.find(name, run.namespace)])
        with pytest.raises(RlkitError):
            learner.publish_weights()
        if name == "rank-0":
            with pytest.raises(LearnerError, match=r"run.learner\(...\) cell again"):
                learner.publish_weights()
        assert run.learner("tiny", lr=1e-3).version == 1  # from the checkpoint
    actors.end([actors.find("recorder", run.namespace)])
    with pytest.raises(ActorDiedError, match=r"rlkit.Run\(...\) cell again"):
        run.note("lost")
    run = rl.Run("deaths", cluster, checkpoint_every=1)
    for step in run.steps(2, progress=False):
        one_step(run, tasks, step)
    assert list(run.metrics["policy_version"]) == [1, 2]
    run.close()


def test_a_second_kernel_can_read_but_not_drive(run, cluster):
    run.note("a change, so that this kernel holds the lease")
    spec = as_plain(cluster.spec)
    done = subprocess.run([sys.executable, "-c", SECOND, json.dumps({"spec": spec})], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    out = json.loads(done.stdout.strip().splitlines()[-1])
    assert out["rows"] == len(run.metrics)
    assert len(out["errors"]) == 3
    assert all("is driven by process" in e for e in out["errors"])


def test_close_and_resume_from_the_newest_whole_checkpoint(cluster, capsys):
    tasks = rl.load_tasks("arithmetic")
    run = rl.Run("resumed", cluster, seed=1, checkpoint_every=1, keep=2)
    run.sampler("tiny")
    run.learner("tiny", lr=1e-3)
    for step in run.steps(3, progress=False):
        one_step(run, tasks, step)
    folder = run.folder
    assert [p.name for p in sorted((folder / "checkpoints").iterdir())] == ["step-000001", "step-000002"]
    run.close()
    assert rl.Run("resumed", cluster, seed=1).ps() == ["recorder"]

    # The newest one is cut short: it is named and the one before it is taken.
    newest = max((folder / "checkpoints" / "step-000002").rglob("*.safetensors"), key=lambda p: p.stat().st_size)
    newest.write_bytes(newest.read_bytes()[:-100])
    run = rl.Run("resumed", cluster, seed=1, checkpoint_every=1, keep=2)
    run.sampler("tiny")
    learner = run.learner("tiny", lr=1e-3)
    assert "step-000002 is damaged" in capsys.readouterr().out
    assert learner.version == 2
    assert run.sampler().version == 2
    assert run.committed == 1
    again = rl.load_tasks("arithmetic")
    for step in run.steps(3, progress=False):
        scored, _ = one_step(run, again, step)
    assert list(run.metrics["policy_version"]) == [1, 2, 3]
    # The data went on where it was: step 2 drew the fifth and sixth prompt of the seeded order.
    order = rl.load_tasks("arithmetic")
    drawn = [p.id for _ in range(3) for p in order.batch(2)]
    assert list(scored.rollouts.prompt_ids) == drawn[4:]
    run.close()


def test_resume_false_sets_the_old_run_aside(cluster):
    run = rl.Run("aside", cluster)
    run.note("first")
    folder = run.folder
    run = rl.Run("aside", cluster, resume=False, seed=9)
    assert [e["text"] for e in run.events if e["kind"] == "note"] == []
    kept = [p for p in folder.parent.iterdir() if p.name.startswith("aside.")]
    assert len(kept) == 1
    assert "first" in (kept[0] / "events.jsonl").read_text()
    run.close()


def test_no_actor_is_left_after_close(cluster):
    run = rl.Run("gone", cluster)
    run.close()
    assert run.ps() == []


def test_a_step_whose_update_failed_half_way_goes_back_to_the_checkpoint(cluster, capsys):
    run = rl.Run("torn", cluster, seed=1, checkpoint_every=1)
    tasks = rl.load_tasks("arithmetic")
    sampler, learner = run.sampler("tiny", engine="hf"), run.learner("tiny", lr=1e-3, minibatches=2)
    calls = [0]

    def fails_at_the_second(t):
        calls[0] += 1
        if calls[0] == 2:
            raise ValueError("half-way")
        return -t.advantages * t.logprobs, {}

    def step_of(loss):
        rollouts = sampler.generate(tasks.batch(2), n=4, max_tokens=16, progress=False)
        batch = rl.advantages(rl.score(rollouts, lambda prompt, sample: float(sample.index)), "grpo")
        learner.update(batch, loss=loss)
        sampler.sync(learner)

    for _ in run.steps(1, progress=False):
        step_of("ppo_clip")
    whole = learner.parameters()
    steps = iter(run.steps(2, progress=False))
    assert next(steps) == 1
    with pytest.raises(LearnerError, match=r"half-way(.|\n)*1 optimizer step of it had been applied"):
        step_of(fails_at_the_second)
    steps.close()
    assert (learner.state()["torn"], learner.version) == (1, 2)
    assert any((learner.parameters()[k] != v).any() for k, v in whole.items())
    for step in run.steps(2, progress=False):
        assert step == 1
        assert (learner.state()["torn"], learner.version) == (None, 1)
        found = learner.parameters()
        assert all((found[k] == v).all() for k, v in whole.items())
        step_of("ppo_clip")
    assert "an update applied in part; going back" in capsys.readouterr().out
    run.close()
