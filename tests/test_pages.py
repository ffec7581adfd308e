"""The process that serves pages: it is found dead or hanging, and the user's directory is not its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_resume.agent import pages
from tests.stations import until

pytestmark = pytest.mark.slow

SHADOWED = ("html", "http", "queue", "base64", "json", "socket", "elastic_resume")


def test_a_process_that_dies_or_hangs_is_told_of_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its last words. The real one starts, whatever modules are called where a job was started."""
    for name in SHADOWED:
        (tmp_path / f"{name}.py").write_text("raise SystemError('not this one')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pages, "AGAIN_S", 0.05)
    said: list[str] = []
    beats: list[bytes | None] = []
    served = pages.Pages(pages.Wanted("127.0.0.1", 0), tmp_path, b"secret", say=said.append)

    def feel(pipe: int) -> bytes | None:
        beats.append(really(pipe))
        return beats[-1]

    real, really = pages.SERVER, pages._beat
    monkeypatch.setattr(pages, "_beat", feel)
    with monkeypatch.context() as patch:
        patch.setattr(pages, "SERVER", "import sys; sys.exit('no room')")
        served.start()
        try:
            until(lambda: "has ended with exit code 1 (no room)" in "".join(said), "its end is told")
            patch.setattr(pages, "HUNG_S", 0.1)
            patch.setattr(pages, "SERVER", "import signal; signal.pause()")
            until(lambda: "does nothing any more" in "".join(said), "it is taken for hanging")
            patch.setattr(pages, "SERVER", real)
            patch.setattr(pages, "HUNG_S", 60.0)
            until(lambda: any(beats), "it serves")
        finally:
            served.close()
