"""Recognise a torn copy: one in which a tensor is not as it was at the step boundary.

A script may change a parameter while a background copy reads it: a layer that normalises its weight in
forward(), an average that is swapped in for an evaluation, a clamp, a replayed CUDA graph. Neither a hook nor
a version counter sees all of these, since ``p.data``, numpy and kernels write without one. So the sources are
digested at the step boundary, before training continues, and the copies once they are complete.

A copy with the digest of its source has the bytes of the boundary, whatever happened meanwhile. For host
memory the digest is xxh3-64, which misses a change with a probability of 2^-64. A tensor on a device is
digested there: its words form a table of 1,024 columns, and the digest is the sum of each row and column,
modulo 2^64. It misses a change only if that keeps all of these sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import xxhash
from torch import Tensor

from elastic_resume.state.state_dict import Leaf, view_bytes

COLUMN_COUNT = 1024
_WORD_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SourceDigests:
    """The digests of some tensors at a step boundary."""

    def __init__(self, leaves: Iterable[Leaf]) -> None:
        """Digest the tensors now; those on a device in its current stream, without waiting for it."""
        self._digests = [(leaf, self._digest_source(leaf.tensor)) for leaf in leaves]

    @staticmethod
    def _digest_source(tensor: Tensor) -> int | Tensor:
        in_order = _flatten(tensor, tensor)
        if not tensor.is_cuda:
            return _digest_bytes(in_order)
        return sum_words(in_order).to("cpu", non_blocking=True)

    def find_torn(self, copies: Mapping[str, Tensor]) -> list[str]:
        """Return the names of tensors whose copy in host memory, by name, is not the digested tensor.

        Call it when the device has done what was in the stream before the copy.
        """
        return [leaf.name for leaf, digest in self._digests if not _is_equal(digest, leaf, copies[leaf.name])]


def _is_equal(digest: int | Tensor, leaf: Leaf, copy: Tensor) -> bool:
    in_order = _flatten(copy, leaf.tensor)
    if isinstance(digest, Tensor):
        return torch.equal(sum_words(in_order), digest)
    return _digest_bytes(in_order) == digest


def _flatten(tensor: Tensor, source: Tensor) -> Tensor:
    """Return the elements of ``tensor`` in the order in which those of ``source`` lie in memory.

    That is a view, except for the copy of a tensor that is not contiguous, such as one in channels_last.
    """
    strides = source.stride()
    order = sorted(range(source.dim()), key=lambda dim: -strides[dim])
    return tensor.detach().permute(order).contiguous().view(-1)


def _digest_bytes(flat: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(view_bytes(flat))


def sum_words(flat: Tensor) -> Tensor:
    """Return the sums of columns and rows of a one-dimensional tensor's words, and the words of the rest."""
    words = _view_words(flat)
    rest = words.numel() % COLUMN_COUNT
    table = words[: words.numel() - rest].view(-1, COLUMN_COUNT)
    sums = [table.sum(dim, dtype=torch.int64) for dim in (0, 1)]
    return torch.cat([*sums, words[words.numel() - rest :].long()])


def _view_words(flat: Tensor) -> Tensor:
    """View a contiguous tensor as integers of its elements' size, at most 8 bytes."""
    return flat.view(torch.uint8).view(_WORD_TYPES[min(flat.element_size(), 8)])
