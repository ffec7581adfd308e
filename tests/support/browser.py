"""Control a headless Chromium through a pipe, without a driver, a port or another package.

`make browser-tools` installs it. Its DevTools protocol is JSON that ends with a null byte, on the
descriptors 3 and 4: https://chromedevtools.github.io/devtools-protocol/.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--no-default-browser-check", "--disable-extensions", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"),
)
REPLY_TIMEOUT_S = 60.0


def find_browser() -> str | None:
    """Return the path of the browser; None if there is none."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with one tab."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to_browser, self._from_browser = to_browser, from_browser
        self._buffer = b""
        self._message_id = self._width = 0
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a DevTools method and return its result."""
        self._message_id += 1
        message: dict[str, Any] = {"id": self._message_id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._read()
            if reply.get("id") == self._message_id:
                assert "error" not in reply, f"{method}: {reply['error']}"
                result: dict[str, Any] = reply["result"]
                return result
            self._events.append(reply)

    def open(self, path: Path, *, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Open a page with this width and color scheme, and wait until it is loaded."""
        self._width = width
        self._resize(height)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self._events = []
        this = self.call("Page.navigate", url=path.absolute().as_uri())[
            "loaderId"
        ]  # a load event of the previous page may be late
        while not any(_is_loaded(one, this) for one in self._events):
            self._events.append(self._read())

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    @property
    def problems(self) -> list[str]:
        """What the page logged, raised or requested from the network since it was opened."""
        found = []
        for one in self._events:
            method, params = one.get("method"), one.get("params", {})
            if method in {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}:
                found.append(json.dumps(params))
            elif method == "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith(("file:", "data:")):
                    found.append(url)
        return found

    def screenshot(self, path: Path) -> None:
        """Write a picture of the whole page."""
        for _ in range(2):  # elements get their height when they come into view
            height = min(int(self.evaluate("document.documentElement.scrollHeight")), 8000)
            self._resize(height)
        data = self.call("Page.captureScreenshot")["data"]
        path.write_bytes(base64.b64decode(data))

    def _resize(self, height: int) -> None:
        mobile = self._width < 600
        size = {"width": self._width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def _read(self) -> dict[str, Any]:
        until = time.monotonic() + REPLY_TIMEOUT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from_browser], [], [], max(0.0, until - time.monotonic()))
            data = os.read(self._from_browser, 1 << 20) if ready else b""
            assert data, "the browser ended, or does not answer"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message


def _is_loaded(event: dict[str, Any], loader: str) -> bool:
    """Whether the event says that this loader has finished."""
    params = event.get("params", {})
    is_end = event.get("method") == "Page.lifecycleEvent" and params["name"] == "load"
    return is_end and params["loaderId"] == loader


def _move_descriptors(*descriptors: int) -> list[int]:
    """Return duplicates of the descriptors above 3 and 4."""
    moved = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 10) for one in descriptors]
    for one in descriptors:
        os.close(one)
    return moved


@contextmanager
def start_browser(directory: Path) -> Iterator[Browser]:
    """Start a browser whose profile lies in ``directory``, and end it."""
    path = find_browser()
    assert path is not None, "no Chromium: run `make browser-tools`, or install chromium"
    commands, from_us = _move_descriptors(*os.pipe())
    to_us, answers = _move_descriptors(*os.pipe())
    command = [path, *_FLAGS, f"--user-data-dir={directory}", "about:blank"]
    placed = [
        "bash",
        "-c",
        f'exec "$@" 3<&{commands} 4>&{answers}',
        "bash",
        *command,
    ]  # sh only takes one-digit descriptors
    log = open(directory / "browser.log", "wb")  # noqa: SIM115  closed below, with the process
    process = subprocess.Popen(
        placed, pass_fds=(commands, answers), stdin=subprocess.DEVNULL, stdout=log, stderr=log
    )
    os.close(commands)
    os.close(answers)
    try:
        yield Browser(from_us, to_us)
    finally:
        os.close(from_us)  # the browser ends with its pipe
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(to_us)
        log.close()
