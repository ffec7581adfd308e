"""`shared_page`: words of a mapped file."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from elastic_resume.shared_page import BarrierWords, SharedPage


@pytest.fixture
def descriptor() -> Iterator[int]:
    """Return a file of four words."""
    file = os.memfd_create("words")
    os.ftruncate(file, 32)
    yield file
    os.close(file)


def test_page_that_is_only_read_refuses_to_be_written(descriptor: int) -> None:
    """A word has one writing process: the others cannot store by mistake."""
    writer, reader = SharedPage(descriptor, 32, "Q"), SharedPage(descriptor, 32, "Q", is_writable=False)
    writer.words[1] = 1 << 63
    assert reader.words[1] == 1 << 63
    with pytest.raises(TypeError):
        reader.words[1] = 0
    writer.close()
    reader.close()
    with pytest.raises(ValueError, match="released"):
        writer.words[1]


def test_slice_of_words_with_barriers_is_a_list(descriptor: int) -> None:
    """A view of the memory would be read later, without a barrier."""
    page = SharedPage(descriptor, 32, "Q")
    words = BarrierWords(memoryview(page._map).cast("Q"))
    words[2] = 7
    assert words[1:4] == [0, 7, 0]
