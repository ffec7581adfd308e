"""Recognise a torn copy: one in which a tensor is not as it was at the step boundary.

A script may change a parameter while a background copy reads it: a layer that normalises its weight in
forward(), an average that is swapped in for an evaluation, a clamp, a replayed CUDA graph. Neither a hook nor
a version counter sees all of these, since ``p.data`` and kernels write without one. So the sources are
digested at the step boundary, in the stream of training, and the copies in host memory once they are
complete. A copy with the digest of its source has the bytes of the boundary, whatever happened meanwhile.

The digest has a number modulo 2^64 for each row of 8 KiB: the sum of its words, each multiplied by an odd
random number of its column. A changed word always changes it; several changed words keep it with a
probability of about 2^-64.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from elastic_resume.state.state_dict import Leaf

WORDS_PER_ROW = 1024
PIECE_BYTES = 32 << 20  # of each temporary tensor; a multiple of a row


class SourceDigests:
    """The digests of some tensors at a step boundary."""

    def __init__(self, leaves: Iterable[Leaf]) -> None:
        """Digest the tensors now; those on a device in its current stream, without waiting for it."""
        self._digests: list[tuple[str, Sequence[int], Tensor]] = []
        for leaf in leaves:
            tensor = leaf.tensor.detach()
            order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
            digest = digest_words(_flatten(tensor, order)).to("cpu", non_blocking=True)
            self._digests.append((leaf.name, order, digest))

    def find_torn(self, copies: Mapping[str, Tensor]) -> list[str]:
        """Return the names of tensors whose copy in host memory, by name, is not the digested tensor.

        Call it when the device has done what was in the stream before the copy.
        """
        return [
            name
            for name, order, digest in self._digests
            if not torch.equal(digest_words(_flatten(copies[name], order)), digest)
        ]


def _flatten(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """Return the elements in the order of these dimensions: for a source that in which they lie in memory."""
    return tensor.permute(*order).contiguous().view(-1) if tensor.dim() > 1 else tensor.contiguous().view(-1)


def digest_words(flat: Tensor) -> Tensor:
    """Return the digest of a contiguous one-dimensional tensor, on its device: int64, one for each row."""
    return torch.cat([*_iter_row_sums(flat.view(torch.uint8))])


def _iter_row_sums(data: Tensor) -> Iterator[Tensor]:
    for piece in data.split(PIECE_BYTES):
        if (piece.data_ptr() | piece.storage_offset()) % 8:  # int64 needs both; a slot has neither
            piece = piece.clone()  # noqa: PLW2901
        whole = piece.numel() // 8 * 8
        words = piece[:whole].view(torch.int64)
        full_rows = words.numel() // WORDS_PER_ROW
        weights = _weights(words.device)
        yield (words[: full_rows * WORDS_PER_ROW].view(full_rows, WORDS_PER_ROW) * weights).sum(1)
        last_row = words[full_rows * WORDS_PER_ROW :]
        yield (last_row * weights[: last_row.numel()]).sum(0, keepdim=True)
        yield piece[whole:].long()


@functools.lru_cache(maxsize=64)
def _weights(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    size = (WORDS_PER_ROW,)
    numbers = torch.randint(-(1 << 63), (1 << 63) - 1, size, generator=generator, device="cpu")
    return (numbers | 1).to(device)
