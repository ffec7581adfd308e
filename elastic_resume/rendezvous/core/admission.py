"""Decide, as leader, who may follow: settings must agree, names must be unique, and the job be the same."""

from __future__ import annotations

from itertools import zip_longest

from elastic_resume.policy.reasons import (
    DirectoryCopied,
    NameTaken,
    OtherJob,
    SettingDiffers,
    name_nodes,
)
from elastic_resume.rendezvous.core import messages
from elastic_resume.rendezvous.core.peers import PeerTable
from elastic_resume.rendezvous.core.state import NodeState
from elastic_resume.rendezvous.core.world import Incarnation

MAX_CLAIMS = 64


class Admission:
    """Decides which nodes may follow: settings must agree, and names must be unique."""

    def __init__(self, state: NodeState, peers: PeerTable) -> None:
        self.state = state
        self.peers = peers
        self.claims: dict[Incarnation, float] = {}
        """When a process asked first whose name or directory another one has."""

    def check_hello(self, hello: messages.Hello, *, is_running: bool) -> messages.Refused | None:
        """Learn what the node knows; return why it may not join, or None."""
        state, sender = self.state, hello.sender
        mismatch = self._find_setting_mismatch(hello)
        if mismatch:
            return messages.Refused(SettingDiffers(*mismatch))
        refused = hello.status.join and self.check_script(hello.status.join)
        if refused:
            return refused
        twin = self._find_twin(sender)
        if twin:
            return messages.Refused(twin)
        if state.view.is_of_other_job(hello.view) and hello.view.members and not state.may_change_job():
            others = name_nodes(hello.view.members)
            return messages.Refused(OtherJob(sender.node, hello.view.generation, others, is_running))
        state.acceptor.record_generation(hello.max_generation)
        state.acceptor.note_ballot(hello.promised)
        state.adopt_view(hello.view)
        state.contacts.mark_former_ended(sender)
        return None

    def check_script(self, join: messages.JoinSpec) -> messages.Refused | None:
        """Return a refusal if a node's script differs from this leader's; none before this leader joins."""
        own = self.state.script
        if not own or join.script in {"", own}:
            return None
        return messages.Refused(SettingDiffers("the training script", join.script, own))

    def _find_setting_mismatch(self, hello: messages.Hello) -> tuple[str, str, str] | None:
        """Return a setting that must be equal on all nodes and is not, with its values there and here."""
        own = self.state.settings
        theirs = hello.node_timeout_s, hello.min_nodes, hello.max_nodes, hello.candidates, hello.is_strict
        if theirs == (own.node_timeout_s, own.min_nodes, own.max_nodes, own.candidates, own.is_strict):
            return None
        compared = (
            ("--node-timeout", f"{hello.node_timeout_s:g} s", f"{own.node_timeout_s:g} s"),
            ("--nnodes", f"{hello.min_nodes}:{hello.max_nodes}", f"{own.min_nodes}:{own.max_nodes}"),
            *(
                (f"host {number} of the list in --rdzv-endpoint", there, ours)
                for number, (there, ours) in enumerate(
                    zip_longest(hello.candidates, own.candidates, fillvalue="missing"), 1
                )
            ),
            ("--rdzv-conf strict", str(hello.is_strict).lower(), str(own.is_strict).lower()),
        )
        return next((setting for setting in compared if setting[1] != setting[2]), None)

    def _find_twin(self, sender: Incarnation) -> NameTaken | DirectoryCopied | None:
        """Return a refusal if another live process has the sender's name or directory.

        It lives for certain if it has acknowledged a message that was sent after the sender asked first.
        """
        state, own = self.state, self.state.incarnation
        if sender.node == own.node:
            is_copy = sender.disk_id == own.disk_id
            return (
                DirectoryCopied(own.node, is_certain=True) if is_copy else NameTaken(own.node, is_alive=True)
            )
        peer, member = self.peers.by_node.get(sender.node), state.view.find_disk(sender.disk_id)
        former = peer.incarnation if peer else None
        is_same_disk = former is None or former.disk_id == sender.disk_id
        newest = max(known.boot for known in (member, former if is_same_disk else None, sender) if known)
        if newest > sender.boot:
            return DirectoryCopied(sender.node, is_certain=True)
        if peer is None or former == sender or peer.disconnected_at is not None:
            return None
        if len(self.claims) >= MAX_CLAIMS:
            self.claims.clear()
        is_alive = peer.link.acked_sent_at > self.claims.setdefault(sender, state.now)
        if not is_same_disk:
            return NameTaken(sender.node, is_alive)
        if is_alive or state.contacts.answers(peer.incarnation):
            return DirectoryCopied(sender.node, is_alive)
        return None
