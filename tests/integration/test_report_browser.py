"""Test the page of a report in a browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_resume.report import html, summary
from elastic_resume.report.formatting import replace_unprintable
from elastic_resume.report.summary import RunReport
from tests.support import browser, report_runs

pytestmark = pytest.mark.slow
WIDTHS = (1280, 390)
MAX_BYTES = 2_000_000  # of a page of 2,000 generations
MAX_ELEMENTS = 48_000


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


def texts(selector: str) -> str:
    """Return the expression for the text of the elements, also of folded ones."""
    plain = "one.textContent.trim().split(/\\s+/).join(' ')"
    return f"[...document.querySelectorAll({selector!r})].map(one => {plain})"


def test_page_shows_every_part_of_the_report(page: Path, report: RunReport) -> None:
    """Each generation, alert, fault and mark is there. The text of an exception does not run."""
    selectors = {
        "rows": ".generations tbody tr",
        "alerts": ".alerts tbody tr",
        "faults": ".faults tbody tr",
        "incidents": "use[href='#incident'] title",
        "headings": "h2",
        "generations": ".generations",
        "main": "main",
        "stacks": "pre",
    }
    cells = "[...document.querySelectorAll('tbody td')]"
    (found,) = browser.ask_page(
        page,
        {
            **{name: texts(selector) for name, selector in selectors.items()},
            "sizes": f"new Set({cells}.map(one => window.getComputedStyle(one).fontSize)).size",
            "title": "document.title",
            "active": "document.querySelectorAll('script, main img').length",
            "requests": "window.performance.getEntriesByType('resource').length",
        },
    )
    assert len(found["rows"]) == len(report.history.generations) == 6
    for item, row in zip(report.history.generations, found["rows"], strict=True):
        assert " ".join(replace_unprintable(item.end.text).split()) in row
    assert len(report.alerts) > 8
    for alert in report.alerts:
        assert alert.text in " ".join(found["alerts"])
    assert (found["sizes"], len(found["faults"])) == (1, 3)
    assert len(found["incidents"]) == report.history.num_incidents
    assert "SUSPECT rank 1" in found["stacks"][0]
    assert {"Timeline", "Generations", "Alerts", "Injected faults", "Checkpoints"} <= set(found["headings"])
    assert found["title"] == "resnet-50 - elastic_resume"
    assert (found["active"], found["requests"]) == (0, 0)
    assert "<script>document.title='taken'</script>" in found["generations"][0]


@pytest.mark.parametrize("is_dark", [False, True])
def test_page_fits_every_screen(page: Path, is_dark: bool) -> None:
    """Nothing overflows sideways, text has enough contrast, and drawings have their size."""
    questions = {
        "width": "document.documentElement.scrollWidth",
        "dark": "window.matchMedia('(prefers-color-scheme: dark)').matches",
        "faint": _FAINT,
        "drawing": "document.querySelector('.timeline').getBoundingClientRect().width",
    }
    for width, found in zip(WIDTHS, browser.ask_page(page, questions, WIDTHS, is_dark=is_dark), strict=True):
        assert (found["width"], found["dark"], found["faint"]) == (width, is_dark, [])
        assert found["drawing"] > 0.75 * width


# Contrast of each text with what lies under it, as WCAG 2 reckons it: at least 4.5.
_FAINT = """(() => {
  const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
  const light = colour => numbers(colour).slice(0, 3).map(v => v / 255)
    .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const ground = one => {
    for (; one; one = one.parentElement) {
      const colour = window.getComputedStyle(one).backgroundColor;
      if (numbers(colour)[3] !== 0) return colour;
    }
    return 'rgb(255, 255, 255)';
  };
  const found = new Set();
  for (const one of document.querySelectorAll('body *')) {
    if (![...one.childNodes].some(child => child.nodeType === 3 && child.data.trim())) continue;
    if (one.closest('title, desc, style')) continue;
    const style = window.getComputedStyle(one);
    const [a, b] = [light(one.closest('svg') ? style.fill : style.color), light(ground(one))];
    if ((Math.max(a, b) + .05) / (Math.min(a, b) + .05) < 4.5) found.add(one.outerHTML.slice(0, 200));
  }
  return [...found];
})()"""


@pytest.mark.soak
def test_page_of_two_thousand_generations_stays_small(tmp_path: Path) -> None:
    """Folded rows are not laid out."""
    job = report_runs.make_long_run(2000)
    path = tmp_path / "long.html"
    path.write_text(html.render_page(summary.build_run_report(job.events)), encoding="utf-8")
    assert path.stat().st_size < MAX_BYTES
    counted = {"all": "*", "drawn": "svg *", "rows": ".generations tbody tr"}
    questions = {
        name: f"document.querySelectorAll({selector!r}).length" for name, selector in counted.items()
    }
    closed = "[...document.querySelectorAll('details:not([open]) tr')]"
    questions["visible"] = f"{closed}.filter(one => one.checkVisibility()).length"
    (found,) = browser.ask_page(path, questions)
    assert found["all"] < MAX_ELEMENTS
    assert found["drawn"] < 6000
    assert (found["rows"], found["visible"]) == (2000, 0)
