"""Archive the job's checkpoints while it trains, in a store that outlives all nodes and disks.

`judge` chooses a checkpoint and shares its parts over the nodes. `uploader` puts them through `writer`, and
`last_upload` the last checkpoint at the end of the job. The package `elastic_resume.archive` has the format
and the commit protocol. The events are::

    archived           step, checkpoint_generation, number (of the entry in the archive's log), bytes, seconds
                       (since this node began), archive (its address)
    archive-failed     error, error_kind (of `errors.ArchiveError`; not-archived at the end of the job); once
                       for failures in a row, and for last checkpoints that are not archived
    archive-damaged    step, error; this node does not archive that checkpoint, others may
    archive-recovered  seconds (since the first of those failures)
    archive-refused    error; another job archives under the same run id, so this one does not any more
"""

from __future__ import annotations

from elastic_resume.archive.address import parse_archive_setting
from elastic_resume.mechanisms.archive import description
from elastic_resume.mechanisms.mechanism import Mechanism, lazily
from elastic_resume.option import Option
from elastic_resume.rendezvous.facts import Topic

UPLOADS = Topic("archive", lazily("archive.judge", "ArchiveJudge"), is_of_job=True)

ARCHIVE = Mechanism(
    topic=UPLOADS,
    make_agent_part=lazily("archive.uploader", "ArchiveUploader"),
    needs_setting="archive",
    alerts=description.ALERTS,
    report_line=description.REPORT_LINE,
    status=description.STATUS,
    gauge=description.GAUGE,
    options=(
        Option(
            "archive",
            "ADDRESS|off",
            "tier that outlives all nodes: s3://BUCKET, or a path",
            parse_archive_setting,
            "off",
            has_flag=True,
            help_group="checkpoints",
            details="also gs://, az:// and other schemes of fsspec; all nodes must see the directory",
        ),
        Option(
            "archive-every",
            "N|TIME",
            "time or steps between archived states",
            description.parse_every,
            "30m",
            has_flag=True,
            help_group="checkpoints",
            details="the job's last checkpoint is archived too",
        ),
        Option(
            "archive-keep",
            "N|all",
            "archived states kept, plus milestones",
            description.parse_keep,
            "all",
            has_flag=True,
            help_group="checkpoints",
        ),
    ),
)
