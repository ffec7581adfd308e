"""The page of a report, as text; how a browser takes it is tested in test_report_browser.py."""

from __future__ import annotations

from html.parser import HTMLParser

from elastic_resume.report import page
from tests.test_report_incidents import Job

HOSTILE = "</script><script>alert(1)</script>\x00\"'<!-- <img src=x onerror=alert(2)>"


class Elements(HTMLParser):
    """The names of all elements of a page, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """One element begins."""
        self.names.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        """Text between elements."""
        self.text += data


def test_what_an_exception_says_is_text() -> None:
    """Messages come from anybody's code: no element, attribute or script can come of one."""
    job = Job().begun()
    job.fail(110.2, 1, HOSTILE, HOSTILE)
    job.begin(115, 10, "n0", HOSTILE, "n2")
    found = Elements(page.render(job.events, title=HOSTILE))
    assert "script" not in found.names
    assert "img" not in found.names
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert "<script>alert(1)</script>" in found.text
    assert "\x00" not in found.text


def test_a_live_page_asks_for_itself_again() -> None:
    """And one that was written to a file does not."""
    events = Job().begun().events
    assert '<meta http-equiv="refresh" content="2.5"/>' in page.render(events, live_s=2.5)
    assert "refresh" not in page.render(events)
