"""The third tier: checkpoints in an object store or a shared directory, which outlive all nodes and disks.

::

    ADDRESS/RUN_ID/log/00000017           one entry per archived checkpoint, numbered from 1
    ADDRESS/RUN_ID/parts/ATTEMPT/00000    bytes of its image, `part_bytes` each
    ADDRESS/RUN_ID/events/NODE.jsonl      the node's newest events, for ``report``

An attempt to archive a checkpoint has a number and a unique id. Its commit is one object that is created only
if it does not exist, as in the transaction log of Delta Lake:

1. At its start, the number is the first free one behind the last entry. It never changes within the attempt.
2. The parts are put below the attempt's id. No reader looks for them there.
3. The entry is put under the number, if there is none. If there is one, it is our own, whose answer was lost,
   or that of a second writer: `SecondWriterError`.
4. If the log has an entry of a greater number now, ours was one that a second writer had used and pruned: the
   same error.

**Two jobs.** An attempt's id has its job's writer. An attempt does not begin if another writer of an equal or
newer generation has put an entry since this job began to archive, or has archived other content of this step
and node.
An older generation is a job that was replaced, and wakes up: it does not count.

So an archived checkpoint exists whole or not at all, whichever process dies where.

**Sweep.** Parts of attempts that no entry names are deleted after a commit, if they were listed before that
commit. Whoever had begun such an attempt had seen an older log. Its number is therefore taken (3), or smaller
than the newest (4), and it cannot commit. If the store is full, no commit may come. Then whoever has begun an
attempt deletes those that were there before it, of its own job or of an older generation: a job makes one
attempt at a time, and such ones were given up.

**Names.** Entries never change. A checkpoint that is named later gets a further entry with the same parts,
whose milestones are those of all its entries.

**Order.** (generation, step, epoch) orders checkpoints, not the number: the entry of a milestone, a name or
a late job may come after a newer one. Each entry has the greatest of the log. So a reader that knows the
newest entry knows whether the log has anything newer than its own state.

**Other objects.** An object of the log that does not begin as an entry is none, whatever its name is: numbers
go on behind the last entry, past names that are taken. An object that is no entry, or one that is damaged or
of a newer format, may name any parts as far as a writer can tell. While it is there, no parts are deleted.

**Prune.** An entry goes before its parts, which stay while another entry names them. The entry with the
greatest number stays, because it numbers the next one. A person may remove entries while a job runs, and
their numbers are given again. So the entries are read anew before parts are deleted.
"""
