"""Run the user's command at each event of the job that a person may want to know of.

`notices` decides which events these are and makes one JSON object of each, `command` runs the command with
it, and `notifier` joins them in the agent. docs/guides/notifications.md describes the object.
"""

from __future__ import annotations

from elastic_resume.mechanisms.mechanism import Mechanism, lazily
from elastic_resume.option import Option


def _show(text: str) -> str:
    program, _, arguments = text.strip().partition(" ")
    return f"{program} ***" if arguments else program  # the address of a webhook is a secret


ON_EVENT = Mechanism(
    make_agent_part=lazily("on_event.notifier", "Notifier"),
    needs_setting="on_event",
    options=(
        Option(
            "on-event",
            "COMMAND",
            "run COMMAND at each event of the job",
            lazily("on_event.command", "parse_command"),
            has_flag=True,
            details="start, failure, recovery, end and alerts, each as JSON on standard input; no shell",
            default_help="none",
            show=_show,
        ),
    ),
)
