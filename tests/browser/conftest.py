"""JupyterLab and Chromium, one of each for the whole session, and pages that are closed after each test."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator

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
        found = playwright.chromium.launch(executable_path=chromium(), args=[*sandbox, "--disable-dev-shm-usage", "--disable-gpu"])
        yield found
        found.close()


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    server = Lab(tmp_path_factory.mktemp("lab"))
    yield server
    server.end()
    server.end_clusters()


@pytest.fixture(autouse=True)
def pictures_of_a_failure(browser: Browser, request: pytest.FixtureRequest) -> Iterator[None]:
    """Of a test that failed a picture of every open page stays in runs/browser."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        for n, page in enumerate(page for context in browser.contexts for page in context.pages):
            page.screenshot(path=picture(f"failed-{request.node.name}-{n}"))


@pytest.fixture
def open_notebook(browser: Browser, lab: Lab) -> Iterator[Callable[..., Notebook]]:
    """``open_notebook(path, size=(1200, 900))``, in a page that is closed after the test."""
    context = browser.new_context()
    yield lambda path, **options: Notebook(context, lab, path, **options)
    context.close()
