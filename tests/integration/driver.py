"""A notebook's loop as a script, for tests that kill or interrupt it. Usage: driver.py '{"name": ..., "home": ..., ...}'

It trains the bundled tiny model for a few steps through real vLLM and DeepSpeed actors and prints one JSON object as its last line.
With ``die`` it kills itself (SIGKILL) inside that phase of step 1; with ``interrupt`` it interrupts itself there (SIGINT, what the stop
button of JupyterLab sends) and runs the loop's cell again.
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
    """A run that gets a signal ``delay`` seconds into one phase of step 1."""

    trap: tuple[str, int] | None = None

    @contextmanager
    def phase(self, name):
        with super().phase(name) as facts:
            if self.trap is not None and self.trap[0] == name and self.step == 1:
                sig, self.trap = self.trap[1], None
                threading.Timer(options.get("delay", 0.0), os.kill, (os.getpid(), sig)).start()
                if options.get("delay", 0.0) == 0.0:
                    time.sleep(0.05)
            yield facts


def loop(run, tasks, sampler, learner):
    for step in run.steps(options["steps"], progress=False):
        rollouts = sampler.generate(tasks.batch(4), n=4, max_tokens=40, progress=False)
        scored = rl.score(rollouts, rl.rewards.Math())
        stats = learner.update(rl.advantages(scored, "grpo"), loss="ppo_clip")
        sampler.sync(learner)
        run.log(step, scored, stats)


def main():
    cluster = rl.connect(rl.ClusterSpec.make(options["cluster"]))
    if options.get("attach"):
        run = rl.attach(options["name"], cluster)
        sampler, learner = run.sampler(), run.learner()
    else:
        run = Trapped(options["name"], cluster, seed=3)
        sampler = run.sampler("tiny")
        learner = run.learner("tiny", lr=1e-3, **options.get("learner", {}))
    run.checkpoint_every = options.get("checkpoint_every", 1)
    tasks = rl.load_tasks("arithmetic")
    if options.get("die"):
        run.trap = (options["die"], signal.SIGKILL)
    interrupted = 0
    if options.get("interrupt"):
        run.trap = (options["interrupt"], signal.SIGINT)
        try:
            loop(run, tasks, sampler, learner)
        except KeyboardInterrupt:
            interrupted = 1
    loop(run, tasks, sampler, learner)
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
