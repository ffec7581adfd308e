"""Run the drive of a simulated disk: serve one file sector by sector through FUSE, and fail on command.

`disks.py` starts it as ``python -I -S fuse_disk.py FUSE IMAGE CONNECTION`` with three descriptors. The
kernel's loop device and a file system lie on that file, so reads, writes and flushes of the write cache
arrive here. Like a real drive, it may lose data that it has accepted and not yet flushed.

A flush returns when all earlier writes are durable. After a power loss, any sectors since the last flush may
be there or not; open handles get EIO for ever, and new ones work. Errors and rate limits apply from the
answer to the command that sets them. The process exits when nothing refers to the disk any more.

The protocol is that of linux/fuse.h, version 7.31; the root of the file system is a regular file, the disk.
It uses the standard library only and imports nothing of this package, so that a disk starts within
milliseconds.
"""

import contextlib
import errno
import os
import random
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable

SECTOR = 4096  # what a drive of today writes whole or not at all
CACHE_SECTORS = 16384  # 64 MB: a cache that is full is written out without being asked
MAX_REQUEST_BYTES = 1 << 20  # of one request
BURST_S = 0.02  # a paced disk is ahead of its pace by so much at most

FORGET, GETATTR, SETATTR, OPEN, READ, WRITE, RELEASE = 2, 3, 4, 14, 15, 16, 18
FSYNC, FLUSH, INIT, ACCESS, INTERRUPT, DESTROY, BATCH_FORGET = 20, 25, 26, 34, 36, 38, 42
UNANSWERED = {FORGET, BATCH_FORGET, INTERRUPT}
BIG_WRITES, MAX_PAGES, DIRECT_IO = 1 << 5, 1 << 22, 1 << 0
REQUEST_HEADER, REPLY_HEADER = struct.Struct("<IIQQIIII"), struct.Struct("<IiQ")
IO_REQUEST = struct.Struct("<QQI")  # of a read or write: handle, offset, bytes
WRITE_HEADER_BYTES = 40
ATTRIBUTES = struct.Struct("<QII6Q10I")
INIT_REPLY = struct.Struct("<IIIIHHIIHH8I")


class DiskMedia:
    """The durable content of the disk and the write cache above it."""

    def __init__(self, image: int) -> None:
        """Use the descriptor ``image`` of a file of the disk's size."""
        self.size = os.fstat(image).st_size
        self._image = image
        self._write_cache: dict[int, bytes] = {}

    def read(self, offset: int, size: int) -> bytes:
        """Return the last written data."""
        data = os.pread(self._image, size, offset)
        if not self._write_cache:
            return data
        first, last = offset // SECTOR, (offset + size - 1) // SECTOR
        pieces = bytearray(data)
        for sector in self._write_cache.keys() & range(first, last + 1):
            start = sector * SECTOR - offset
            held = self._write_cache[sector]
            low, high = max(start, 0), min(start + SECTOR, size)
            pieces[low:high] = held[low - start : high - start]
        return bytes(pieces)

    def write(self, offset: int, data: memoryview) -> None:
        """Write into the cache."""
        end = offset + len(data)
        for sector in range(offset // SECTOR, (end + SECTOR - 1) // SECTOR):
            start = sector * SECTOR
            low, high = max(start, offset), min(start + SECTOR, end)
            piece = bytes(data[low - offset : high - offset])
            if len(piece) < SECTOR:
                whole = bytearray(self.read(start, SECTOR))
                whole[low - start : high - start] = piece
                piece = bytes(whole)
            self._write_cache[sector] = piece
        if len(self._write_cache) > CACHE_SECTORS:
            self.flush()

    def flush(self) -> None:
        """Make all written data durable."""
        for sector, data in self._write_cache.items():
            os.pwrite(self._image, data, sector * SECTOR)
        self._write_cache.clear()

    def lose_power(self, seed: int) -> int:
        """Keep a random part of the cache's sectors and return the number of lost ones."""
        chance = random.Random(seed)
        share = chance.choice((0.0, 0.5, 0.9, 1.0))
        kept = {sector: data for sector, data in self._write_cache.items() if chance.random() < share}
        lost = len(self._write_cache) - len(kept)
        self._write_cache = kept
        self.flush()
        return lost


class FuseDisk:
    """Answer the kernel's requests and the commands of the disk's maker."""

    def __init__(self, fuse: int, media: DiskMedia, connection: socket.socket) -> None:
        """Serve ``media`` on the descriptor ``fuse``; commands arrive on ``connection``."""
        self._fuse = fuse
        self._media = media
        self._connections = [connection]  # empty when the maker is gone
        self._last_handle = 0
        self._last_dead_handle = 0  # handles up to this one were open when the power went
        self._is_failing = False
        self._bytes_per_s = 0.0
        self._idle_at = 0.0  # when a paced disk is done with what it was given
        self._handlers: dict[int, Callable[[memoryview], bytes]] = {
            INIT: self._init,
            GETATTR: self._attributes,
            SETATTR: self._attributes,
            OPEN: self._open,
            READ: self._read,
            WRITE: self._write,
            FSYNC: self._sync,
        }

    def serve(self) -> None:
        """Serve until nothing refers to the disk."""
        room = bytearray(MAX_REQUEST_BYTES + 65536)
        while True:
            waited: list[int | socket.socket] = [self._fuse, *self._connections]
            ready, _, _ = select.select(waited, [], [])
            if self._connections and self._connections[0] in ready:
                self._run_command()
            if self._fuse in ready:
                try:
                    size = os.readv(self._fuse, [room])
                except (BlockingIOError, InterruptedError):
                    continue
                except OSError as error:
                    if error.errno == errno.ENOENT:  # it was interrupted meanwhile
                        continue
                    return  # ENODEV: unmounted
                self._handle_request(memoryview(room)[:size])

    def _handle_request(self, message: memoryview) -> None:
        _, kind, number, *_ = REQUEST_HEADER.unpack_from(message)
        if kind in UNANSWERED:
            return
        code, data = 0, b""
        try:
            if kind in self._handlers:
                data = self._handlers[kind](message[REQUEST_HEADER.size :])
            elif kind not in {FLUSH, RELEASE, ACCESS, DESTROY}:
                code = errno.ENOSYS
        except OSError as error:
            code = error.errno or errno.EIO
        with contextlib.suppress(OSError):  # it was interrupted, or aborted
            os.writev(self._fuse, [REPLY_HEADER.pack(REPLY_HEADER.size + len(data), -code, number), data])

    def _init(self, _: memoryview) -> bytes:
        flags = BIG_WRITES | MAX_PAGES
        return INIT_REPLY.pack(
            7, 31, 0, flags, 16, 12, MAX_REQUEST_BYTES, 1, MAX_REQUEST_BYTES // 4096, *[0] * 9
        )

    def _attributes(self, _: memoryview) -> bytes:
        size = self._media.size
        return ATTRIBUTES.pack(1, 0, 0, 1, size, size // 512, *[0] * 6, 0o100600, 1, 0, 0, 0, SECTOR, 0)

    def _open(self, _: memoryview) -> bytes:
        self._last_handle += 1
        return struct.pack("<QII", self._last_handle, DIRECT_IO, 0)

    def _read(self, body: memoryview) -> bytes:
        handle, offset, size = IO_REQUEST.unpack_from(body)
        self._delay_or_fail(handle, size)
        return self._media.read(offset, min(size, self._media.size - offset))

    def _write(self, body: memoryview) -> bytes:
        handle, offset, size = IO_REQUEST.unpack_from(body)
        self._delay_or_fail(handle, size)
        self._media.write(offset, body[WRITE_HEADER_BYTES : WRITE_HEADER_BYTES + size])
        return struct.pack("<II", size, 0)

    def _sync(self, body: memoryview) -> bytes:
        handle: int = struct.unpack_from("<Q", body)[0]
        self._delay_or_fail(handle, 0)
        self._media.flush()
        return b""

    def _delay_or_fail(self, handle: int, size: int) -> None:
        """Delay by the rate limit, or raise EIO."""
        now = time.monotonic()
        self._idle_at = max(self._idle_at, now - BURST_S)
        if self._bytes_per_s:
            self._idle_at += size / self._bytes_per_s
        while self._bytes_per_s and self._idle_at > time.monotonic():
            ready, _, _ = select.select(self._connections, [], [], max(0.0, self._idle_at - time.monotonic()))
            if ready:
                self._run_command()
        if handle <= self._last_dead_handle or self._is_failing:
            raise OSError(errno.EIO, "the disk does not work")

    def _run_command(self) -> None:
        """Execute a command; after the maker's exit, remove the rate limit to finish quickly."""
        line = self._connections[0]
        words = line.recv(256).decode().split()
        if not words:
            self._connections, self._bytes_per_s = [], 0.0
            return
        verb, value = words[0], words[1] if len(words) > 1 else ""
        answer = 0
        if verb == "fail":
            self._is_failing = True
        elif verb == "pace":
            self._bytes_per_s = float(value)
            self._idle_at = 0.0
        elif verb == "swap":
            self._last_dead_handle = self._last_handle
            self._is_failing = False
        elif verb == "off":
            self._last_dead_handle = self._last_handle
            answer = self._media.lose_power(int(value))
        with contextlib.suppress(OSError):
            line.sendall(b"%d\n" % answer)


def main() -> None:
    """Serve a disk until nothing refers to it."""
    fuse, image, line = map(int, sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the maker's end decides
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(-15)  # hardware does not wait for a processor
    os.set_blocking(fuse, False)
    FuseDisk(fuse, DiskMedia(image), socket.socket(fileno=line)).serve()


main()
