"""Track what a Trainer logs, and what it and its callbacks hold as plain attributes.

The ranks exchange both at each step boundary. A rank sends each of its changed attributes as JSON, or a
digest of a long one, which is kept if all ranks have the same. So no table says which attributes a class of
Trainer or callback has. What cannot be kept is named once.
"""

from __future__ import annotations

import base64
import datetime as dt
import dis
import io
import json
import logging
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sized
from tempfile import _TemporaryFileWrapper
from types import CodeType
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from elastic_resume.capture.source_digests import digest_words
from elastic_resume.checkpoint import json_codec
from elastic_resume.data.rank_values import RankState
from elastic_resume.errors import UntrackableError
from elastic_resume.integrations.plain_attributes import (
    SCALARS,
    Clocks,
    Form,
    NotPlainError,
    Owners,
    assign,
    is_of_script,
    list_attributes,
    list_items,
    list_module_attributes,
    list_script_modules,
    read,
)
from elastic_resume.state.diff import MEASURED
from elastic_resume.state.state_dict import DTYPE_BY_NAME, NAME_BY_DTYPE, unwrap, view_bytes

logger = logging.getLogger(__name__)

MAX_CHARS = 4096  # of one attribute in the exchange of each step
MAX_NUMBERS = 64  # of the tensors of one attribute there
IGNORED = (io.IOBase, _TemporaryFileWrapper, dt.date, dt.time, dt.timedelta)
FIRST_STEPS = 3  # at which all attributes are read
STEPS_PER_SWEEP = 50  # at which they are read again
SIZED = frozenset({list, tuple, dict, set, deque, OrderedDict, defaultdict})
SHORT_CHARS = 200  # of a list or dict that is read at every step
Row = dict[str, Any]


class LogHistory(RankState):
    """`TrainerState.log_history`, as rank 0 has it: of each entry the results, and what was measured."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self._trainer = trainer

    def read_own(self) -> list[Any]:
        """Return the entries since the last step boundary, and how many were before."""
        entries = self._trainer.state.log_history
        start = min(len(self._rows or ()), len(entries))
        return [start, list(map(_divide_entry, entries[start:]))]

    def set_rows(self, rows: list[Any]) -> None:
        """Add those of rank 0."""
        start, entries = rows[0]
        self._rows = self._rows or []
        self._rows[start:] = entries

    def load_rows(self, rows: list[Any]) -> None:
        """Set the Trainer's list."""
        self._trainer.state.log_history = [
            {**json.loads(results), **json.loads(measured)} for results, measured in rows
        ]


def _divide_entry(entry: Mapping[str, Any]) -> list[str]:
    """Return an entry's results as JSON, which a restart computes once more, and what it has measured."""
    parts: list[Row] = [{}, {}]
    for key, value in entry.items():
        parts[MEASURED.search(key) is not None][key] = value
    return [json.dumps(part, default=_to_plain) for part in parts]


def _to_plain(value: Any) -> Any:
    """Return a number of numpy or torch as one of Python."""
    return value.item() if getattr(value, "size", None) == 1 or getattr(value, "ndim", 1) == 0 else str(value)


class ChangedAttributes(RankState):
    """The attributes of a Trainer and its callbacks that have changed since `begin`."""

    def __init__(self, trainer: Any, known: frozenset[str], tracked: list[Any]) -> None:
        """Leave out the attributes ``known`` of the Trainer, and ``tracked`` objects: others restore them."""
        super().__init__()
        self._trainer, self._tracked = trainer, {id(unwrap(item)) for item in tracked}
        models = [unwrap(item) for item in tracked if isinstance(item, nn.Module)]
        self._parameters = {id(parameter) for model in models for parameter in model.parameters()}
        self._rank: int = trainer.args.process_index
        self._excluded = known
        self._owners: Owners | None = None  # None until `begin`
        self._baseline: dict[str, Form | tuple[Any, str]] = {}  # of each attribute that has not changed
        self._clocks = Clocks()
        self._known_owners: dict[int, Any] = {}
        self._owner_ids: frozenset[int] = frozenset()  # others are found within these
        self._forms: dict[str, Form] = {}  # of those that have
        self._values: list[Any] = []  # so that `training.untracked` takes averages among them for tracked
        self._digests: dict[str, tuple[Any, str]] = {}  # of large tensors, with their versions
        self._activations: set[str] = set()
        self._boundaries = 0
        self._places: list[tuple[str, Any, str]] = []  # of the last walk: path, object, name
        self._sizes: list[tuple[Row, int]] = []
        self._objects: list[tuple[Row, str, Any]] = []  # those that the walk has entered
        self._marks: dict[str, tuple[Any, int]] = {}  # of those that need no reading: value and length
        self._refused: set[str] = set()
        self._named: list[str] = []  # of these, in the log of any generation
        self._shared: dict[str, Form] = {}
        self._loaded: dict[str, Form] = {}

    def list_owners(self) -> Owners:
        """Return the objects whose attributes count: a library's callback shows its progress in its own."""
        owners: dict[str, tuple[Any, frozenset[str]]] = {
            type(self._trainer).__name__: (self._trainer, self._excluded)
        }
        for callback in self._trainer.callback_handler.callbacks:
            if not type(callback).__module__.startswith(("transformers.", "elastic_resume.")):
                name, count = type(callback).__name__, 2
                while name in owners:
                    name, count = f"{type(callback).__name__} {count}", count + 1
                owners[name] = callback, frozenset()
        for name in ("compute_loss_func", "compute_metrics", "data_collator"):
            if is_of_script(item := getattr(self._trainer, name, None)):
                owners[name] = item, frozenset()
        for name in ("train_dataset", "eval_dataset"):  # their numbers only: they also keep samples
            if is_of_script(item := getattr(self._trainer, name, None)):
                kept = (each for each, value in vars(item).items() if type(value) not in SCALARS)
                owners[name] = item, frozenset(kept)
        return {**owners, **list_script_modules(unwrap(self._trainer.model))}

    def begin(self) -> None:
        """Set what was loaded, and notice changes from now on: the first epoch is about to begin."""
        self._owners = self.list_owners()
        self._known_owners = {id(owner): owner for owner, _ in self._owners.values()}
        self._owner_ids = frozenset(self._known_owners)
        self._boundaries = 0
        self.set_loaded()
        self._clocks = Clocks()
        self._values = [value for _, value, _, _ in self._iter_values() if type(value) not in SCALARS]
        for path, value, owner, _ in self._iter_values():
            self._known_owners[id(owner)] = owner
            try:
                self._baseline[path] = read(value)
            except NotPlainError as error:
                self._baseline[path] = value, _describe(value, error)

    def set_loaded(self) -> None:
        """Set the attributes of the restored state."""
        places = {path: (owner, name) for path, _, owner, name in self._iter_values()} if self._loaded else {}
        for path, form in self._loaded.items():
            title, _, name = path.rpartition(".")
            owner = places[path][0] if path in places else (self._owners or {}).get(title, (None,))[0]
            if owner is not None:  # an attribute may have been made in training
                assign(owner, name, form, self._trainer.args.device)
            else:
                self._refuse(path, "of an object that this process does not have")

    def forget_loaded(self) -> None:
        """Free what was loaded."""
        self._loaded = {}

    def _iter_values(self) -> Iterator[tuple[str, Any, Any, str]]:
        for path, owner, name in list_attributes(self._owners or {}):
            value = vars(owner)[name]
            if self._is_tracked(value):
                continue
            yield path, value, owner, name
            for title, item in list_items(path, value).items():
                if issubclass(type(item), nn.Module) and not self._is_tracked(item):
                    for inner, module, each in list_module_attributes(title, item):
                        yield inner, vars(module)[each], module, each

    def _is_tracked(self, value: Any) -> bool:
        """Return whether ``value`` is restored elsewhere: the model, a part of it, the optimizer."""
        if type(value) in SCALARS:
            return False
        try:
            if id(unwrap(value)) in self._tracked:
                return True
            return isinstance(value, nn.Module) and any(id(p) in self._parameters for p in value.parameters())
        except Exception:  # noqa: BLE001  a proxy's __getattr__ or __class__ may raise anything
            return True  # nothing can be said of it

    # ---- what the ranks exchange ---------------------------------------------------------------------

    def read_own(self) -> Row:
        """Return the changed attributes as JSON, or a digest of them, by path."""
        rows: Row = {}
        self._boundaries += 1
        is_sweep = self._boundaries <= FIRST_STEPS or self._boundaries % STEPS_PER_SWEEP == 0
        if is_sweep or self._is_rearranged():
            self._walk()
        for path, owner, name in self._places:
            value = vars(owner).get(name)
            if path in self._refused or not (is_sweep or self._is_due(path, value)):
                continue
            is_inner = issubclass(type(owner), nn.Module) and id(owner) not in self._owner_ids
            if is_inner and path not in self._baseline and path not in self._forms:
                continue  # of a module that training has made
            if not is_inner and id(owner) not in self._known_owners:
                rows[path] = {"refused": f"of a {type(owner).__name__} that training has made"}
                continue
            try:
                if (form := self._read_if_changed(path, value)) is not None:
                    rows[path] = self._make_row(path, form)
                    self._forms[path] = form
            except (NotPlainError, UntrackableError) as error:
                if not is_inner:
                    rows[path] = {"refused": str(error)}
        return rows

    def _walk(self) -> None:
        """Find the attributes, and remember what shows that there are others."""
        self._places = [(path, owner, name) for path, _, owner, name in self._iter_values()]
        held = {id(owner): vars(owner) for _, owner, _ in self._places}
        self._sizes = [(attributes, len(attributes)) for attributes in held.values()]
        self._objects = [
            (attributes, name, value)
            for attributes in held.values()
            for name, value in attributes.items()
            if type(value) not in SCALARS and is_of_script(value)
        ]

    def _is_rearranged(self) -> bool:
        """Return whether an object has gained or lost attributes, or an object in it was exchanged."""
        return any(len(attributes) != size for attributes, size in self._sizes) or any(
            attributes.get(name) is not value for attributes, name, value in self._objects
        )

    def _is_due(self, path: str, value: Any) -> bool:
        """Return whether to read an attribute between two sweeps: it has changed before, or seems to have.

        A long list or dict that first changes after the first steps, in place and not in length, is found by
        the next sweep. The answer follows from the attribute alone, so that all ranks find it at one step.
        """
        mark = self._marks.get(path)
        if mark is None or mark[0] is not value:
            return True
        if type(value) in SCALARS:
            return False
        form = self._baseline.get(path)
        return mark[1] != _get_length(value) or (isinstance(form, Form) and not form.seems_same())

    def _mark(self, path: str, value: Any) -> None:
        """Remember an unchanged attribute. Short lists and dicts get no mark: each step reads them."""
        before = self._baseline.get(path)
        is_flat_tuple = type(value) is tuple and set(map(type, value)) <= SCALARS
        if (
            type(value) in SCALARS
            or is_flat_tuple
            or isinstance(value, Tensor)
            or not isinstance(before, Form)
            or len(repr(before.skeleton)) > SHORT_CHARS
        ):
            self._marks[path] = value, _get_length(value)

    def _read_if_changed(self, path: str, value: Any) -> Form | None:
        """Return the form of an attribute that has ever changed. Raise NotPlainError if it has none."""
        before = self._baseline.get(path)
        try:
            form = read(value)
        except NotPlainError as error:
            if isinstance(value, IGNORED):
                return None
            if hasattr(type(value), "__next__"):
                raise NotPlainError(f"{error}, of which the next item depends on the former ones") from None
            if isinstance(before, tuple) and before[0] is value and before[1] == _describe(value, error):
                self._mark(path, value)
                return None
            raise
        if path not in self._forms:
            if isinstance(before, Form) and form.is_same(before):
                self._mark(path, value)
                return None
            self._marks.pop(path, None)
            if self._clocks.have_shown(form.skeleton):
                return None
            self._baseline.pop(path, None)  # it may keep a large tensor
        return form if not self._is_activation(path, form) else None

    def _is_activation(self, path: str, form: Form) -> bool:
        """Return whether large tensors are, or were before an evaluation, results of a forward pass."""
        if form.count_numbers() > MAX_NUMBERS and any(t.grad_fn is not None for t in form.tensors):
            self._activations.add(path)
        return path in self._activations

    def _make_row(self, path: str, form: Form) -> Any:
        text = repr(form.skeleton)  # ten times as fast as to encode it
        if len(text) <= MAX_CHARS and form.count_numbers() <= MAX_NUMBERS:
            self._digests.pop(path, None)  # the addresses of its tensors may be taken again
            encoded = json_codec.encode(form.skeleton, path)
            return {"value": encoded, "tensors": [_pack(tensor) for tensor in form.tensors]}
        if "{" in text:
            text = repr(_sort_sets(form.skeleton))
        return {"digest": xxhash.xxh3_128(f"{text} {self._digest_tensors(path, form)}".encode()).hexdigest()}

    def _digest_tensors(self, path: str, form: Form) -> str:
        """Digest the tensors on their devices, unless they are as at the last boundary."""
        before = self._digests.get(path)
        if before is None or before[0] != form.versions or any(t.is_inference() for t in form.tensors):
            digest = xxhash.xxh3_128()
            for tensor in form.tensors:
                words = digest_words(tensor.detach().contiguous().view(-1))
                digest.update(view_bytes(words.cpu()) if words.numel() else b"")
            before = self._digests[path] = form.versions, digest.hexdigest()
        return before[1]

    def set_rows(self, rows: list[Any]) -> None:
        """Keep the rows of all ranks, and the long attributes that are the same on all ranks."""
        if self._owners is None and self._rows:
            return  # restored, and not yet set
        self._shared = {}
        others = dict.fromkeys(path for row in rows for path, each in row.items() if "value" not in each)
        for path in others:
            each = [row.get(path) for row in rows]
            reasons = [one["refused"] for one in each if isinstance(one, dict) and "refused" in one]
            if reasons or each.count(each[0]) < len(each):
                self._refuse(path, (reasons or ["large, and differs between ranks"])[0])
            else:
                self._shared[path] = self._forms[path]
        self._rows = [{path: each for path, each in row.items() if path not in others} for row in rows]

    def _refuse(self, path: str, reason: str) -> None:
        """Name once what cannot be kept."""
        self._refused.add(path)
        self._forms.pop(path, None)
        self._marks.pop(path, None)
        is_new = path not in self._named
        self._named += [path] * is_new
        if is_new and self._rank == 0:
            logger.warning(
                f"WARNING: {path} has changed since train() began, and a restart loses what it holds: it is "
                f"{reason}. Keep there numbers, lists, dicts, tensors or an object with state_dict() and "
                "load_state_dict(). Ignore this if nothing depends on it."
            )

    # ---- the saved state -------------------------------------------------------------------------------

    def state_dict(self) -> Row:
        """Return the rows of all ranks, and what all ranks share, with its tensors."""
        return {
            "values": self._rows or [],
            "shared": {path: form.fill() for path, form in self._shared.items()},
            "named": self._named,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep this rank's attributes for `begin`."""
        rows = list(state["values"])
        self._rows, self._named = rows, list(state["named"])
        self._shared = {path: read(value) for path, value in state["shared"].items()}
        self._loaded = dict(self._shared)
        self.load_rows(rows)
        self._forms = dict(self._loaded)

    def load_rows(self, rows: list[Any]) -> None:
        """Take this rank's row. In a world of another size that is the row of the rank modulo its size."""
        if not rows:
            return
        if len(rows) != self._trainer.args.world_size and self._rank == 0:
            names = [path for path in rows[0] if any(row.get(path) != rows[0][path] for row in rows)]
            if names:
                logger.warning(
                    f"WARNING: {', '.join(names[:4])}: each rank had its own, and the number of ranks has "
                    f"changed from {len(rows)} to {self._trainer.args.world_size}. Rank r continues with "
                    f"those of rank r modulo {len(rows)}."
                )
        for path, row in rows[self._rank % len(rows)].items():
            tensors = tuple(map(_unpack, row["tensors"]))
            self._loaded[path] = Form(json_codec.decode(row["value"]), tensors)


def list_own_attributes(*kinds: type) -> frozenset[str]:
    """Return the names of the attributes that the methods of some classes set on ``self``."""
    names: set[str] = set()
    codes = [
        function.__code__
        for kind in kinds
        for member in vars(kind).values()
        if hasattr(function := getattr(member, "__wrapped__", getattr(member, "fget", member)), "__code__")
    ]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        loaded = None
        for each in dis.get_instructions(code):
            if each.opname == "STORE_ATTR" and loaded == "self":
                names.add(each.argval)
            if each.opname != "EXTENDED_ARG":  # it comes between, for a name with a great index
                loaded = each.argval[1] if each.opname == "LOAD_FAST_LOAD_FAST" else each.argval
    return frozenset(names)


def _get_length(value: Any) -> int:
    return len(value) if type(value) in SIZED else 0


def _describe(value: Any, error: NotPlainError) -> str:
    """Describe a value that cannot be compared: its kind, and its length if it has one."""
    try:
        return f"{error} {len(value) if isinstance(value, Sized) else ''}"
    except Exception:  # noqa: BLE001  of a __len__() of the script's
        return str(error)


def _sort_sets(value: Any) -> Any:
    """Return ``value`` with lists for its sets: their order differs between processes."""
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, map(_sort_sets, value)))
    if isinstance(value, dict):
        return [(key, _sort_sets(item)) for key, item in value.items()]
    return [_sort_sets(item) for item in value] if isinstance(value, (list, tuple, deque)) else value


def _pack(tensor: Tensor) -> list[Any]:
    here = tensor.detach().cpu().contiguous()
    data = base64.b64encode(view_bytes(here) if here.numel() else b"").decode()
    return [NAME_BY_DTYPE[here.dtype], list(here.shape), data]


def _unpack(packed: list[Any]) -> Tensor:
    dtype, shape, data = packed
    if not data:
        return torch.empty(shape, dtype=DTYPE_BY_NAME[dtype])
    return torch.frombuffer(bytearray(base64.b64decode(data)), dtype=DTYPE_BY_NAME[dtype]).reshape(shape)
