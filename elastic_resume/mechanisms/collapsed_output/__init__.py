"""Print a line that all ranks of a node print within a second once, with their number: `--collapse-output`.

`line_collapser` decides which lines are one, `filter_process` reads the workers' pipes and prints, and
`pipes` is the agent's part, which makes the pipes and keeps the process running. The pipes end in a process
of their own because it outlives a killed agent: what it holds is printed all the same.
"""

from __future__ import annotations

from elastic_resume.mechanisms.mechanism import Mechanism, lazily
from elastic_resume.option import Option, parse_switch

COLLAPSED_OUTPUT = Mechanism(
    make_agent_part=lazily("collapsed_output.pipes", "OutputPipes"),
    needs_setting="collapse_output",
    options=(
        Option(
            "collapse-output",
            None,
            "print equal lines of all local ranks once",
            parse_switch,
            "false",
            has_flag=True,
            details="with their number at the end, if they come within a second; each node has its own. What "
            "--redirects and --tee name stays as it is",
            help_group="processes and logs",
        ),
    ),
)
