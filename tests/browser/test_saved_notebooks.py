"""A notebook that was run and saved, turned into HTML and opened with scripts switched off."""

from __future__ import annotations

import nbformat
import pytest
from lab import ROOT
from nbconvert import HTMLExporter
from page import picture
from playwright.sync_api import Browser, expect

NAMES = ["01_quickstart.ipynb", "03_watch_a_run.ipynb"]


@pytest.mark.parametrize("name", NAMES)
def test_the_final_curves_are_seen_without_scripts(browser: Browser, tmp_path, name):
    body, _ = HTMLExporter().from_notebook_node(nbformat.read(ROOT / "notebooks" / name, as_version=4))
    (tmp_path / "page.html").write_text(body)
    asked: list[str] = []
    context = browser.new_context(java_script_enabled=False, viewport={"width": 1000, "height": 900})
    page = context.new_page()
    page.on("request", lambda request: asked.append(request.url))
    page.goto((tmp_path / "page.html").as_uri(), wait_until="domcontentloaded")
    curve = page.locator("img[alt^='Reward:']").first
    curve.scroll_into_view_if_needed()
    expect(curve).to_be_visible()
    box = curve.bounding_box()
    assert box is not None
    assert box["height"] > 100  # it was read and drawn: a picture that cannot be read is as high as a line of text
    assert box["width"] > 200
    curve.screenshot(path=picture(f"saved-{name.partition('.')[0]}"))
    pictures = [url for url in asked if not url.startswith(("data:", "file:"))]
    assert not any(url.endswith((".svg", ".png")) for url in pictures), pictures
    context.close()
