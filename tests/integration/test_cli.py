"""The command ``rlkit`` in processes of its own: real notebooks through papermill, and a real cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

import rlkit as rl

RESULT = "import rlkit as rl, sys\nrl.headless.result({'sum': a + b, 'name': name, 'python': sys.executable})"


def notebook(path: Path, *cells: str) -> Path:
    """The first cell is tagged as parameters."""
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    made.cells.insert(1, nbformat.v4.new_markdown_cell("# A story"))
    made.cells[0].metadata["tags"] = ["parameters"]
    nbformat.write(made, path)
    return path


def rlkit(*args: object, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlkit.cli", *map(str, args)]
    return subprocess.run(command, cwd=cwd, env=os.environ | (env or {}), capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture
def adding(tmp_path):
    return notebook(tmp_path / "adding.ipynb", "a, b = 1, 2.5\nname = 'x'", "print('working on it')", RESULT)


def test_a_run_prints_its_result_as_the_last_line(adding, tmp_path):
    before = adding.read_bytes()
    # A kernel named "python3" that is registered elsewhere must not be used: this one could not even start.
    other = tmp_path / "jupyter" / "kernels" / "python3"
    other.mkdir(parents=True)
    (other / "kernel.json").write_text(json.dumps({"argv": ["/nowhere/python"], "display_name": "Python 3", "language": "python"}))
    done = rlkit("run", adding, "-p", "a=4", "-p", "name=7", cwd=tmp_path, env={"JUPYTER_PATH": str(tmp_path / "jupyter")})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"sum": 6.5, "name": "7", "python": sys.executable}
    assert "[ 3/4]" in done.stderr  # three code cells and the injected parameters
    assert "working on it" in done.stderr
    assert adding.read_bytes() == before
    executed = list((tmp_path / "runs").glob("adding-*.ipynb"))
    assert len(executed) == 1
    assert "working on it" in executed[0].read_text()


def test_quiet_output_and_cwd(adding, tmp_path):
    source = "import os, rlkit.headless as h\nprint('noise')\nos.write(2, b'native noise')\nh.result({'cwd': os.getcwd()})"
    notebook(adding, "name = 'x'", source)
    work = tmp_path / "work"
    work.mkdir()
    done = rlkit("run", adding, "-q", "-o", "out/{done}.ipynb", "--cwd", work, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {"cwd": str(work)}
    assert (tmp_path / "out" / "{done}.ipynb").is_file()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nme=x", "has no parameter 'nme', did you mean 'name'? It has: a, b, name."),
        ("a=many", "Parameter 'a' is 'many'; it must be a int, like its default 1."),
        ("a", "-p 'a' is not KEY=VALUE."),
    ],
)
def test_wrong_parameters_are_refused_before_anything_runs(adding, tmp_path, given, message):
    done = rlkit("run", adding, "-p", given, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_failing_cell_ends_it_with_status_1_and_a_short_message(tmp_path):
    path = notebook(
        tmp_path / "bad.ipynb", "n = 1", "def f(x):\n    return rl.SampleSpec(n=x)\n\nimport rlkit as rl\nf(0)", "print('never')"
    )
    done = rlkit("run", path, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    told = done.stderr[done.stderr.index("rlkit: ") :]
    assert told.startswith("rlkit: Cell In[2] of ")
    assert "failed: ConfigError: SampleSpec.n is 0; it must be a whole number of at least 1." in told
    assert "line 2: return rl.SampleSpec(n=x)" in told
    assert len(told.splitlines()) <= 5
    assert "never" not in done.stderr
    executed = nbformat.read(next((tmp_path / "runs").glob("bad-*.ipynb")), as_version=4)
    assert any(out.output_type == "error" for cell in executed.cells for out in cell.get("outputs", ()))


def test_a_kernel_that_dies_is_said_to_have_died(tmp_path):
    path = notebook(tmp_path / "die.ipynb", "n = 1", "import os\nos._exit(3)")
    done = rlkit("run", path, cwd=tmp_path)
    assert done.returncode == 1
    assert "The kernel of" in done.stderr
    assert "died in code cell 2 of 2" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_reaches_the_cell_and_ends_the_kernel(tmp_path, number):
    """The cell gets a KeyboardInterrupt, as from the stop button. Even when it swallows that, no later cell runs."""
    source = (
        "import os, time\nopen('pid', 'w').write(str(os.getpid()))\n"
        "try:\n    time.sleep(120)\nexcept KeyboardInterrupt:\n    open('interrupted', 'w').close()"
    )
    path = notebook(tmp_path / "slow.ipynb", "n = 1", source, "open('later', 'w').close()")
    process = subprocess.Popen([sys.executable, "-m", "rlkit.cli", "run", str(path)], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    time.sleep(0.5)
    process.send_signal(number)
    _out, told = process.communicate(timeout=90)
    assert process.returncode == 130
    assert "Traceback" not in told
    assert (tmp_path / "interrupted").exists()
    assert not (tmp_path / "later").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_version_names_what_matters(tmp_path):
    done = rlkit("version", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith(f"rlkit-lab {rl.__version__}, ray 2.60.")
    assert "vllm" in done.stdout


def test_ps_lists_runs_attach_finds_one_and_kill_ends_it(local_cluster, tmp_path):
    cluster = local_cluster(storage=str(tmp_path / "runs"))
    run = rl.Run("cli-listed", cluster, seed=3)
    other = rl.Run("cli-other", cluster, seed=0)
    listed = rlkit("ps", cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    header, *rows = listed.stdout.splitlines()
    assert header.split() == ["CLUSTER", "RUN", "STEPS", "AGE", "STATE", "ACTORS"]
    row = next(row for row in rows if "cli-listed" in row)
    assert row.split()[:3] == [cluster.spec.name, "cli-listed", "0"]
    assert f"driven by process {os.getpid()}" in row
    assert row.endswith("recorder")

    attach = "import rlkit as rl; run = rl.attach('cli-listed'); print(run.name, run.seed, run.folder)"
    attached = subprocess.run([sys.executable, "-c", attach], cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=True)
    assert attached.stdout.split() == ["cli-listed", "3", str(tmp_path / "runs" / "cli-listed")]
    absent = subprocess.run([sys.executable, "-c", "import rlkit; rlkit.attach('nobody')"], cwd=tmp_path, capture_output=True, text=True)
    assert "No run 'nobody' is alive on a local cluster (running: tests)" in absent.stderr

    wrong = rlkit("kill", "cli-listd", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "No run 'cli-listd' is alive, did you mean 'cli-listed'? Alive: " in wrong.stderr

    killed = rlkit("kill", "cli-listed", cwd=tmp_path)
    assert killed.returncode == 0, killed.stderr
    assert killed.stdout == f"ended cli-listed on {cluster.spec.name}: recorder\n"
    assert "cli-listed" not in cluster.ps()
    assert "cli-other" in cluster.ps()
    assert (tmp_path / "runs" / "cli-listed" / "events.jsonl").is_file()
    other.close()
    del run


def test_what_is_not_there_is_said(local_cluster, tmp_path):
    nothing = {"RLKIT_HOME": str(tmp_path / "home")}
    assert rlkit("ps", cwd=tmp_path, env=nothing).stdout == "No run lives on a local cluster.\n"
    assert rlkit("kill", "--all", cwd=tmp_path, env=nothing).stdout == "No run is alive.\n"
    assert rlkit("down", cwd=tmp_path, env=nothing).stdout == "No local cluster runs.\n"
    dead = rlkit("ps", "--address", "127.0.0.1:1", cwd=tmp_path, env=nothing)
    assert dead.returncode == 2
    assert "127.0.0.1:1" in dead.stderr
    assert "Traceback" not in dead.stderr
    config = tmp_path / "mine.yaml"
    config.write_text("name: mine\n")
    absent = rlkit("ps", "--config", config, cwd=tmp_path)
    assert absent.returncode == 2
    assert "No local cluster 'mine' runs (running: tests)." in absent.stderr


def test_down_ends_a_local_cluster_that_a_kernel_left(tmp_path):
    own = {"RLKIT_HOME": str(tmp_path / "home")}
    start = "import rlkit as rl; rl.connect(rl.ClusterSpec(name='left', num_cpus=1, dashboard=False, object_store_gib=0.1))"
    subprocess.run([sys.executable, "-c", start], env=os.environ | own, check=True, timeout=200)
    assert rlkit("down", "lefd", cwd=tmp_path, env=own).stdout == "No local cluster 'lefd' runs (running: left).\n"
    assert rlkit("down", cwd=tmp_path, env=own).stdout == "ended the local cluster left\n"
    assert rlkit("down", cwd=tmp_path, env=own).stdout == "No local cluster runs.\n"
