"""Write docs/reference/job-file.schema.json: ``python -m tests.support.job_schema``."""

from __future__ import annotations

import json

from elastic_resume.agent import torchelastic
from elastic_resume.commands.job_file import build_schema
from tests.support.paths import ROOT

PATH = ROOT / "docs" / "reference" / "job-file.schema.json"


def render() -> str:
    """Return the schema as the file has it."""
    return json.dumps(build_schema(torchelastic.build_parser()), indent=1) + "\n"


if __name__ == "__main__":
    PATH.write_text(render())
