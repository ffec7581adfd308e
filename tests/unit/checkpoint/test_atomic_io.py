"""Test every prefix of the disk operations as a power cut, with unsynced data lost or torn.

The model of the disk is harsher than most file systems. A file's data is durable only after fsync of the
file, and a name only after fsync of its directory. Until then any part of the data and any subset of the
names may have reached the device, in any order. Only a rename is atomic.
"""

# ruff: noqa: D102  methods of the model and the recorder do what the disk's own of that name does

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from elastic_resume import constants
from elastic_resume.checkpoint.atomic_io import DISK, Disk, translate_os_errors
from elastic_resume.checkpoint.catalog import Catalog
from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.checkpoint.reader import checkpoint_name, deep_check, parse_checkpoint_name
from elastic_resume.checkpoint.writer import CheckpointTransaction
from elastic_resume.errors import CheckpointError, MachineError
from tests.support.checkpoint_samples import RUN, SMALL_BLOCK, flip_bits, make_image, make_manifest

pytestmark = pytest.mark.slow

Files = dict[str, bytes]
TEARS = 6  # each set of surviving names is looked at with so many random tears of the data


@dataclass
class Inode:
    """A file or directory of the model; for a file, its durable and its unsynced bytes."""

    is_dir: bool
    durable: bytes = b""
    unsynced: bytes = b""


@dataclass
class Change:
    """One change of names: entries to set (to an inode) and to drop, all at once.

    After a rename from one directory to another, the new name may be durable before the old one is gone.
    """

    sets: list[tuple[int, str, int]]
    drops: list[tuple[int, str]]
    durable: bool = False
    half: bool = False  # the new name of a cross-directory rename is durable, the old one still there


@dataclass
class Model:
    """A directory tree in which a power cut may lose or tear everything that was not synced."""

    inodes: list[Inode] = field(default_factory=lambda: [Inode(is_dir=True)])
    changes: list[Change] = field(default_factory=list)
    now: dict[tuple[int, str], int] = field(default_factory=dict)

    def find(self, path: str) -> int:
        at = 0
        for part in filter(None, path.split("/")):
            at = self.now[at, part]
        return at

    def place(self, path: str) -> tuple[int, str]:
        parent, _, name = path.rpartition("/")
        return self.find(parent), name

    def change(self, sets: list[tuple[int, str, int]], drops: list[tuple[int, str]]) -> None:
        for directory, name in drops:
            del self.now[directory, name]
        for directory, name, inode in sets:
            self.now[directory, name] = inode
        self.changes.append(Change(sets, drops))

    def add(self, path: str, is_dir: bool) -> None:
        self.inodes.append(Inode(is_dir))
        self.change([(*self.place(path), len(self.inodes) - 1)], [])

    def remove(self, path: str) -> None:
        self.change([], [self.place(path)])

    def rename(self, source: str, target: str) -> None:
        self.change([(*self.place(target), self.find(source))], [self.place(source)])

    def write(self, path: str, data: bytes) -> None:
        self.inodes[self.find(path)].unsynced += data

    def replace(self, path: str, data: bytes) -> None:
        inode = self.inodes[self.find(path)]
        inode.durable, inode.unsynced = data, b""

    def sync_file(self, path: str) -> None:
        inode = self.inodes[self.find(path)]
        inode.durable, inode.unsynced = inode.durable + inode.unsynced, b""

    def sync_dir(self, path: str) -> None:
        directory = self.find(path)
        for change in self.changes:
            sets = any(at == directory for at, _, _ in change.sets)
            drops = any(at == directory for at, _ in change.drops)
            if drops or (sets and not change.drops):
                change.durable = True
            elif sets:
                change.half = True

    def images(self, random: Random, most: int) -> Iterator[Files]:
        """Yield possible trees after a power cut now: all subsets of names if few, else random ones."""
        pending = [i for i, change in enumerate(self.changes) if not change.durable]
        if 2 ** len(pending) <= most:
            subsets: list[frozenset[int]] = [
                frozenset(chosen)
                for count in range(len(pending) + 1)
                for chosen in itertools.combinations(pending, count)
            ]
        else:
            subsets = [frozenset(), frozenset(pending)]
            subsets += [frozenset(i for i in pending if random.random() < 0.6) for _ in range(most - 2)]
        for subset in subsets * TEARS:
            yield self._tree(subset, random)

    def _tree(self, applied: frozenset[int], random: Random) -> Files:
        names: dict[tuple[int, str], int] = {}
        for index, change in enumerate(self.changes):
            whole = change.durable or index in applied
            if whole:
                for place in change.drops:
                    names.pop(place, None)
            if whole or change.half:
                names.update({(at, name): inode for at, name, inode in change.sets})
        data = {i: self._torn(inode, random) for i, inode in enumerate(self.inodes) if not inode.is_dir}
        tree: Files = {}
        self._collect(names, data, 0, "", tree)
        return tree

    def _collect(
        self, names: dict[tuple[int, str], int], data: dict[int, bytes], at: int, under: str, tree: Files
    ) -> None:
        for (directory, name), inode in names.items():
            if directory != at:
                continue
            if self.inodes[inode].is_dir:
                tree[f"{under}{name}/"] = b""
                self._collect(names, data, inode, f"{under}{name}/", tree)
            else:
                tree[under + name] = data[inode]

    @staticmethod
    def _torn(inode: Inode, random: Random) -> bytes:
        """Return the synced bytes, followed by nothing, a part, zeros or all of the rest."""
        rest = inode.unsynced
        kind = random.randrange(4) if rest else 0
        if kind == 0:
            return inode.durable
        if kind == 1:
            return inode.durable + rest[: random.randrange(len(rest))]
        if kind == 2:  # the length was written, a page of the data was not
            hole = random.randrange(len(rest))
            return inode.durable + rest[:hole] + bytes(len(rest[hole : hole + 512])) + rest[hole + 512 :]
        return inode.durable + rest


Operation = Callable[[Model], None]


class RecordingDisk(Disk):
    """A real disk that records its operations, except those in ``leave_out``, and facts for the checker."""

    def __init__(self, root: Path, leave_out: str = "") -> None:
        self.operations: list[Operation | str] = []
        self._root = root
        self._leave_out = leave_out

    def add_fact(self, fact: str) -> None:
        """Insert a fact on which the checker may rely from now on."""
        self.operations.append(fact)

    def _record(self, operation: Callable[..., None], *paths: Path, **arguments: object) -> None:
        names = ["" if path == self._root else str(path.relative_to(self._root)) for path in paths]
        self.operations.append(lambda model: operation(model, *names, **arguments))

    def mkdir(self, path: Path) -> None:
        super().mkdir(path)
        self._record(Model.add, path, is_dir=True)

    def create(self, path: Path) -> int:
        descriptor = super().create(path)
        self._record(Model.add, path, is_dir=False)
        return descriptor

    def write(self, descriptor: int, data: bytes | memoryview, path: Path) -> None:
        super().write(descriptor, data, path)
        self._record(Model.write, path, data=bytes(data))

    def sync_file(self, descriptor: int, path: Path) -> None:
        if self._leave_out != "sync_file":
            super().sync_file(descriptor, path)
            self._record(Model.sync_file, path)

    def sync_dir(self, path: Path) -> None:
        if path == self._root.parent:  # the root itself is given
            return
        is_inner = parse_checkpoint_name(path.name) or path.name.startswith(constants.TEMPORARY_PREFIX)
        if self._leave_out != ("sync_inner_dir" if is_inner else "sync_outer_dir"):
            super().sync_dir(path)
            self._record(Model.sync_dir, path)

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self._record(Model.rename, source, target)

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self._record(Model.remove, path)

    def rmdir(self, path: Path) -> None:
        super().rmdir(path)
        self._record(Model.remove, path)

    def damage(self, path: Path, offset: int) -> None:
        """Flip a bit of a file permanently, without the product's knowledge."""
        flip_bits(path, offset)
        self._record(Model.replace, path, data=path.read_bytes())


class WriterThatRenamesFirst(CheckpointTransaction):
    """A defect to be found: the final name comes before the data."""

    def _finish_data(self) -> None:
        self._disk.rename(self._temporary_path, self._final_path)
        self._temporary_path = self._final_path
        super()._finish_data()

    def _is_already_committed(self, manifest: object) -> bool:  # noqa: ARG002
        return False

    def _publish(self) -> None:
        self._is_open = False
        self._disk.sync_dir(self._node_dir)


class CatalogThatKeepsName(Catalog):
    """A defect to be found: files are removed while the checkpoint has its name."""

    def _delete(self, path: Path) -> None:
        self._disk.remove_tree(path)


def commit(
    disk: RecordingDisk,
    node_dir: Path,
    order: tuple[int, int],
    seed: int = 0,
    writer: type[CheckpointTransaction] = CheckpointTransaction,
) -> Path:
    """Commit a checkpoint, and add the fact that it must be found from then on."""
    with writer(node_dir, *order, disk, block_bytes=SMALL_BLOCK) as open_writer:
        open_writer.write(make_image(seed or order[1]))
        path = open_writer.commit(make_manifest(*order))
    disk.add_fact(f"committed {path.name}")
    return path


def scenario(disk: RecordingDisk, node_dir: Path, catalog: type[Catalog] = Catalog) -> None:
    """Run the life of a node: commits, prunes, a corrupt checkpoint that is replaced, the next generation."""
    node_catalog = catalog(node_dir, RUN, disk)
    for step in (1, 2, 3):
        commit(disk, node_dir, (1, step))
        node_catalog.prune(2)
    bad = node_dir / checkpoint_name(1, 3)
    disk.add_fact(f"damaged {bad.name}")
    disk.damage(bad / constants.STATE_FILE, -1)
    commit(disk, node_dir, (1, 3))  # finds it damaged, moves it aside, writes it again
    disk.add_fact(f"damaged {bad.name}")
    disk.damage(bad / constants.MANIFEST_FILE, 40)
    node_catalog.quarantine(bad, "a flipped bit")
    for step in (2, 5):
        commit(disk, node_dir, (2, step))
        node_catalog.prune(2)


class Checker:
    """Finds defects of trees; it reads each different checkpoint directory once."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._errors: dict[frozenset[tuple[str, bytes]], str] = {}
        scratch.mkdir()

    def check(self, tree: Files, committed: set[str], damaged: set[str]) -> str:
        """Describe the defect of a tree after a power cut; empty if it has none."""
        found = {name for path in tree if parse_checkpoint_name(name := path.partition("/")[0])}
        for name in found - damaged:
            if error := self._checkpoint_error(tree, name):
                return f"under its final name and not whole: {error}"
        newest = max(committed - damaged, default=None)
        if newest is not None and newest not in found:
            return f"the newest committed checkpoint {newest} is gone"
        for name in damaged - found:
            if not any(path.startswith(f"{constants.QUARANTINE_DIR}/{name}") for path in tree):
                return f"{name} was damaged, and is neither in its place nor in quarantine"
        return ""

    def _checkpoint_error(self, tree: Files, name: str) -> str:
        files = frozenset((path, data) for path, data in tree.items() if path.startswith(f"{name}/"))
        if files not in self._errors:
            root = materialise(dict(files), self._scratch / str(len(self._errors)))
            self._errors[files] = ""
            try:
                deep_check(root / name, RUN)
            except CheckpointError as error:
                self._errors[files] = str(error)
        return self._errors[files]


def materialise(tree: Files, root: Path) -> Path:
    """Write a tree of the model to the real disk."""
    root.mkdir()
    for name in sorted(tree):
        if name.endswith("/"):
            (root / name).mkdir()
        else:
            (root / name).write_bytes(tree[name])
    return root


def crashes(
    operations: list[Operation | str], seed: int, most: int = 64
) -> Iterator[tuple[tuple[str, ...], Files]]:
    """Cut the power after every operation in turn; yield the facts known by then and each possible tree."""
    model, random, facts = Model(), Random(seed), []
    for operation in operations:
        if isinstance(operation, str):
            facts.append(operation)
        else:
            operation(model)
        for tree in model.images(random, most):
            yield tuple(facts), tree


def problems(operations: list[Operation | str], scratch: Path, seed: int = 0) -> Iterator[str]:
    """Yield the result of `Checker.check` for each tree that a power cut may leave."""
    checker = Checker(scratch)
    for facts, tree in crashes(operations, seed):
        kinds = {name: kind for kind, name in (fact.split() for fact in facts)}  # the last fact counts
        damaged = {name for name, kind in kinds.items() if kind == "damaged"}
        yield checker.check(tree, set(kinds), damaged)


def record(tmp_path: Path, leave_out: str = "", catalog: type[Catalog] = Catalog) -> list[Operation | str]:
    """Run the scenario once and return its disk operations."""
    node_dir = tmp_path / "node"
    node_dir.mkdir()
    disk = RecordingDisk(node_dir, leave_out)
    scenario(disk, node_dir, catalog)
    return disk.operations


@pytest.mark.parametrize("seed", range(6))
def test_power_cut_leaves_whole_checkpoints_and_newest_one(tmp_path: Path, seed: int) -> None:
    """Whatever was lost or torn, final names verify deeply and the newest commit is there."""
    operations = record(tmp_path)
    assert set(problems(operations, tmp_path / "after", seed)) == {""}


def test_power_cut_while_replacing_checkpoint_loses_no_content(tmp_path: Path) -> None:
    """The name may be missing for a moment, but the first content stays, here or in quarantine."""
    node_dir = tmp_path / "node"
    node_dir.mkdir()
    disk = RecordingDisk(node_dir)
    first = commit(disk, node_dir, (1, 1), seed=1)
    state = (first / constants.STATE_FILE).read_bytes()
    disk.add_fact("replacing")
    commit(disk, node_dir, (1, 1), seed=2)
    checker = Checker(tmp_path / "after")
    for facts, tree in crashes(disk.operations, 3):
        if "replacing" in facts:
            assert state in [data for path, data in tree.items() if path.endswith(constants.STATE_FILE)]
            assert checker.check(tree, set(), set()) == ""


def test_power_cut_keeps_checkpoint_that_another_writer_had_not_synced(tmp_path: Path) -> None:
    """A process was killed after its rename; the next one reports the checkpoint as committed."""
    node_dir = tmp_path / "node"
    node_dir.mkdir()
    disk = RecordingDisk(node_dir, "sync_outer_dir")
    commit(disk, node_dir, (1, 1))
    disk.operations.pop()  # the first writer told nobody
    disk._leave_out = ""
    commit(disk, node_dir, (1, 1))
    assert set(problems(disk.operations, tmp_path / "after")) == {""}


@pytest.mark.parametrize("leave_out", ["sync_file", "sync_inner_dir", "sync_outer_dir"])
def test_checker_finds_each_missing_sync(tmp_path: Path, leave_out: str) -> None:
    """This proves that the checker above is not blind."""
    operations = record(tmp_path, leave_out)
    assert any(problems(operations, tmp_path / "after"))


def test_checker_finds_rename_before_data(tmp_path: Path) -> None:
    """This proves that the checker above is not blind."""
    node_dir = tmp_path / "node"
    node_dir.mkdir()
    disk = RecordingDisk(node_dir)
    commit(disk, node_dir, (1, 1), writer=WriterThatRenamesFirst)
    assert any("not whole" in problem for problem in problems(disk.operations, tmp_path / "after"))


def test_checker_finds_removal_under_final_name(tmp_path: Path) -> None:
    """This proves that the checker above is not blind."""
    operations = record(tmp_path, catalog=CatalogThatKeepsName)
    assert any("not whole" in problem for problem in problems(operations, tmp_path / "after"))


def test_power_cut_never_decreases_generation(tmp_path: Path) -> None:
    """The file is old or new, never torn."""
    ckpt_dir = tmp_path / "ckpt"
    disk = RecordingDisk(ckpt_dir)
    ckpt_dir.mkdir()
    node = NodeDir.attach(ckpt_dir, RUN, "a", disk)
    disk.add_fact("generation 0")
    for generation in (1, 2, 7):
        node.persist_generation(generation)
        disk.add_fact(f"generation {generation}")
    for number, (facts, tree) in enumerate(crashes(disk.operations, 1, 32)):
        root = materialise(tree, tmp_path / f"after-{number}")
        if facts:
            known = int(facts[-1].split()[1])
            assert known <= NodeDir(root / RUN / "a").read_generation() <= 7


def test_power_cut_never_changes_identity(tmp_path: Path) -> None:
    """After the first claim there is this identity; before, this one or none."""
    ckpt_dir = tmp_path / "ckpt"
    disk = RecordingDisk(ckpt_dir)
    ckpt_dir.mkdir()
    with NodeDir.claim(ckpt_dir, RUN, "a", disk=disk) as node:
        identity = node.read_identity()
        disk.add_fact("claimed")
    for number, (facts, tree) in enumerate(crashes(disk.operations, 1, 32)):
        root = materialise(tree, tmp_path / f"after-{number}")
        assert NodeDir(root / RUN / "a").read_identity() in ({identity} if facts else {"", identity})


def test_power_cut_keeps_directories_of_make_dirs(tmp_path: Path) -> None:
    """The names of new parents were synced too."""
    root = tmp_path / "root"
    root.mkdir()
    disk = RecordingDisk(root)
    disk.make_dirs(root / "ckpt" / "run" / "node")
    *_, (_, tree) = crashes(disk.operations, 0)
    assert "ckpt/run/node/" in tree


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return the list of the system calls that make files durable, with the names of their files."""
    made: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def record_fsync(descriptor: int) -> None:
        made.append(("fsync", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        fsync(descriptor)

    def record_rename(source: Path, target: Path) -> None:
        made.append(("rename", target.name))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    return made


def test_disk_asks_the_kernel_for_each_sync(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    """The models above know what `Disk` is asked for, and not what it does."""
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    DISK.make_dirs(tmp_path / "run" / "node")
    assert calls[-2:] == [("fsync", tmp_path.name), ("fsync", "run")]
    calls.clear()
    DISK.write_atomic(tmp_path / "run" / "file", b"new")
    (_, temporary), *rest = calls
    assert (temporary.startswith(constants.TEMPORARY_PREFIX), rest) == (
        True,
        [("rename", "file"), ("fsync", "run")],
    )
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208
    with pytest.raises(MachineError, match=r"cannot create .*File exists"):
        DISK.create(tmp_path / "run" / "file")
    with pytest.raises(MachineError, match=r"cannot sync directory .*Not a directory"):
        DISK.sync_dir(tmp_path / "run" / "file")


def test_disk_removes_links_and_temporary_files_only(tmp_path: Path) -> None:
    """A link in a checkpoint's place may lead to a directory of its user."""
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    (tmp_path / "tree").mkdir()
    for link in (tmp_path / "tree" / "link", tmp_path / "link"):
        link.symlink_to(kept)
    for path in (tmp_path / "tree", tmp_path / "link"):
        DISK.remove_tree(path)
    with pytest.raises(MachineError, match="cannot rename"):
        DISK.write_atomic(kept, b"a directory is there")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (kept / "file").exists()


@pytest.mark.parametrize(("number", "is_ignored"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_failed_sync_of_directory_is_an_error_unless_unsupported(
    number: int, is_ignored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network file systems refuse it."""

    def fail(_: int) -> None:
        raise OSError(number, "refused")

    monkeypatch.setattr(os, "fsync", fail)
    with (
        contextlib.nullcontext() if is_ignored else pytest.raises(MachineError, match="cannot sync directory")
    ):
        DISK.sync_dir(tmp_path)


@pytest.mark.parametrize(("number", "written"), [(errno.EINVAL, 4096), (errno.EIO, 0)])
def test_direct_write_is_repeated_only_where_it_is_unsupported(
    number: int, written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that fails is an error at once."""
    write = os.write

    def fail_once(*_: object) -> int:
        monkeypatch.setattr(os, "write", write)
        raise OSError(number, "refused")

    page = mmap.mmap(-1, 4096)
    descriptor = DISK.create(tmp_path / "file")
    monkeypatch.setattr(os, "write", fail_once)
    with contextlib.nullcontext() if written else pytest.raises(MachineError, match="refused"):
        DISK.write(descriptor, memoryview(page), tmp_path / "file")
    assert (
        not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
    )  # which would refuse an odd number of bytes
    os.close(descriptor)
    assert (tmp_path / "file").stat().st_size == written


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without rights")
def test_make_dirs_makes_directory_in_one_that_it_may_not_read(tmp_path: Path) -> None:
    """A directory that cannot be read cannot be synced either."""
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked").chmod(0o333)
    code = (
        "import os; from pathlib import Path; from elastic_resume.checkpoint.atomic_io import DISK;"
        " os.chdir(os.sys.argv[1]); os.setuid(65534); DISK.make_dirs(Path('new'))"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "locked"], check=True)
    assert (tmp_path / "locked" / "new").is_dir()


class DiskBesideAnotherNode(Disk):
    """Another node makes the same directories at the same time, or removes them."""

    def __init__(self, *, makes: bool) -> None:
        self.makes = makes

    def mkdir(self, path: Path) -> None:
        """Fail, since the other node was first."""
        if self.makes:
            path.mkdir()
        raise MachineError(f"cannot make directory {path}")


def test_make_dirs_accepts_directory_that_another_node_has_just_made(tmp_path: Path) -> None:
    """It raises the error if there is none then."""
    DiskBesideAnotherNode(makes=True).make_dirs(tmp_path / "run" / "node")
    assert (tmp_path / "run" / "node").is_dir()
    with pytest.raises(MachineError, match="cannot make directory"):
        DiskBesideAnotherNode(makes=False).make_dirs(tmp_path / "other")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError("odd"), "cannot write /x: odd; check the directory"),
        (OSError(errno.ENOSPC, "full"), "cannot write /x: full; free space there"),
        (OSError(errno.ELOOP, "loop"), "cannot write /x: loop; check the directory"),
    ],
)
def test_error_says_what_failed_where_why_and_what_to_do(error: OSError, text: str) -> None:
    """An error of a library may have no number."""
    with pytest.raises(MachineError, match=text), translate_os_errors("write", Path("/x")):
        raise error


def test_replayed_record_equals_disk(tmp_path: Path) -> None:
    """With nothing lost, the record gives the tree that is on the disk."""
    operations = record(tmp_path)
    model = Model()
    for operation in operations:
        if not isinstance(operation, str):
            operation(model)
    for inode in model.inodes:
        inode.durable, inode.unsynced = inode.durable + inode.unsynced, b""
    tree = model._tree(frozenset(range(len(model.changes))), Random(0))
    node_dir = tmp_path / "node"
    real = {
        str(path.relative_to(node_dir)) + "/" * path.is_dir(): b"" if path.is_dir() else path.read_bytes()
        for path in node_dir.rglob("*")
    }
    assert tree == real
