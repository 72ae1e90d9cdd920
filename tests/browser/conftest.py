"""JupyterLab and Chromium, one of each for the whole session, and pages that are closed after each test."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import ROOT, Lab
from page import Notebook, picture
from playwright.sync_api import Browser, sync_playwright


def chromium() -> str:
    """Where Chromium is. A test without it fails and says what to do: nothing is left out silently."""
    spec = importlib.util.spec_from_file_location("setup_browser", ROOT / "scripts" / "setup_browser.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path = module.find_chromium()
    assert path is not None, "There is no Chromium: make setup-browser"
    return str(path)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses to make its sandbox as root; it opens our own pages only
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium(), args=[*sandbox, "--disable-dev-shm-usage"])
        yield found
        found.close()


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    server = Lab(tmp_path_factory.mktemp("lab"))
    yield server
    server.end()
    server.end_clusters()


@pytest.fixture
def open_notebook(browser: Browser, lab: Lab, request: pytest.FixtureRequest) -> Iterator[Callable[..., Notebook]]:
    """``open_notebook(path, size=(1200, 900))``. Of a test that failed a picture of each page stays in runs/browser."""
    opened: list[Notebook] = []
    context = browser.new_context()

    def open_it(path: Path, **options: Any) -> Notebook:
        opened.append(Notebook(context, lab, path, **options))
        return opened[-1]

    failed = request.session.testsfailed
    yield open_it
    if request.session.testsfailed > failed:
        for n, notebook in enumerate(opened):
            if not notebook.page.is_closed():
                notebook.page.screenshot(path=picture(f"failed-{request.node.name}-{n}"))
    context.close()
