"""Test the page of a report in a browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_resume.report import html, summary
from elastic_resume.report.formatting import replace_unprintable
from elastic_resume.report.summary import RunReport
from tests.support import browser, report_runs
from tests.support.browser import Browser

pytestmark = pytest.mark.slow
SCREENS = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]
MAX_BYTES = 2_000_000  # of a page of 2,000 generations
MAX_ELEMENTS = 48_000


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Start one browser for all of these tests."""
    with browser.start_browser(tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture(scope="module")
def report() -> RunReport:
    """Build the report of a run with every kind of event."""
    job = report_runs.make_eventful_run()
    return summary.build_run_report(
        job.events,
        checkpoint_entries=report_runs.remaining_checkpoints(job),
        stacks=report_runs.STACKS,
        problems=["p"],
    )


@pytest.fixture(scope="module")
def page(report: RunReport, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write its page."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html.render_page(report), encoding="utf-8")
    return path


def texts(chromium: Browser, selector: str) -> list[str]:
    """Return the text of the elements, also of folded ones."""
    found = chromium.evaluate(f"[...document.querySelectorAll({selector!r})].map(one => one.textContent)")
    return [" ".join(text.split()) for text in found]


def test_page_shows_every_part_of_the_report(chromium: Browser, page: Path, report: RunReport) -> None:
    """Each generation, alert, fault and mark is there, and the browser logs no problem."""
    chromium.open(page)
    rows = texts(chromium, ".generations tbody tr")
    assert len(rows) == len(report.history.generations) == 6
    for item, row in zip(report.history.generations, rows, strict=True):
        assert " ".join(replace_unprintable(item.end.text).split()) in row
    said = " ".join(texts(chromium, ".alerts tbody tr"))
    assert len(report.alerts) > 10
    for alert in report.alerts:
        assert alert.text in said
    sizes = "[...document.querySelectorAll('tbody td')].map(one => getComputedStyle(one).fontSize)"
    assert len(set(chromium.evaluate(sizes))) == 1
    assert len(texts(chromium, ".faults tbody tr")) == 3
    assert len(texts(chromium, "use[href='#incident'] title")) == report.history.num_incidents
    assert "SUSPECT rank 1" in texts(chromium, "pre")[0]
    headings = texts(chromium, "h2")
    for heading in ("Timeline", "Generations", "Alerts", "Injected faults", "Checkpoints"):
        assert heading in headings
    assert chromium.problems == []


def test_script_in_a_message_does_not_run(chromium: Browser, page: Path) -> None:
    """The text of an exception is shown as it is."""
    chromium.open(page)
    assert chromium.evaluate("document.title") == "resnet-50 - elastic_resume"
    assert chromium.evaluate("document.querySelectorAll('script, main img').length") == 0
    assert "<script>document.title='taken'</script>" in texts(chromium, ".generations")[0]
    assert chromium.problems == []


@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_page_fits_every_screen(
    chromium: Browser, page: Path, tmp_path: Path, width: int, scheme: str
) -> None:
    """Nothing overflows sideways, text has enough contrast, and drawings have their size."""
    chromium.open(page, width=width, scheme=scheme)
    chromium.screenshot(tmp_path / f"{width}-{scheme}.png")
    assert chromium.evaluate("document.documentElement.scrollWidth") == width
    assert chromium.evaluate("innerWidth") == width
    dark = chromium.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert dark == (scheme == "dark")
    faint = chromium.evaluate(_FAINT)
    assert faint == []
    assert (
        chromium.evaluate("document.querySelector('.timeline').getBoundingClientRect().width") > 0.75 * width
    )
    assert chromium.problems == []


# Contrast of each text with what lies under it, as WCAG 2 reckons it: at least 4.5.
_FAINT = """(() => {
  const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
  const light = colour => numbers(colour).slice(0, 3).map(v => v / 255)
    .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const ground = one => {
    for (; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor;
      if (numbers(colour)[3] !== 0) return colour;
    }
    return 'rgb(255, 255, 255)';
  };
  const found = new Set();
  for (const one of document.querySelectorAll('body *')) {
    if (![...one.childNodes].some(child => child.nodeType === 3 && child.data.trim())) continue;
    if (one.closest('title, desc, style')) continue;
    const style = getComputedStyle(one);
    const [a, b] = [light(one.closest('svg') ? style.fill : style.color), light(ground(one))];
    if ((Math.max(a, b) + .05) / (Math.min(a, b) + .05) < 4.5) found.add(one.outerHTML.slice(0, 200));
  }
  return [...found];
})()"""


def test_page_of_two_thousand_generations_stays_small(chromium: Browser, tmp_path: Path) -> None:
    """Folded rows are not laid out."""
    job = report_runs.make_long_run(2000)
    path = tmp_path / "long.html"
    path.write_text(html.render_page(summary.build_run_report(job.events)), encoding="utf-8")
    assert path.stat().st_size < MAX_BYTES
    chromium.open(path)
    assert chromium.evaluate("document.querySelectorAll('*').length") < MAX_ELEMENTS
    assert chromium.evaluate("document.querySelectorAll('svg *').length") < 6000
    assert chromium.evaluate("document.querySelectorAll('.generations tbody tr').length") == 2000
    closed = "[...document.querySelectorAll('details:not([open]) tr')]"
    assert chromium.evaluate(f"{closed}.filter(one => one.checkVisibility()).length") == 0
    assert chromium.problems == []
