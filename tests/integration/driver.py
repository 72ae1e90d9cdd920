"""A notebook's loop as a script, for tests that kill or interrupt it. Usage: driver.py '{"name": ..., "home": ..., ...}'

It trains the bundled tiny model for a few steps through real vLLM and DeepSpeed actors and prints one JSON object as its last line.
``traps`` maps a step to a phase and a moment ("during", "after") at which the process gets ``signal``: "kill" is kill -9, "interrupt" is
what the stop button of JupyterLab sends, after which the loop's cell is run again.
"""

import json
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager

options = json.loads(sys.argv[1])
os.environ["RLKIT_HOME"] = options["home"]

import rlkit as rl  # noqa: E402  (after RLKIT_HOME is set)


class Trapped(rl.Run):
    """A run whose phases spring the traps."""

    traps: dict[int, list[str]]

    @contextmanager
    def phase(self, name):
        trap = self.traps.get(self.step)
        mine = trap is not None and trap[0] == name
        if mine:
            del self.traps[self.step]
        with super().phase(name) as facts:
            if mine and trap[1] == "during":
                threading.Timer(0.02, spring).start()
            yield facts
            if mine and trap[1] == "after":  # the work is done, and nobody has been told
                spring()
                time.sleep(1)


def spring():
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "interrupt": signal.SIGINT}[options["signal"]])


def loop(run, tasks, sampler, learner):
    for step in run.steps(options["steps"], progress=False):
        rollouts = sampler.generate(tasks.batch(4), n=4, max_tokens=40, progress=False)
        scored = rl.score(rollouts, rl.rewards.Math())
        stats = learner.update(rl.advantages(scored, "grpo"), loss="ppo_clip")
        sampler.sync(learner)
        run.log(step, scored, stats)


def main():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a process that a shell started in the background
    cluster = rl.connect(rl.ClusterSpec.make(options["cluster"]))
    if options.get("attach"):
        run = rl.attach(options["name"], cluster)
        sampler, learner = run.sampler(), run.learner()
    else:
        run = rl.Run(options["name"], cluster, seed=3)
        sampler = run.sampler("tiny")
        learner = run.learner("tiny", lr=1e-3, **options.get("learner", {}))
    run.checkpoint_every = options.get("checkpoint_every", 1)
    tasks = rl.load_tasks("arithmetic")
    run.__class__, run.traps = Trapped, {int(k): v for k, v in options.get("traps", {}).items()}
    interrupted = 0
    while True:
        try:
            loop(run, tasks, sampler, learner)
            break
        except KeyboardInterrupt:
            interrupted += 1
    metrics = run.metrics
    out = {
        "steps": [int(s) for s in metrics.index],
        "versions": [int(v) for v in metrics["policy_version"]],
        "interrupted": interrupted,
        "gap": float(metrics["policy/logprob_gap"].max()),
        "reward": [round(float(r), 6) for r in metrics.get("reward/mean", [])],
        "final": str(run.folder / "final"),
        "engine_nodes": [i["node"] for i in sampler.info],
        "rank_nodes": learner.info["nodes"],
        "alive": run.ps(),
    }
    learner.save_hf(out["final"])
    if options.get("close", True):
        run.close()
    print(json.dumps(out))


main()
