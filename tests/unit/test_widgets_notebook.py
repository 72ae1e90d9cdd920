"""Views in notebooks that real kernels run: what is saved without a browser, and what a front end is given that says it is there."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager, KernelManager
from nbclient import NotebookClient

HERE = Path(__file__).parent
START = f"""
import sys; sys.path.insert(0, {str(HERE)!r})
from pathlib import Path
from logs import Log
from rlkit.widgets import *
log = Log(Path("sums")); log.steps(3)
"""
WIDGET = "application/vnd.jupyter.widget-view+json"


def execute(tmp_path, *cells):
    """A notebook run as papermill does, with nobody to show widgets."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in (START, *cells)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    client(notebook, tmp_path).execute()
    return notebook


def client(notebook, folder, **options):
    kernel = AsyncKernelManager(transport="ipc", ip=f"{tempfile.mkdtemp(dir=folder)}/k")  # socket files: no port that others could reach
    return NotebookClient(notebook, km=kernel, timeout=120, resources={"metadata": {"path": str(folder)}}, **options)


def test_a_notebook_without_a_browser_saves_the_picture_of_the_end_and_no_widget(tmp_path):
    notebook = execute(
        tmp_path,
        "board = Dashboard('sums')\nboard",
        "display(RewardCurves('sums', ['reward']))\nlog.steps(8, since=3)",
        "log.steps(50, since=8)",
        "len(board.watched.steps)",
    )
    _, board, curves, _, count = notebook.cells
    (shown,) = board.outputs
    assert set(shown.data) == {"text/html", "text/plain"}
    assert "50 steps: reward/mean 0.49" in shown.data["text/plain"]
    assert "Reward: mean 0.49" in shown.data["text/html"]
    (shown,) = curves.outputs
    assert re.findall(r"alt='([^']*)'", shown.data["text/html"]) == ["Reward: mean 0.49"]
    assert count.outputs[0].data["text/plain"] == "50"
    assert "widgets" not in notebook.metadata
    assert len(json.dumps(notebook)) < 200_000


def test_a_saved_notebook_becomes_a_page_with_the_curves_and_no_script_of_ours(tmp_path):
    from nbconvert import HTMLExporter

    notebook = execute(tmp_path, "RewardCurves('sums', ['reward'])", "log.steps(50, since=3)")
    page, _ = HTMLExporter().from_notebook_node(notebook)
    assert re.search("""alt=["']Reward: mean 0.49["']""", page)
    assert "data:image/svg+xml;base64," in page
    assert WIDGET not in page


def test_a_cell_that_fails_still_brings_the_picture_up_to_date(tmp_path):
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(c) for c in (START, "RewardCurves('sums')", "log.steps(9, since=3)\n1 / 0")]
    )
    client(notebook, tmp_path, allow_errors=True).execute()
    assert "9 steps" in notebook.cells[1].outputs[0].data["text/plain"]
    assert [o.output_type for o in notebook.cells[2].outputs] == ["error"]


class FrontEnd:
    """Runs cells as JupyterLab does, which names the cell."""

    def __init__(self, folder, sockets):
        self.manager = KernelManager(transport="ipc", ip=f"{sockets}/k")
        self.manager.start_kernel(cwd=str(folder))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)

    def run(self, code, cell):
        """All that the kernel published for it, as (type, content)."""
        message = self.client.session.msg(
            "execute_request",
            {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False, "stop_on_error": True},
        )
        message["metadata"] = {"cellId": cell}
        self.client.shell_channel.send(message)
        out = []
        while True:
            reply = self.client.get_iopub_msg(timeout=120)
            out.append((reply["msg_type"], reply["content"]))
            if reply["msg_type"] == "error":
                raise AssertionError("\n".join(reply["content"]["traceback"]))
            if reply["content"].get("execution_state") == "idle" and reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                return out

    def end(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def front_end(tmp_path, tmp_path_factory):
    one = FrontEnd(tmp_path, tmp_path_factory.mktemp("k"))
    one.run(START, "start")
    yield one
    one.end()


LEFT = """
import threading
print(len(get_ipython().kernel.comm_manager.comms), [t.name for t in threading.enumerate() if t.name.startswith("rlkit")])
"""


def stdout(messages):
    return "".join(content["text"] for kind, content in messages if kind == "stream")


def test_a_front_end_gets_picture_and_widget_and_the_same_cell_run_again_replaces_them(front_end):
    for _ in range(3):
        said = front_end.run("board = Dashboard('sums')\nboard", "cell-1")
        shown = [content["data"] for kind, content in said if kind == "display_data"]
        assert [set(data) for data in shown] == [{"text/html", "text/plain"}, {WIDGET, "text/plain"}]
        opened = [content for kind, content in said if kind == "comm_open"]
        assert sum("spec" in content["data"]["state"] for content in opened) == 1
    assert stdout(front_end.run(LEFT, "cell-2")) == "2 ['rlkit-view-sums']\n"  # the widget and its layout
    said = front_end.run("log.steps(9, since=3)\nboard.close()", "cell-3")
    updates = [content["data"] for kind, content in said if kind == "update_display_data"]
    assert "9 steps" in updates[-1]["text/plain"]
    assert stdout(front_end.run(LEFT, "cell-2")) == "0 []\n"


def test_two_views_of_one_cell_stay(front_end):
    front_end.run("display(RewardCurves('sums'))\ndisplay(Health('sums'))", "cell-1")
    assert stdout(front_end.run(LEFT, "cell-2")).startswith("4 ")
    front_end.run("1", "cell-1")
    front_end.run("display(Health('sums'))", "cell-1")
    assert stdout(front_end.run(LEFT, "cell-2")).startswith("2 ")


def test_the_reader_decides_where_the_front_end_is_not_recognised(front_end):
    front_end.run("import os; os.environ['RLKIT_WIDGETS'] = '0'", "cell-0")
    said = front_end.run("Health('sums')", "cell-1")
    assert [set(content["data"]) for kind, content in said if kind == "display_data"] == [{"text/html", "text/plain"}]
    assert not any(kind == "comm_open" for kind, _ in said)
