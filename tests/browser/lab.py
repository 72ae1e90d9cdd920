"""JupyterLab as a process of its own for the browser tests, on loopback with a token, ended with everything that it started."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import nbformat
import psutil

ROOT = Path(__file__).resolve().parents[2]
START_S = 120
END_S = 30


class Lab:
    """One JupyterLab server whose files, settings and run-time files all lie in ``home``.

    Kernels get ``RLKIT_HOME`` in there too, so that a Ray head that a notebook starts is found by `end_clusters` and is nobody else's.
    """

    def __init__(self, home: Path) -> None:
        self.home, self.token = home, secrets.token_hex(16)
        self.notebooks = home / "notebooks"
        self.log = home / "jupyterlab.log"
        self.rlkit_home = home / "rlkit"
        self.notebooks.mkdir(parents=True)
        settings = home / "jupyter" / "settings" / "@jupyterlab" / "apputils-extension"
        settings.mkdir(parents=True)
        (settings / "notification.jupyterlab-settings").write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False}))
        self.process = self._start()
        self.url = self._wait()

    def _start(self) -> subprocess.Popen[bytes]:
        left_out = ("RAY_", "RLKIT_", "JUPYTER", "IPYTHON", "PYTEST")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
        environment |= {f"JUPYTER_{what}_DIR": str(self.home / "jupyter" / what.lower()) for what in ("CONFIG", "DATA", "RUNTIME")}
        environment |= {f"JUPYTERLAB_{what}_DIR": str(self.home / "jupyter" / what.lower()) for what in ("SETTINGS", "WORKSPACES")}
        environment |= {"IPYTHONDIR": str(self.home / "ipython"), "RLKIT_HOME": str(self.rlkit_home), "JUPYTER_TOKEN": self.token}
        # A kernel is started as "python" of the path, which is not this venv's when the tests were started by its full name.
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", "--port=0"]
        command += [f"--ServerApp.root_dir={self.notebooks}", "--LabApp.expose_app_in_browser=True", "--allow-root"]
        with self.log.open("wb") as out:
            return subprocess.Popen(
                command, cwd=self.notebooks, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def _wait(self) -> str:
        """The server's address, once it answers."""
        info = self.home / "jupyter" / "runtime" / f"jpserver-{self.process.pid}.json"
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"JupyterLab ended at its start:\n{self.log.read_text()[-3000:]}"
            with suppress(OSError, ValueError):  # not written yet, in part, or not listening yet
                url = str(json.loads(info.read_text())["url"])
                self.call("api/status", url=url)
                assert url.startswith("http://127.0.0.1:"), url
                return url
            time.sleep(0.2)
        raise AssertionError(f"JupyterLab did not answer within {START_S} s:\n{self.log.read_text()[-3000:]}")

    def call(self, path: str, *, method: str = "GET", url: str | None = None) -> Any:
        """A call of the server's REST interface."""
        request = urllib.request.Request(f"{url or self.url}{path}", method=method, headers={"Authorization": f"token {self.token}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or b"null")

    def kernels(self) -> list[dict[str, Any]]:
        return list(self.call("api/kernels"))

    def copy(self, source: Path, more: Sequence[str] = (), **parameters: Any) -> Path:
        """A notebook among the server's files, without outputs, with these parameters set after its own, and ``more`` cells at its end."""
        notebook = nbformat.read(source, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
                if "parameters" in cell.metadata.get("tags", ()):
                    cell.source += "".join(f"\n{key} = {value!r}" for key, value in parameters.items())
        notebook.cells += [nbformat.v4.new_code_cell(code) for code in more]
        target = self.notebooks / source.name
        nbformat.write(notebook, target)
        return target

    def new(self, name: str, *cells: str) -> Path:
        """A notebook of these code cells among the server's files."""
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}  # else JupyterLab asks which
        target = self.notebooks / name
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in cells], metadata=kernel), target)
        return target

    def end_sessions(self) -> None:
        """Shut every kernel down, as its menu entry does."""
        for session in self.call("api/sessions"):
            self.call(f"api/sessions/{session['id']}", method="DELETE")

    def end(self) -> None:
        """End the server and its kernels; whatever does not go when asked is killed."""
        family = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(END_S)
        _, left = psutil.wait_procs([p for p in family if _is_kernel(p)], timeout=END_S)
        for process in left:
            process.kill()

    def end_clusters(self) -> None:
        """Stop the Ray heads that notebooks started."""
        code = "from rlkit import localhead\nfor head in localhead.living(): localhead.stop(head.name)"
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "RLKIT_"))} | {"RLKIT_HOME": str(self.rlkit_home)}
        subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)


def _is_kernel(process: psutil.Process) -> bool:
    """Not a Ray head: that one is stopped as rlkit stops it."""
    with suppress(psutil.NoSuchProcess):
        return "ipykernel_launcher" in " ".join(process.cmdline())
    return False
