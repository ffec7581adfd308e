"""The tables of the page: generations, what else went wrong, copies, hangs. Each is a section or nothing.

Long ones are cut into sections that a browser need not lay out before somebody opens them.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_resume.report import aftermath, ledger
from elastic_resume.report.incidents import FailedStart, Generation
from elastic_resume.report.ledger import Copy
from elastic_resume.report.markup import Markup, joined, lines, tag
from elastic_resume.report.moments import Phases
from elastic_resume.report.render import since, steps
from elastic_resume.report.story import Fault, Story
from elastic_resume.report.text import amount, folded, seconds, size
from elastic_resume.report.troubles import NEWS, Trouble, described

SECTION = 100  # rows
MAX_COPIES = 200
MAX_ALSO = 4
MAX_COLUMNS = 8  # nodes that have a column each in the ledger
STACK_CHARS = 64 * 1024
PHASES = {
    "noticed": "noticed",
    "stopped": "workers stopped",
    "formed": "world formed",
    "started": "workers started",
    "restored": "state restored",
    "step": "first step",
}
_SHORT = {"formed": "world", "started": "start", "restored": "restore"}


def section(title: str, *children: object, note: str = "") -> Markup:
    """A part of the page under its heading."""
    return tag("section", tag("h2", title), tag("p", note, class_="note") if note else None, *children)


def _table(kind: str, head: Sequence[object], rows: Sequence[Markup]) -> Markup:
    heads = [tag("th", name, scope="col") for name in head]
    return tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows), class_=kind)


def _cut(rows: Sequence[Markup], kind: str, head: Sequence[object], names: Sequence[str]) -> Markup:
    """One table, or several behind their summaries, the last of them open."""
    if len(rows) <= SECTION:
        return _table(kind, head, rows)
    parts = []
    for index, name in enumerate(names):
        here = rows[index * SECTION : (index + 1) * SECTION]
        parts.append(
            tag("details", tag("summary", name), _table(kind, head, here), open=index == len(names) - 1)
        )
    return joined(parts)


# ---- generations ---------------------------------------------------------------------------------------

_HEAD = ("gen", "began", "nodes", "world", "steps", "ended because", "lost", "recovered in")


def generations(told: Story) -> Markup | None:
    """A row for each generation, with all that is known of its end."""
    every = told.report.generations
    if not every:
        return None
    injected: dict[int | None, list[Fault]] = {}
    for fault in told.faults:
        injected.setdefault(fault.generation, []).append(fault)
    rows = [
        _generation(told, one, moment.formed or moment.restored, injected.get(one.number, []))
        for one, moment in zip(every, told.moments, strict=True)
    ]
    names = [_summary(told, every[first : first + SECTION]) for first in range(0, len(every), SECTION)]
    return section("Generations", _cut(rows, "generations", _HEAD, names))


def _summary(told: Story, here: Sequence[Generation]) -> str:
    failed = sum(one.end.is_failure for one in here)
    lost = sum(one.lost_steps or 0 for one in here)
    numbers = f"generations {here[0].number} to {here[-1].number}"
    when = f"{since(told, here[0].began)} to {since(told, here[-1].began)} after the start"
    return f"{numbers}: {amount(failed, 'failure')}, {amount(lost, 'step')} run again; {when}"


def _generation(told: Story, one: Generation, began: float, injected: Sequence[Fault]) -> Markup:
    phases = told.recoveries.get(one.number)
    recovered = seconds(one.recovered_s) if one.recovered_s is not None else "-"
    cells = (
        one.number,
        since(told, began),
        folded(one.nodes),
        "-" if one.world_size is None else one.world_size,
        steps(one),
        joined([tag("b", one.end.text, class_=f"end-{_kind(one)}"), *_details(one, injected)]),
        "-" if one.lost_steps is None else one.lost_steps,
        joined([recovered, tag("small", _phases(phases)) if phases is not None else None]),
    )
    return tag("tr", *(tag("td", cell) for cell in cells), id=f"g{one.number}")


def _kind(one: Generation) -> str:
    return "failure" if one.end.is_failure else "good" if one.end.kind == "finished" else "other"


def _phases(phases: Phases) -> str:
    return " · ".join(f"{_SHORT.get(name, name)} {seconds(value)}" for name, value in phases.known)


def _details(one: Generation, injected: Sequence[Fault]) -> list[Markup]:
    """What followed, what was sent and refused, and what somebody had broken."""
    told = [f"injected: {fault.text}" for fault in injected]
    told += [f"also: {text}" for text in one.end.also[:MAX_ALSO]]
    told += [f"and {len(one.end.also) - MAX_ALSO} more"] if len(one.end.also) > MAX_ALSO else []
    if one.resumed == "checkpoint" and one.source_node:
        sent = f", sent to {folded(one.lacking, 40)}" if one.lacking else ""
        told.append(f"began with {one.source_node}'s copy of step {one.start_step}{sent}")
    for copy in one.rejected:
        which = f"generation {copy.generation}, step {copy.step}"
        told.append(f"rejected {copy.node}'s copy of {which}: {copy.reason}")
    found = [tag("small", text) for text in told]
    if one.end.cascade:
        followed = tag("ul", *(tag("li", text) for text in one.end.cascade[:20]))
        found.append(tag("details", tag("summary", f"{len(one.end.cascade)} followed from that"), followed))
    return found


# ---- what else there was -------------------------------------------------------------------------------


def failed_starts(starts: Sequence[FailedStart], told: Story) -> Markup | None:
    """Workers that ended before they trained."""
    if not starts:
        return None
    rows = [
        tag("tr", *(tag("td", cell) for cell in (since(told, one.t), one.node, one.text)))
        for one in starts[-SECTION:]
    ]
    note = f"The last {SECTION} of {len(starts)}." if len(starts) > SECTION else ""
    return section("Ended before training", _table("troubles", ("after", "node", "what"), rows), note=note)


def troubles(told: Story) -> Markup | None:
    """What killed nobody."""
    if not told.troubles:
        return None
    rows = [_trouble(told, one) for one in told.troubles]
    names = [
        f"{since(told, told.troubles[first].t)} after the start and later"
        for first in range(0, len(rows), SECTION)
    ]
    note = "What killed nobody, and what schedulers and nodes said."
    return section("Troubles", _cut(rows, "troubles", ("after", "node", "what"), names), note=note)


def _trouble(told: Story, one: Trouble) -> Markup:
    often = described(one)
    what = joined([one.text, tag("small", often) if often else None])
    cells = (since(told, one.t), one.node or "-", what)
    return tag("tr", *(tag("td", cell) for cell in cells), class_="dim" if one.weight == NEWS else one.weight)


def faults(told: Story) -> Markup | None:
    """What was broken on purpose, beside what followed."""
    if not told.faults:
        return None
    hits = [aftermath.Hit(one.t, [one.node] if one.node else [], one.rank, one.what) for one in told.faults]
    rows = []
    for one, ended in zip(told.faults, aftermath.of(hits, told.report.generations), strict=True):
        then = [tag("div", f"generation {row.number} ended: {row.end.text}") for row in ended]
        cells = (since(told, one.t), one.text, joined(then) if then else told.after_fault(one.t))
        rows.append(tag("tr", *(tag("td", cell) for cell in cells)))
    note = "Broken on purpose. What each generation ended of is what its nodes saw, not what is listed here."
    names = [f"faults {first + 1} and later" for first in range(0, len(rows), SECTION)]
    return section("Injected faults", _cut(rows, "faults", ("after", "fault", "then"), names), note=note)


def hangs(told: Story) -> Markup | None:
    """Where every rank stood."""
    if not told.stacks:
        return None
    parts = [
        tag("details", tag("summary", name), tag("pre", lines(text, STACK_CHARS), tabindex=0))
        for name, text in sorted(told.stacks.items())
    ]
    return section("Stacks of hangs", *parts, note="What each rank of a node did when its job hung.")


# ---- copies --------------------------------------------------------------------------------------------


def checkpoints(told: Story) -> Markup | None:
    """The copies that matter now or have mattered: node by step."""
    if not told.copies:
        return None
    shown = [one for one in told.copies if one.state != ledger.PRUNED or one.loaded_by]
    gone = len(told.copies) - len(shown)
    note = f"{amount(len(told.copies), 'copy', 'copies')} known"
    note += f"; {gone} that nobody began with were pruned for newer ones and are left out." if gone else "."
    if len(shown) > MAX_COPIES:
        note += f" The newest {MAX_COPIES} of {len(shown)} are shown."
    shown = shown[-MAX_COPIES:]
    nodes = sorted({one.node for one in shown})
    listed = _by_node(shown, nodes) if len(nodes) <= MAX_COLUMNS else _as_list(shown)
    return section("Checkpoints", listed, note=note)


def _by_node(shown: Sequence[Copy], nodes: Sequence[str]) -> Markup:
    rows = []
    for order in sorted({(one.generation, one.step) for one in shown}, reverse=True):
        cells = [tag("td", order[1]), tag("td", order[0])]
        for node in nodes:
            here = [one for one in shown if (one.generation, one.step, one.node) == (*order, node)]
            cells.append(tag("td", *(_copy(one) for one in here), data_label=node))
        rows.append(tag("tr", *cells))
    return _table("ledger", ("step", "gen", *nodes), rows)


def _as_list(shown: Sequence[Copy]) -> Markup:
    rows = [
        tag("tr", *(tag("td", cell) for cell in (one.step, one.generation, one.node, _copy(one))))
        for one in reversed(shown)
    ]
    return _table("ledger listed", ("step", "gen", "node", "copy"), rows)


_STATES = {
    ledger.VALID: ("good", "on disk, checked"),
    ledger.COMMITTED: ("good", "on disk"),
    ledger.BAD: ("bad", "BAD"),
    ledger.QUARANTINED: ("bad", "set aside"),
    ledger.LOST: ("dim", "lost"),
    ledger.PRUNED: ("dim", "pruned"),
    ledger.USED: ("good", "in memory"),
}


def _copy(one: Copy) -> Markup:
    kind, word = _STATES[one.state]
    began = ", ".join(map(str, one.loaded_by[:6]))
    more = [
        f"generation {began} began with it" if began else "",
        size(one.bytes) if one.bytes else "",
        one.reason,
    ]
    said = "; ".join(filter(None, more))
    return tag("div", tag("span", word, class_=f"state {kind}"), tag("small", said) if said else None)
