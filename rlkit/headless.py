"""Notebooks without a browser: parameters in, cells run by papermill, one JSON object out.

A notebook that can be run this way has a cell tagged ``parameters`` with plain assignments, and says what came out of it with
`result` in its last cell::

    rl.headless.result({"task": task, "accuracy_after": after})

`run_notebook` finds that object in the executed notebook; ``rlkit run`` prints it as its last line. In JupyterLab `result` only shows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rlkit.config import as_plain
from rlkit.errors import ConfigError, NotebookError
from rlkit.parameters import check_parameters

RESULT_MIME = "application/vnd.rlkit.result+json"
START_TIMEOUT_S = 120
SHUTDOWN_WAIT_S = 20.0
BEAT_S = 20.0  # a long cell is said to be running this often


@dataclass(frozen=True)
class RunResult:
    """What one headless run gave."""

    output: Path  # the executed notebook
    parameters: Mapping[str, Any]  # those that were given, converted
    result: dict[str, Any] | None  # what the notebook handed to `result` last
    seconds: float


def result(values: Mapping[str, Any]) -> None:
    """Hand a notebook's result to whoever runs it headless, and show it.

    NaN and infinity become null, NumPy numbers and arrays become plain ones. Outside a kernel it is printed as one line.

    Raises:
        ConfigError: a value that JSON cannot hold; names its key.
    """
    plain = {str(key): _json_value(value, str(key)) for key, value in values.items()}
    from IPython import get_ipython
    from IPython.display import display

    if get_ipython() is None:
        print(json.dumps(plain))
    else:
        display({RESULT_MIME: plain, "text/plain": json.dumps(plain, indent=2)}, raw=True)


def _json_value(value: Any, where: str) -> Any:
    value = as_plain(value)
    if hasattr(value, "tolist"):  # NumPy scalars and arrays
        value = value.tolist()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(k): _json_value(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, list):
        return [_json_value(v, f"{where}[{i}]") for i, v in enumerate(value)]
    raise ConfigError(f"The result's {where!r} is a {type(value).__name__}; it must be a number, text, list or mapping.")


def run_notebook(
    path: str | Path,
    parameters: Mapping[str, Any] | None = None,
    output: str | Path | None = None,
    *,
    cwd: str | Path | None = None,
    progress: TextIO | None = None,
    echo: bool = True,
) -> RunResult:
    """Run every cell of a notebook in a fresh kernel of this Python.

    Args:
        path: the notebook; it is not changed.
        parameters: replace the defaults of the cell tagged ``parameters``.
        output: where the executed notebook goes, cell by cell; None: ``runs/<name>-<time>.ipynb``.
        cwd: folder in which the kernel works; None: the current one.
        progress: takes a line a cell with the time so far (``sys.stderr``, say).
        echo: also write there what the cells print.

    Interrupting it interrupts the running cell, as the stop button does, and then ends the kernel.

    Raises:
        ConfigError: no such notebook, an unknown parameter, a value of the wrong type.
        NotebookError: a cell failed, or the kernel died; the notebook up to there is in ``output``.
        KeyboardInterrupt: it was interrupted, or told to end (SIGTERM).
    """
    with _without_uri_grammar():
        import nbformat

    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"No notebook at {path} (looked in {Path.cwd()}).")
    try:
        notebook = nbformat.read(path, as_version=4)
    except (nbformat.reader.NotJSONError, nbformat.ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a notebook: {str(error).splitlines()[0][:200]}") from error
    given = check_parameters(notebook, parameters or {}, path)
    output = Path(output) if output is not None else Path("runs") / f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}.ipynb"
    if output.resolve() == path.resolve():
        raise ConfigError(f"The executed notebook would overwrite {path}; give another output.")
    output.parent.mkdir(parents=True, exist_ok=True)
    watch = _Watch(total=sum(c["cell_type"] == "code" for c in notebook.cells) + bool(given), progress=progress)
    with watch, tempfile.TemporaryDirectory(prefix="rlkit-") as sockets:  # this user's only: no port that others could reach
        executed = _execute(path, output.absolute(), given, cwd, watch, watch.kernel_class(sockets), progress if echo else None)
    seconds = time.monotonic() - watch.start
    watch.say(f"done in {seconds:.1f} s: {output}")
    return RunResult(output, given, _find_result(executed), seconds)


def _execute(
    path: Path, output: Path, given: Mapping[str, Any], cwd: str | Path | None, watch: _Watch, kernel_class: type, echo: TextIO | None
) -> Any:
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    logger = logging.getLogger("papermill")  # it warns of tuple assignments as unknown parameters; those were checked before
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    braces = str.maketrans({"{": "{{", "}": "}}"})  # papermill takes paths as format strings
    try:
        return papermill.execute_notebook(
            str(path.absolute()).translate(braces),
            str(output).translate(braces),
            parameters={name: list(value) if isinstance(value, tuple) else value for name, value in given.items()},
            kernel_name="python3",
            language="python",
            progress_bar=False,
            start_timeout=START_TIMEOUT_S,
            cwd=None if cwd is None else str(cwd),
            stdout_file=echo,
            stderr_file=echo,
            kernel_manager_class=kernel_class,
            on_cell_start=watch.cell_started,
            store_widget_state=False,  # a plotly figure would put megabytes of JavaScript into the notebook
        )
    except PapermillExecutionError as error:
        if watch.interrupted:
            raise KeyboardInterrupt from error
        raise NotebookError(_failure(error, path, output)) from error
    except DeadKernelError as error:
        if watch.interrupted:
            raise KeyboardInterrupt from error
        raise NotebookError(
            f"The kernel of {path} died{watch.where()}: out of memory, a crash in native code, or killed. "
            f"The notebook up to there: {output}"
        ) from error
    except RuntimeError as error:
        if watch.interrupted:
            raise KeyboardInterrupt from error
        if "didn't respond" not in str(error):
            raise
        raise NotebookError(f"The kernel for {path} did not answer within {START_TIMEOUT_S} s of its start.") from error
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _without_uri_grammar() -> Iterator[None]:
    """nbformat imports jsonschema, and that, where it is installed, a package which takes seconds to compile a grammar that is not used."""
    name = "rfc3987_syntax"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # an import of it now raises ImportError
    try:
        yield
    finally:
        del sys.modules[name]


@dataclass
class _Watch:
    """Follows one run: prints its progress, and turns signals into an interrupt of the cell."""

    total: int
    progress: TextIO | None
    start: float = field(default_factory=time.monotonic)
    cell: int = 0
    cell_start: float = 0.0
    interrupted: int = 0
    _tasks: list[Any] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> _Watch:
        threading.Thread(target=self._beat, name="rlkit-progress", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            now = time.monotonic()
            if self.cell and now - self.cell_start >= BEAT_S:
                self.say(f"[{self.cell:>2}/{self.total}] {now - self.start:7.1f} s  … {now - self.cell_start:.0f} s in this cell")

    def say(self, text: str) -> None:
        if self.progress is not None:
            print(text, file=self.progress, flush=True)

    def where(self) -> str:
        return f" in code cell {self.cell} of {self.total}" if self.cell else ""

    def cell_started(self, cell: Mapping[str, Any], cell_index: int) -> None:
        if self.interrupted:  # the cell before swallowed it
            from nbclient.exceptions import CellExecutionError

            raise CellExecutionError("", "KeyboardInterrupt", "")
        if cell["cell_type"] != "code":
            return
        self.cell += 1
        self.cell_start = time.monotonic()
        lines = [line.strip("# ").strip() for line in cell["source"].splitlines()]
        title = next((line for line in lines if line), "")
        self.say(f"[{self.cell:>2}/{self.total}] {time.monotonic() - self.start:7.1f} s  {title[:100]}")

    def kernel_class(self, sockets: str) -> type:
        """A kernel manager that starts this very Python, whatever kernel "python3" is registered elsewhere on the machine.

        It talks over socket files in the folder ``sockets``.
        """
        from jupyter_client.kernelspec import KernelSpec
        from jupyter_client.manager import AsyncKernelManager

        watch = self

        class ThisPython(AsyncKernelManager):
            transport = "ipc"
            ip = f"{sockets}/kernel"
            shutdown_wait_time = SHUTDOWN_WAIT_S  # an interrupted update is finished before the kernel goes

            @property
            def kernel_spec(self) -> Any:
                # At its end jupyter_client interrupts an idle kernel, which the kernel would report as an error of its own.
                quiet = "--IPKernelApp.log_level=50"
                argv = [sys.executable, "-m", "ipykernel_launcher", quiet, "-f", "{connection_file}"]
                return KernelSpec(argv=argv, display_name="Python 3", language="python")

            async def start_kernel(self, **kwargs: Any) -> Any:
                watch.catch_signals(self)
                # Widgets would be saved as views that nothing brings to life: pictures are what a reader of the notebook sees.
                kwargs["env"] = {**(kwargs.get("env") or os.environ), "RLKIT_WIDGETS": "0"}
                # What native code writes to the file descriptors comes as output of the cell. ipykernel writes a copy to the descriptors
                # that it was started with, as does ZeroMQ at the kernel's end: that copy goes nowhere, else all would be told twice.
                return await super().start_kernel(**kwargs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        return ThisPython

    def catch_signals(self, kernel: Any) -> None:
        """The first signal interrupts the cell, the second kills the kernel. Only the main thread can catch them."""
        loop = asyncio.get_running_loop()

        def on_signal() -> None:
            self.interrupted += 1
            if self.interrupted == 1:
                self.say("interrupting the cell; once more kills the kernel")
            stop: Callable[[], Any] = kernel.interrupt_kernel if self.interrupted == 1 else lambda: kernel.shutdown_kernel(now=True)
            self._tasks.append(asyncio.ensure_future(stop()))

        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                loop.add_signal_handler(number, on_signal)
            except (RuntimeError, ValueError):
                return


def _find_result(notebook: Any) -> dict[str, Any] | None:
    found = [out["data"][RESULT_MIME] for cell in notebook.cells for out in cell.get("outputs", ()) if RESULT_MIME in out.get("data", {})]
    return dict(found[-1]) if found else None


def _failure(error: Any, path: Path, output: Path) -> str:
    """What failed and where, in a few lines; the whole traceback is in the executed notebook."""
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", "\n".join(error.traceback))
    head = f"{error.ename}: {error.evalue}" if error.evalue else error.ename
    lines = [f"Cell In[{error.exec_count}] of {path} failed: {head}"]
    source = error.source.splitlines()
    at = [int(n) for n in re.findall(rf"Cell In\s*\[{error.exec_count}\], line (\d+)", text)]
    if at and at[-1] <= len(source):
        lines.append(f"    line {at[-1]}: {source[at[-1] - 1].strip()}")
    frames = re.findall(r"^File (\S+?):(\d+), in ([\w.<>]+)", text, re.M)
    if frames:
        lines.append("    raised at {}:{}, in {}".format(*frames[-1]))
    return "\n".join([*lines, f"The notebook up to there, with the whole traceback: {output}"])
