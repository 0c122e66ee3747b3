"""A page in a real headless Chromium, and the value of a function that runs in it."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

_BEFORE = "<script>const problems = []; addEventListener('error', e => problems.push(e.message));</script>"
_AFTER = """<script>addEventListener('load', async () => {
  let value;
  try { value = await (FUNCTION)() } catch (error) { value = String(error) }
  document.body.innerHTML = '<pre id=probe></pre>';
  document.getElementById('probe').textContent = JSON.stringify({ problems, value });
})</script>"""


def find_chromium() -> str | None:
    """The browser's program: CHROMIUM, or Debian's or another's by name."""
    names = (os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome", "chrome")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def run_in_page(program: str, page: Path, width: int, function: str) -> Any:
    """The value (JSON) of a JavaScript function, called with `page` loaded in a window of `width` pixels (500 or more).

    Asserts that the page raised no error.
    """
    text = page.read_text(encoding="utf-8").replace("<head>", f"<head>{_BEFORE}", 1)
    probe = page.with_suffix(".probe.html")
    probe.write_text(text + _AFTER.replace("FUNCTION", function), encoding="utf-8")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    options += [
        f"--window-size={width},900",
        f"--user-data-dir={page.parent / 'chromium'}",
        "--virtual-time-budget=60000",
    ]
    command = [program, *options, "--dump-dom", probe.resolve().as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    found = re.search(r'<pre id="probe">(.*?)</pre>', dom, re.DOTALL)
    assert found is not None, dom[-2000:]
    result = json.loads(html.unescape(found[1]))
    assert result["problems"] == []
    return result["value"]
