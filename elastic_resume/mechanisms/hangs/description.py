"""Describe the suspects and victims of a hang."""

from __future__ import annotations

from elastic_resume.mechanisms.hangs.judge import HangDiagnosis, RankFinding
from elastic_resume.policy.wording import describe_stall, list_waiting_ranks


def describe_diagnosis(diagnosis: HangDiagnosis) -> str:
    """Describe the suspects of a hang with their reasons, then the victims that no reason names."""
    victims = list_waiting_ranks([victim.rank for victim in diagnosis.victims])
    if diagnosis.suspects:
        text = "; ".join(map(describe_finding, diagnosis.suspects))
        named = {rank for suspect in diagnosis.suspects for rank in suspect.stall.others}
        is_named = named.issuperset(victim.rank for victim in diagnosis.victims)
        return text if is_named else f"{text}. {victims} for it"
    if not diagnosis.victims:
        return "no rank can be named"
    first = describe_stall(diagnosis.victims[0].stall)
    if diagnosis.waits_for_other_node:
        return f"{victims} for a rank of another node: {first}"
    return f"all ranks have entered the same collective ({first}): look at the network between them"


def describe_finding(finding: RankFinding) -> str:
    """Name a rank and say why it stands still."""
    return f"rank {finding.rank} {describe_stall(finding.stall)}"
