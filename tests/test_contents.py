"""Checkpoints of every format, made by those who define it, and read without running anything."""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import struct
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save_state

import elastic_resume as er
from elastic_resume import contract
from elastic_resume.errors import (
    CheckpointError,
    CorruptError,
    ForeignError,
    MismatchError,
    NoValidCheckpointError,
    TornError,
    UsageError,
)
from elastic_resume.worker import contents, distcp
from tests import store_samples
from tests.test_export import equal, save


def model() -> nn.Sequential:
    """Two layers, a buffer, tied weights and a complex number."""
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    net[2].weight = net[0].weight
    net.register_buffer("z", torch.tensor([1 + 2j]))
    return net


def trained() -> tuple[nn.Sequential, torch.optim.Adam]:
    """A model and its optimizer after a step."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return net, optimizer


def dcp_save(state: dict[str, Any], path: Path) -> Path:
    """As a script without a process group does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # torch 2.10's own
        with pytest.warns(UserWarning, match="single process"):
            dcp_save_state(state, checkpoint_id=path)
    return path


def unpickled(data: bytes) -> Any:
    """What DCP wrote in this test, to be changed by hand."""
    return pickle.loads(data)  # noqa: S301  nobody else wrote it


def same(one: Any, other: Any) -> bool:
    """Whether two nested states are alike, bit for bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_every_format_gives_the_same_state(tmp_path: Path) -> None:
    """Names, types, bits and ties; an optimizer takes what comes out."""
    net, optimizer = trained()
    state, steps = net.state_dict(), optimizer.state_dict()
    whole = {"model": state, "optimizer": steps, "epoch": 3}
    torch.save(whole, tmp_path / "m.pt")
    torch.save(whole, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    ours = save(tmp_path / "ckpt" / "job" / "n0", 7, model=net, optimizer=optimizer)
    for path in (tmp_path / "m.pt", tmp_path / "legacy.pt", dcp_save(whole, tmp_path / "dcp"), ours):
        loaded = er.load(path)
        assert equal(loaded, state)
        tied = loaded["0.weight"].data_ptr() == loaded["2.weight"].data_ptr()
        assert tied == (path.name != "dcp")  # which stores each name
        again = torch.optim.Adam(model().parameters())
        again.load_state_dict(er.load(path, "optimizer"))
        assert same(again.state_dict(), steps)
        assert (er.load(path, None).get("epoch") == 3) == (path != ours)
    apart = {name: tensor.clone() for name, tensor in state.items()}
    safetensors.torch.save_file(apart, tmp_path / "m.safetensors")
    assert equal(er.load(tmp_path / "m.safetensors"), state)
    with pytest.raises(UsageError, match=r"holds no 'optimizer'; there is: .*'0\.weight'"):
        er.load(tmp_path / "m.safetensors", "optimizer")


def test_what_is_loaded_stays_when_the_file_goes(tmp_path: Path) -> None:
    """Nothing keeps pointing into it."""
    torch.save({"w": torch.arange(4.0)}, tmp_path / "m.pt")
    loaded = er.load(tmp_path / "m.pt")
    os.truncate(tmp_path / "m.pt", 0)
    assert loaded["w"].tolist() == [0, 1, 2, 3]


def test_a_directory_of_checkpoints_gives_the_newest_valid_one(tmp_path: Path) -> None:
    """Of a node or of a whole run; what is damaged is passed over, and an error where nothing else is."""
    old = save(tmp_path / "job" / "n0", 3, model=model())
    newer = model()
    nn.init.zeros_(newer.get_parameter("0.weight"))
    new = save(tmp_path / "job" / "n1", 4, model=newer)
    assert equal(er.load(tmp_path / "job"), newer.state_dict())
    assert equal(er.load(tmp_path), newer.state_dict())
    assert equal(er.load(new / contract.MANIFEST_FILE), newer.state_dict())
    store_samples.flip(new / contract.STATE_FILE, -5)
    assert equal(er.load(tmp_path / "job"), model().state_dict())
    assert equal(er.load(old.parent), model().state_dict())
    store_samples.flip(old / contract.STATE_FILE, -5)
    with pytest.raises(NoValidCheckpointError, match=r"digest.*; .*digest"):
        er.load(tmp_path / "job")
    save(tmp_path / "other" / "n0", 3, model=model())
    with pytest.raises(UsageError, match="holds 2 runs; give one of them: job, other"):
        er.load(tmp_path)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("key", ["state_dict", "model", "model_state_dict", "net", ""])
def test_keys_and_prefixes_of_common_scripts(tmp_path: Path, key: str, prefix: str) -> None:
    """A script's own wrapping is no part of a model."""
    wrapped = OrderedDict((prefix + name, tensor) for name, tensor in model().state_dict().items())
    torch.save({key: wrapped, "epoch": 1} if key else wrapped, tmp_path / "m.pt")
    assert equal(er.load(tmp_path / "m.pt"), model().state_dict())


def test_two_keys_that_could_be_the_model(tmp_path: Path) -> None:
    """Nobody guesses; the object's own name decides where there is one."""
    torch.save({"net": {"w": torch.zeros(1)}, "state_dict": {"w": torch.ones(1)}}, tmp_path / "m.pt")
    with pytest.raises(MismatchError, match="'state_dict' and 'net' could both be the model"):
        er.load(tmp_path / "m.pt")
    assert er.load(tmp_path / "m.pt", "net")["w"].tolist() == [0]
    torch.save({"model": {"w": torch.zeros(1)}, "net": {"w": torch.ones(1)}}, tmp_path / "m.pt")
    assert er.load(tmp_path / "m.pt")["w"].tolist() == [0]
    torch.save({"model": {"width": 64}, "net": {"w": torch.ones(1)}}, tmp_path / "m.pt")
    assert er.load(tmp_path / "m.pt")["w"].tolist() == [1]


def test_sharded_safetensors(tmp_path: Path) -> None:
    """Several files and their index; tensors may begin at any byte."""
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "1.safetensors")
    header = b'{"u":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
    header += b'"b":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}}'
    body = b"\x07" + struct.pack("<f", 2.5)
    (tmp_path / "2.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + body)
    index: dict[str, Any] = {"metadata": {}, "weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        loaded = er.load(path)
        assert {name: tensor.tolist() for name, tensor in loaded.items()} == {"a": [1, 1], "b": [2.5]}
    for file in ("../1.safetensors", "/etc/passwd", 3, "3.safetensors"):
        index["weight_map"] = {"a": file}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=r"which is no safetensors file beside it|3\.safetensors"):
            er.load(tmp_path)


def test_pieces_of_several_ranks_are_put_together(tmp_path: Path) -> None:
    """A DCP tensor that lies in pieces, here cut in two by hand; a hole or an overlap is refused."""
    whole = torch.arange(12.0).view(4, 3)
    path = dcp_save({"a": whole[:1].clone(), "b": whole[1:].clone()}, tmp_path / "dcp")
    metadata = unpickled((path / ".metadata").read_bytes())
    one, two = metadata.state_dict_metadata.pop("a"), metadata.state_dict_metadata.pop("b")
    two.chunks[0].offsets = torch.Size([1, 0])
    one.chunks.append(two.chunks[0])
    one.size = whole.size()
    metadata.state_dict_metadata["w"] = one
    lying = metadata.storage_data
    index = MetadataIndex
    places = {key.fqn: place for key, place in lying.items()}
    metadata.storage_data = {index("w", [0, 0], 0): places["a"], index("w", [1, 0], 1): places["b"]}
    metadata.planner_data = {"w": ("w",)}

    def stored() -> Path:
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        return path

    assert torch.equal(er.load(stored(), None)["w"], whole)
    for offsets, size, why in (
        ([0, 0], [4, 3], "overlap"),
        ([1, 0], [5, 3], "do not fill"),
        ([2, 0], [4, 3], "lies outside"),
    ):
        two.chunks[0].offsets, one.size = torch.Size(offsets), torch.Size(size)
        with pytest.raises(CorruptError, match=why):
            er.load(stored(), None)


class Bomb:
    """Its pickle calls something when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (Path("boom"), "executed"))


def packed(path: Path) -> None:
    """A torch.save file whose parts are compressed."""
    torch.save({"w": torch.zeros(1000)}, path)
    with zipfile.ZipFile(path) as archive:
        parts = {part.filename: archive.read(part) for part in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)


def endless(path: Path) -> None:
    """A list of lists of lists, each ten times: a few bytes, and more items than there are atoms."""
    item: list[Any] = []
    for _ in range(80):
        item = [item] * 10
    torch.save({"w": item}, path)


def flipped(path: Path) -> None:
    """A bit of a tensor's bytes."""
    torch.save({"w": torch.full((999,), 7.0)}, path)
    data = path.read_bytes()
    at = data.index(struct.pack("<f", 7.0) * 9)
    store_samples.flip(path, at)


def cut(path: Path) -> None:
    """Its end is missing."""
    torch.save({"w": torch.zeros(1000)}, path)
    os.truncate(path, path.stat().st_size - 500)


def headed(header: bytes) -> Callable[[Path], None]:
    """A safetensors file with that header and four bytes of data."""
    return lambda path: _write(path, len(header).to_bytes(8, "little") + header + bytes(4))


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


# The end of an archive of two disks.
_END_OF_DISK_TWO = struct.pack("<4sLQL", b"PK\x06\x07", 1, 0, 2) + struct.pack(
    "<4s4H2LH", b"PK\x05\x06", 1, 1, 1, 1, 46, 0, 0
)
HOSTILE: dict[str, tuple[Callable[[Path], object], type[CheckpointError], str]] = {
    "bomb": (lambda p: torch.save({"model": Bomb()}, p), ForeignError, "names getattr.*nothing was run"),
    "whole model": (lambda p: torch.save(nn.Linear(1, 1), p), ForeignError, "names torch.nn.*state_dict"),
    "packed": (packed, CorruptError, "compressed"),
    "endless": (endless, CorruptError, "more than 20000 items"),
    "flipped": (flipped, CorruptError, "does not match its sum"),
    "cut": (cut, TornError, "its end is missing"),
    "empty": (lambda p: _write(p, b""), TornError, "is empty"),
    "pickle": (
        lambda p: _write(p, pickle.dumps(Bomb())),
        CheckpointError,
        "not a whole torch.save|nothing was run",
    ),
    "cut pickle": (lambda p: _write(p, b"\x80\x02"), CorruptError, "not a whole torch.save file"),
    "text": (lambda p: _write(p, b"hello"), ForeignError, "by its first bytes"),
    "absent": (lambda _: None, ForeignError, "there is nothing here"),
    "pipe": (os.mkfifo, ForeignError, "not a regular file"),
    "huge header": (lambda p: _write(p, b"\xff" * 7 + b"\x7f{}"), CorruptError, "more than the limit"),
    "long header": (lambda p: _write(p, struct.pack("<Q", 99999) + b"{}"), TornError, "99999|100007"),
    "no JSON": (headed(b"{,}"), CorruptError, "not the JSON"),
    "outside": (
        headed(b'{"w":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'),
        TornError,
        "the tensors end at",
    ),
    "endless shape": (
        headed(b'{"w":{"dtype":"F32","shape":[0,9007199254740992,9007199254740992],"data_offsets":[0,0]}}'),
        CorruptError,
        "impossible shape",
    ),
    "expanded": (
        lambda p: torch.save({"a": torch.ones(1), "w": torch.zeros(1).expand(10**6, 10**6)}, p),
        ForeignError,
        "w is a tensor that is larger than what is stored of it",
    ),
    "several disks": (
        lambda p: _write(p, b"PK\x03\x04" + bytes(40) + _END_OF_DISK_TWO),
        CheckpointError,
        "not a whole archive|its end is missing",
    ),
    "wrong shape": (
        headed(b'{"w":{"dtype":"F32","shape":[9,99999999],"data_offsets":[0,4]}}'),
        CorruptError,
        "does not fill",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_an_error_with_a_name(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is executed, and the error says what and where."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(contents, "MAX_ITEMS", 20_000)
    make, kind, why = HOSTILE[case]
    make(tmp_path / "m.pt")
    with pytest.raises(kind, match=why) as caught:
        er.load(tmp_path / "m.pt")
    assert str(caught.value).count(str(tmp_path / "m.pt")) == 1
    assert not (tmp_path / "boom").exists()


def test_a_hostile_dcp_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pickle names something else, points outside, promises too much, or ends early."""
    monkeypatch.chdir(tmp_path)
    path = dcp_save({"w": torch.ones(3)}, tmp_path / "dcp")
    good = (path / ".metadata").read_bytes()

    def refused(data: bytes, kind: type[CheckpointError], why: str) -> None:
        (path / ".metadata").write_bytes(data)
        with pytest.raises(kind, match=why):
            er.load(path, None)

    refused(pickle.dumps(Bomb()), ForeignError, "names pathlib.*, which DCP's own files do not")
    assert not (tmp_path / "boom").exists()
    refused(pickle.dumps([1]), CorruptError, "holds a list")
    refused(good[:-9], CorruptError, "not one of DCP's")
    refused(b"", CorruptError, "not one of DCP's")
    refused(b"\x80\x04}r\xff\xff\xff\x7f.", CorruptError, "object 2147483647 in 9 bytes")
    for attribute, value, kind, why in (
        ("relative_path", "../m.pt", CorruptError, "no file beside it"),
        ("relative_path", "..", CorruptError, "no file beside it"),
        ("relative_path", "a\0b", CorruptError, "no file beside it"),
        ("relative_path", "\ud800", CorruptError, "no file beside it"),
        ("relative_path", "gone", TornError, "is missing"),
        ("length", 1 << 40, TornError, "ends at"),
        ("length", 3, CorruptError, "impossible place"),
        ("offset", -1, CorruptError, "impossible place"),
        ("transform_descriptors", ["zstd"], ForeignError, "an extension of DCP"),
    ):
        metadata = unpickled(good)
        for place in metadata.storage_data.values():
            setattr(place, attribute, value)
        refused(pickle.dumps(metadata), kind, why)
    metadata = unpickled(good)
    metadata.state_dict_metadata["w"].size = torch.Size([1 << 50])
    metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size([1 << 50])
    refused(pickle.dumps(metadata), CorruptError, "impossible place")


def test_a_dcp_directory_that_swells(tmp_path: Path) -> None:
    """Pieces that are packed, or lie at one place, would take memory that no file has."""
    whole = {f"w{number}": torch.full((300,), float(number)) for number in range(2)}
    path = dcp_save(whole, tmp_path / "dcp")
    metadata = unpickled((path / ".metadata").read_bytes())
    first, second = metadata.storage_data.values()
    second.offset = first.offset
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptError, match="two pieces lie at byte 0"):
        er.load(path, None)

    path = dcp_save({"w": torch.zeros(1000)}, tmp_path / "packed")
    (data,) = path.glob("*.distcp")
    torch.save(torch.zeros(1000), data)
    with zipfile.ZipFile(data) as archive:
        parts = {part.filename: archive.read(part) for part in archive.infolist()}
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, inside in parts.items():
            archive.writestr(name, inside)
        archive.writestr("filler", bytes(5000), zipfile.ZIP_STORED)
    metadata = unpickled((path / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, data.stat().st_size
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptError, match=f"{path}.*is compressed"):
        er.load(path, None)


def test_many_pieces_are_compared_with_few_others() -> None:
    """A tensor that was cut along its second dimension."""
    count = 20_000
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((0, at), (3, 1)) for at in range(count)]
    distcp._require_tiling("w", (3, count), boxes)
    with pytest.raises(CorruptError, match="overlap"):
        distcp._require_tiling("w", (3, count), [*boxes[:-1], boxes[0]])


def test_dcps_reader_knows_nothing_that_acts() -> None:
    """Each name that it knows stands for a record or a plain container."""
    inert = {distcp.Record, tuple, str, OrderedDict, distcp.as_tuple}
    for known in distcp.KNOWN.values():
        assert known in inert or (isinstance(known, type) and known.__bases__ == (distcp.Record,))
    reader = distcp.Reader(io.BytesIO(b""))
    for module, name in (("torch", "load"), ("torch", "ones"), ("builtins", "eval"), ("torch", "a.b")):
        with pytest.raises(ForeignError, match=f"names {module}.{name}"):
            reader.find_class(module, name)


def test_arguments_beside_the_weights(tmp_path: Path) -> None:
    """Many scripts save theirs, as argparse gave them: the weights can be read all the same."""
    torch.save({"model": {"w": torch.ones(1)}, "args": argparse.Namespace(lr=1)}, tmp_path / "m.pt")
    assert er.load(tmp_path / "m.pt")["w"].tolist() == [1]
    with pytest.raises(ForeignError, match=r"args is a argparse.Namespace: read the other parts with name="):
        er.load(tmp_path / "m.pt", None)


def test_a_tree_is_read_tensor_by_tensor(tmp_path: Path) -> None:
    """What is not asked for is not brought into memory."""
    torch.save({"a": torch.ones(3), "b": [torch.zeros(2), {"c": 1}]}, tmp_path / "m.pt")
    found = dict(contents.leaves(contents.look_into(tmp_path / "m.pt").tree))
    assert list(found) == ["a", "b/0", "b/1/c"]
    assert found["a"] == contents.Stored(torch.float32, (3,), found["a"].read)
    assert found["b/0"].read().tolist() == [0, 0]
