"""Choose the earlier state to which a user's request goes back: `--resume-from`.

A request names a step, a milestone, the newest milestone, or a checkpoint. It is done once, although each
restart, requeue and rejoining node repeats it: every state written after it carries it, and so does what
follows. If the newest state of all nodes descends from the same request, the job goes on from that state.

Going back starts a new history under a greater generation, so it wins by order. States of the abandoned
history that are newer than where it went back to never count again (`is_abandoned`), wherever they turn up.
A state carries all ways back of its history, since a later one, to a state behind an earlier one, leaves the
earlier one true. A way back to an abandoned state goes on with that state's ways.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import replace

from elastic_resume import milestone
from elastic_resume.errors import ConfigError, NoValidCheckpointError, UnreadableError
from elastic_resume.milestone import LATEST, MAX_WAYS_BACK, OFF, Milestone, Version, WayBack
from elastic_resume.policy import resume_plan
from elastic_resume.policy.resume_plan import (
    ASIDE,
    Inventory,
    RejectedState,
    ResumePlan,
    SavedState,
)

MAX_LISTED = 8  # states or nodes named in one error


def parse_request(text: str) -> str | None:
    """Return a request in its one form, or None if ``text`` is none."""
    if (step := milestone.parse_step(text)) is not None:
        return str(step)
    if (version := milestone.parse_version(text)) is not None:
        return milestone.format_version(version)
    return text if text == LATEST or milestone.is_name(text) else None


def parse_setting(setting: str, value: object) -> str | None:
    """Parse the value of ``setting`` into a request; None for "off" and an empty text."""
    if isinstance(value, str) and value in {"", OFF}:
        return None
    request = None if isinstance(value, bool) else parse_request(str(value))
    if request is None:
        raise ConfigError(
            f"{setting} is {str(value)[:100]!r}: write a step (500), the name of a milestone (best), latest, "
            "a checkpoint's name (g4-s500), or off."
        )
    return request


def plan_with_request(inventories: Sequence[Inventory], mode: str) -> ResumePlan:
    """Plan to go on from the newest state, or to go back if a node requests it and it is not done.

    Errors are those of `resume_plan.choose_resume_plan`, and:

    Raises:
        ConfigError: nodes request different states.
        NoValidCheckpointError: no node has the requested state, or its history has gone back too often.

    """
    plan = resume_plan.choose_resume_plan(inventories, mode)
    request = _find_request(inventories)
    if not request:
        return plan
    newest = plan.saved_state_for(plan.source_node)
    if _is_done(plan, request):
        return replace(plan, request=request)
    states = [state for node in inventories for state in node.saved_states]
    if newest is not None and milestone.parse_version(request) is None:  # a checkpoint's name means just it
        states = [state for state in states if not is_abandoned(state, newest)]
    chosen = _find_state(states, request)
    if chosen is None:
        raise _make_missing_error(inventories, states, request)
    if len(chosen.ways_back) >= MAX_WAYS_BACK:
        raise NoValidCheckpointError(
            f"--resume-from {request}: the history of {milestone.format_version(chosen.version)} has gone "
            f"back {MAX_WAYS_BACK} times, which is the limit. Name a state from before, as g4-s500, or leave "
            "--resume-from out to go on from the newest."
        )
    earlier = [
        replace(
            each,
            saved_states=tuple(s for s in each.saved_states if s.moment == chosen.moment),
            rejected=(),
        )
        for each in inventories
    ]
    rejected = [
        each
        for node in inventories
        for each in node.rejected
        if each.kind != ASIDE and _is_meant(each, request)
    ]
    newest_step = max(plan.step + plan.recomputed_steps, chosen.step)
    return replace(
        resume_plan.choose_resume_plan(earlier, mode),
        generation=plan.generation,
        rejected=tuple(dict.fromkeys(rejected)),
        recomputed_steps=0,
        given_up_steps=newest_step - chosen.step,
        previous_world_size=plan.previous_world_size,
        request=request,
        goes_back=True,
        ways_back=(*chosen.ways_back, WayBack(request, *chosen.version, plan.generation)),
    )


def find_due_request(inventories: Sequence[Inventory], mode: str) -> str:
    """Return the request that `plan_with_request` is about to do, or ""; errors as there."""
    request = _find_request(inventories)
    is_due = request and not _is_done(resume_plan.choose_resume_plan(inventories, mode), request)
    return request if is_due else ""


def _is_done(plan: ResumePlan, request: str) -> bool:
    newest = plan.saved_state_for(plan.source_node)
    return newest is not None and bool(newest.ways_back) and newest.ways_back[-1].request == request


def is_abandoned(state: SavedState, newer: SavedState | ResumePlan) -> bool:
    """Return whether the history of ``newer`` has gone back behind ``state``."""
    return milestone.find_way_behind(state.version, newer.ways_back) is not None


def describe_abandoned(state: SavedState, plan: ResumePlan) -> str:
    """Return why ``state``, which the history of ``plan`` has left, is moved aside."""
    way = milestone.find_way_behind(state.version, plan.ways_back)
    if way is None:
        raise ValueError(f"{state} is not abandoned")
    return (
        f"newer than {milestone.format_version(way.version)}, to which --resume-from {way.request} went "
        "back; to use it after all, move it into its node's directory and give its name to --resume-from"
    )


def _find_request(inventories: Sequence[Inventory]) -> str:
    """Return the request of all nodes that have one."""
    requests = {each.node: each.resume_from for each in inventories if each.resume_from}
    if len(set(requests.values())) > 1:
        shown = "; ".join(f"{node}: {request}" for node, request in sorted(requests.items())[:MAX_LISTED])
        raise ConfigError(
            f"--resume-from differs between nodes ({shown}). Give all nodes the same value, or one of them "
            "alone."
        )
    return next(iter(requests.values()), "")


def _find_state(states: Sequence[SavedState], request: str) -> SavedState | None:
    """Return the newest requested state; of the milestones of a name the best, if it has a metric."""
    counting: dict[SavedState, list[Milestone]] = {}
    for state, label in _list_milestones(states):
        counting.setdefault(state, []).append(label)
    ordered = sorted(states, key=lambda state: state.moment)
    return milestone.choose_requested(
        request, ((state, state.version, counting.get(state, [])) for state in ordered)
    )


def _list_milestones(states: Sequence[SavedState]) -> list[tuple[SavedState, Milestone]]:
    """Return the milestones that count in the whole job, each with its state."""
    kept = milestone.choose_kept((state.version, label) for state in states for label in state.milestones)
    return [(s, label) for s in states for label in s.milestones if (s.version, label) in kept]


def may_mean(request: str, version: tuple[int, int], names: Collection[str]) -> bool:
    """Return whether the request may mean a state of this version, with milestones of these names."""
    step, wanted = milestone.parse_step(request), milestone.parse_version(request)
    if step is not None or wanted is not None:
        return step == version[1] or wanted == version
    return bool(names) if request == LATEST else request in names


def _is_meant(rejected: RejectedState, request: str) -> bool:
    """Return whether the request may mean a state that cannot be loaded, or is in a tier that cannot."""
    is_tier = rejected.kind == UnreadableError.kind and rejected.version == (0, 0)
    return is_tier or may_mean(request, rejected.version, rejected.milestones)


def _make_missing_error(
    inventories: Sequence[Inventory], states: Sequence[SavedState], request: str
) -> NoValidCheckpointError:
    meant = [each for node in inventories for each in node.rejected if _is_meant(each, request)]
    reasons = dict.fromkeys(f"{each.node}/{each.name}: {each.reason.rstrip('.')}" for each in meant)
    unusable = f" Not usable: {'; '.join([*reasons][:MAX_LISTED])}." if reasons else ""
    remedy = "Name one that is there, start" if states else "Start"
    error = NoValidCheckpointError(
        f"--resume-from {request}: no node of this start has such a saved state. "
        f"{_describe_states(inventories, states, request)}{unusable} {remedy} the node that has it, or leave "
        "--resume-from out to go on from the newest."
    )
    # A read that failed now may succeed at the next attempt.
    error.is_deterministic = not any(each.kind == UnreadableError.kind for each in meant)
    return error


def _describe_states(inventories: Sequence[Inventory], states: Sequence[SavedState], request: str) -> str:
    """Say where was looked, and what is there: milestones by name, then the newest of the others."""
    places = _join(sorted(each.node for each in inventories))
    if archives := sorted({each.archive for each in inventories if each.archive}):
        places += f" and in {_join(archives)}"
    if not states:
        return f"Nothing is saved on {places}: is --rdzv-id, --ckpt-dir or --archive another one?"
    by_name = dict[str, list[Version]]()
    for state, label in sorted(_list_milestones(states), key=lambda one: one[0].version, reverse=True):
        by_name.setdefault(label.name, []).append(state.version)
    named = {version for versions in by_name.values() for version in versions}
    others = sorted({state.version for state in states} - named, reverse=True)
    close = difflib.get_close_matches(request, by_name, 1)
    groups = {
        "Milestones": [f"{name} ({_join_versions(by_name[name])})" for name in sorted(by_name)],
        "Others": [milestone.format_short_version(version) for version in others],
    }
    return " ".join(
        [
            *(f"Did you mean {name}?" for name in close),
            f"Looked on {places}.",
            *(f"{title}: {_join(items)}." for title, items in groups.items() if items),
        ]
    )


def _join_versions(versions: Sequence[Version]) -> str:
    return _join([milestone.format_short_version(version) for version in dict.fromkeys(versions)])


def _join(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
