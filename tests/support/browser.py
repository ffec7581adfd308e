"""Ask a headless Chromium about a page, without a driver. `make browser-tools` installs it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
# Frames are narrower than a window can be. The page's own policy forbids scripts in them, but not this one.
_OUTER_PAGE = """<!doctype html><meta charset="utf-8">%s<pre id="result"></pre><script>
onload = () => {
  const frames = [...document.querySelectorAll("iframe")].map(one => one.contentWindow);
  const ask = (window, document) => (%s);
  const found = frames.map(window => ask(window, window.document));
  document.querySelectorAll("iframe").forEach(one => one.remove());  // the rest is printed
  document.getElementById("result").textContent = JSON.stringify(found);
};
</script>"""


def ask_page(
    page: Path, questions: Mapping[str, str], widths: Sequence[int] = (1280,), *, is_dark: bool = False
) -> list[dict[str, Any]]:
    """Return the values of JavaScript expressions in the page, for each width of its frame."""
    browser = next((path for name in _NAMES if (path := shutil.which(name))), None)
    assert browser is not None, "no Chromium: run `make browser-tools`, or install chromium"
    text = html.escape(page.read_text(encoding="utf-8"))
    frame = f'<iframe width="%s" height="900" frameborder="0" srcdoc="{text}"></iframe>'
    frames = "".join(frame.replace("%s", str(width), 1) for width in widths)
    members = ", ".join(f"{name}: {expression}" for name, expression in questions.items())
    outer = page.with_suffix(".outer.html")
    outer.write_text(_OUTER_PAGE % (frames, f"{{{members}}}"), encoding="utf-8")
    flags = [*_FLAGS, "--dump-dom", f"--user-data-dir={page.parent / 'profile'}", "--window-size=1400,900"]
    flags += [f"--blink-settings=preferredColorScheme={0 if is_dark else 1}"]
    done = subprocess.run(
        [browser, *flags, outer.as_uri()], capture_output=True, text=True, check=True, timeout=120
    )
    result = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    assert result is not None, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(html.unescape(result[1]))
    return found
