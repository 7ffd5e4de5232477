"""Answers to the kernel's requests for a view, and the threads that give them.

Nothing here changes after the start: nodes are numbers (`tree.py`), files do not change, and the
kernel is told to keep names, sizes and bytes for good. So any thread of any process may answer any
request, and forgotten nodes (FORGET) need no counting.

One thread of a process has the turn: it takes requests and answers them at once. Before it waits
for a disk it passes the turn to another thread, to a new one if all others wait as well. So as long
as all samples are in memory, one thread does all the work, with its code and data in the
processor's cache, and no other thread waits for the interpreter's lock.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from ffserve.dtypes import Int64s
from ffserve.engine.fuse import Requests
from ffserve.errors import AccessDenied, FFServeError
from ffserve.reader import Reader
from ffserve.view import kernel
from ffserve.view.content import SampleReader
from ffserve.view.kernel import Operation
from ffserve.view.tree import ROOT, SAMPLES, Node, Tree

log = logging.getLogger("ffserve")

THREADS = 4
"""A process begins with this many threads, so that reads of the disk wait side by side."""
MOST_THREADS = 64
"""When all threads of a process wait for a disk, which may hang, it starts another, so that files
on other disks can be read. When so many wait it answers nothing."""
RECHECK_S = 0.25
"""A program that a signal has not ended is looked at again after this time. The kernel tells of the
first signal only, and the next one may kill the program."""
SAID_COUNT = 20
"""A process names at most this many damaged samples in its log."""
Payload: TypeAlias = "bytes | bytearray | memoryview"
Function: TypeAlias = Callable[[int, memoryview], Payload]
"""A function answers an operation about a node, given the bytes that follow the header."""
_SIGKILL_PENDING = 1 << 8
_GONE = (errno.ENODEV, errno.EBADF)
_AGAIN = (errno.ENOENT, errno.EAGAIN, errno.EINTR)


@dataclass(slots=True)
class ViewFile:
    """A file of the view.

    Args:
        fd: open for reading; -1: it is remote.
        first, sizes: dataset index of its first sample, and the lengths of all; None: they are not
            known before the samples are read.
        public: everybody may read it, by the permissions on its path.
        backing: of `kernel.open_backing`, or 0.
        asked: somebody wants sizes that are not known.
    """

    path: str
    fd: int
    size: int
    mtime_ns: int
    first: int
    sizes: Int64s | None
    public: bool = False
    backing: int = 0
    asked: bool = False

    @property
    def remote(self) -> bool:
        """Whether the file is remote, so that only its samples can be read."""
        return self.fd < 0


class Running:
    """The requests in progress, in memory that all processes share: number and thread of each."""

    def __init__(self, threads: int) -> None:
        self.slots = memoryview(mmap.mmap(-1, 16 * threads)).cast("Q")

    def thread_of(self, unique: int) -> int:
        """Return which thread of which program waits for a request; 0: that of another namespace;
        -1: it is not in progress."""
        for at in range(0, len(self.slots), 2):
            if self.slots[at] == unique:
                return int(self.slots[at + 1])
        return -1


class ViewServer:
    """Answers requests.

    Args:
        device: descriptor of /dev/fuse. files: by number of `Tree`. reader: of their samples.
        root: the node that the kernel knows by the number 1.
        opens: whether OPEN is answered; if not, the kernel asks no more, which is faster.
    """

    def __init__(
        self,
        device: int,
        tree: Tree,
        reader: Reader,
        files: Sequence[ViewFile],
        *,
        root: int,
        opens: bool,
        running: Running,
    ) -> None:
        self._device = device
        self._tree = tree
        self._samples = SampleReader(reader, self._pass_on)
        self._files = files
        self._root = root
        self._opens = opens
        self._running = running
        self._regular = [self._common(file, stat.S_IFREG) for file in files]
        self._directories = [self._common(file, stat.S_IFDIR) for file in (*files, None)]
        """`kernel.common` of the nodes of each file; the last one of those above the files."""
        self._said = 0
        self._turn = threading.Lock()
        self._leader = 0
        """The thread that has the turn; 0: none."""
        self._idle: set[int] = set()
        """The threads that wait for the turn."""
        self._first = self._count = 0
        """The first of this process's slots in `running`, and its threads so far."""
        self._signalled: dict[int, int] = {}
        """Requests whose program got a signal and goes on waiting, with its thread."""
        self._rechecking = threading.Lock()
        """Held by the thread that looks at those again."""
        self._answers: dict[int, Function] = {
            Operation.LOOKUP: self._look_up,
            Operation.GETATTR: self._get_attributes,
            Operation.OPEN: self._open,
            Operation.READ: self._read,
            Operation.STATFS: self._statfs,
            Operation.READDIR: self._read_directory,
            Operation.READDIRPLUS: self._read_directory_plus,
            Operation.RELEASE: self._nothing,
            Operation.DESTROY: self._nothing,
        }

    def run(self, first: int) -> None:
        """Answer requests in threads until the view is unmounted.

        Args: first: the first of this process's slots in `running`.
        """
        self._first = first
        for thread in [self._start() for _ in range(THREADS)]:
            thread.join()

    def _start(self) -> threading.Thread:
        """Start another thread that answers requests."""
        at = 2 * (self._first + self._count)
        self._count += 1
        thread = threading.Thread(target=self._loop, args=(at,), daemon=True)
        thread.start()
        return thread

    def _loop(self, at: int) -> None:
        requests = Requests(
            self._device, self._tree.samples(), SAMPLES,
            request_size=kernel.REQUEST_SIZE, content_size=kernel.READ_SIZE,
        )  # fmt: skip
        request = requests.buffer.data
        slots, unpack = self._running.slots, kernel.HEADER.unpack_from
        me = threading.get_ident()
        while True:
            if self._leader != me:
                self._idle.add(me)
                self._turn.acquire()
                self._idle.discard(me)
                self._leader = me
            try:
                size = self._samples.next(requests)
            except OSError as error:
                if error.errno in _AGAIN:
                    continue
                if error.errno not in _GONE:
                    log.error("cannot read /dev/fuse: %s", error.strerror)
                self._pass_on()
                return
            if not size:
                continue
            _, operation, unique, node, _, _, thread, _, _ = unpack(request)
            if operation == Operation.INTERRUPT:
                self._interrupt(unique, int.from_bytes(request[40:48], "little"))
                continue
            slots[at + 1] = thread
            slots[at] = unique
            payload, code = self._answer(operation, node, request[kernel.HEADER.size : size])
            self._reply(unique, payload, code)
            slots[at] = 0

    def _pass_on(self) -> None:
        """Let another thread take requests, since this one is going to wait."""
        if self._leader == threading.get_ident():
            if not self._idle and self._count < MOST_THREADS:
                self._start()
            self._leader = 0
            self._turn.release()

    def _reply(self, unique: int, payload: Payload, code: int) -> None:
        # ENOENT: the request has already ended.
        with suppress(OSError):
            os.writev(self._device, [kernel.answer(unique, payload, code), payload])

    def _answer(self, operation: int, node: int, body: memoryview) -> tuple[Payload, int]:
        """Return the answer, or an errno."""
        function = self._answers.get(operation)
        if function is None:
            return b"", errno.ENOSYS
        try:
            return function(self._root if node == ROOT else node, body), 0
        except FFServeError as error:
            self._say(error)
            return b"", errno.EACCES if isinstance(error, AccessDenied) else errno.EIO
        except OSError as error:
            return b"", error.errno or errno.EIO
        except MemoryError:
            return b"", errno.ENOMEM
        except Exception:
            log.exception("cannot answer a request (operation %d, node %d)", operation, node)
            return b"", errno.EIO

    def _say(self, error: FFServeError) -> None:
        self._said += 1
        if self._said <= SAID_COUNT:
            log.warning("the view cannot read a sample: %s", error)

    def _interrupt(self, interruption: int, unique: int) -> None:
        """A program got a signal while it waits. If it was killed, it need not wait any longer;
        otherwise it gets its answer, since programs do not expect EINTR of files.

        Args: interruption, unique: numbers of this message and of the request that it is about.
        """
        thread = self._running.thread_of(unique)
        if thread < 0:
            # Either a thread has just taken the request, then the kernel sends this again; or it
            # was answered, then the kernel ignores this.
            self._reply(interruption, b"", errno.EAGAIN)
        elif thread and not self._is_over(unique, thread):
            self._signalled[unique] = thread
            if not self._rechecking.locked():
                threading.Thread(target=self._recheck, daemon=True).start()

    def _is_over(self, unique: int, thread: int) -> bool:
        """Whether a request was answered; it is answered now if its program was killed."""
        if self._running.thread_of(unique) != thread:
            return True
        if _is_killed(thread):
            self._reply(unique, b"", errno.EINTR)
            return True
        return False

    def _recheck(self) -> None:
        """Look at programs that got a signal until all have their answers."""
        while self._signalled and self._rechecking.acquire(blocking=False):
            while self._signalled:
                time.sleep(RECHECK_S)
                for unique, thread in list(self._signalled.items()):
                    if self._is_over(unique, thread):
                        self._signalled.pop(unique, None)
            self._rechecking.release()

    # ---- one function for each operation ---------------------------------------------------

    def _nothing(self, node: int, body: memoryview) -> bytes:
        return b""

    def _look_up(self, node: int, body: memoryview) -> bytes:
        found = self._tree.look_up(node, bytes(body[:-1]))
        return kernel.entry(found, *self._attributes(found)) if found else kernel.NO_ENTRY

    def _get_attributes(self, node: int, body: memoryview) -> bytes:
        return kernel.attributes(node, *self._attributes(node))

    def _attributes(self, number: int) -> tuple[int, bytes]:
        """Return the size of a file and `kernel.common`; raise the error of a sample whose length
        is not known."""
        node = self._tree.node(number)
        if node.directory:
            return 0, self._directories[node.shard]
        file = self._files[node.shard]
        size = file.size if node.sample < 0 else self._size(file, node.sample)
        return size, self._regular[node.shard]

    def _common(self, file: ViewFile | None, kind: int) -> bytes:
        mode = 0o444 if file is None or file.public else 0o400
        if kind == stat.S_IFDIR:
            mode |= mode >> 2
        newest_ns = max((each.mtime_ns for each in self._files), default=0)
        mtime_ns = newest_ns if file is None else file.mtime_ns
        return kernel.common(kind | mode, os.geteuid(), os.getegid(), mtime_ns)

    def _open(self, node: int, body: memoryview) -> bytes:
        if not self._opens:
            raise OSError(errno.ENOSYS, "")
        found = self._tree.node(node)
        return kernel.opened(self._files[found.shard].backing if found.sample < 0 else 0)

    def _read(self, node: int, body: memoryview) -> bytes | memoryview:
        _, offset, size = kernel.READ.unpack_from(body)
        found = self._tree.node(node)
        if found.sample >= 0:
            return self._samples.part(found.sample, offset, size)
        self._pass_on()
        return os.pread(self._files[found.shard].fd, size, offset)

    def _statfs(self, node: int, body: memoryview) -> bytes:
        return kernel.statfs(sum(file.size for file in self._files), self._tree.count)

    def _read_directory(self, node: int, body: memoryview) -> bytearray:
        return self._directory(node, body, plus=False)

    def _read_directory_plus(self, node: int, body: memoryview) -> bytearray:
        return self._directory(node, body, plus=True)

    def _directory(self, directory: int, body: memoryview, *, plus: bool) -> bytearray:
        _, position, left = kernel.READ.unpack_from(body)
        if not self._tree.node(directory).directory:
            raise NotADirectoryError(errno.ENOTDIR, "")
        nodes, entries = [], []
        for number, (name, node) in enumerate(self._all_entries(directory, position), position + 1):
            found = self._tree.node(node)
            kind = stat.S_IFDIR if found.directory else stat.S_IFREG
            entry = kernel.directory_entry(name, node, kind, number)
            left -= len(entry) + (kernel.ENTRY_SIZE if plus else 0)
            if left < 0:
                break
            entries.append(entry)
            nodes.append((node, found))
        if plus:
            heads = self._entries(nodes, position)
            return bytearray().join(
                part for pair in zip(heads, entries, strict=True) for part in pair
            )
        return bytearray().join(entries)

    def _entries(self, nodes: list[tuple[int, Node]], position: int) -> Iterator[bytes]:
        """Return the answer of LOOKUP. The kernel asks again for a sample whose size is unknown or
        0, and then gets the error of a damaged sample."""
        sizes = self._sizes([found for _, found in nodes])
        for number, ((node, found), size) in enumerate(zip(nodes, sizes, strict=True), position):
            if number < 2:  # the kernel has "." and ".." without asking
                yield kernel.NO_NODE
            elif found.directory:
                yield kernel.entry(node, 0, self._directories[found.shard])
            elif size > 0:
                yield kernel.entry(node, size, self._regular[found.shard])
            else:
                yield kernel.NO_NODE

    def _size(self, file: ViewFile, sample: int) -> int:
        """Return the length of a sample. Raises: the error of a damaged sample, if its length is
        not known, or 0: such a file would be read without another question."""
        if file.sizes is not None and (size := int(file.sizes[sample - file.first])):
            return size
        file.asked = True
        return self._samples.size(sample)

    def _sizes(self, nodes: list[Node]) -> list[int]:
        """Return the sizes of files; 0 or less where it is not known, and of directories.

        Sizes that have to be read first are read only if a program has asked for one since the last
        time: the next ones will be asked for as well. Others only want the names.
        """
        sizes = [0] * len(nodes)
        unknown: dict[int, int] = {}
        for k, each in enumerate(nodes):
            if each.directory:
                continue
            file = self._files[each.shard]
            if each.sample < 0:
                sizes[k] = file.size
            elif file.sizes is not None:
                sizes[k] = int(file.sizes[each.sample - file.first])
            elif file.asked:
                unknown[k] = each.sample
        if unknown:
            for k, size in zip(unknown, self._samples.sizes([*unknown.values()]), strict=True):
                sizes[k] = size
                self._files[nodes[k].shard].asked = False
        return sizes

    def _all_entries(self, directory: int, position: int) -> Iterator[tuple[bytes, int]]:
        if position == 0:
            yield b".", directory
        if position <= 1:
            yield b"..", self._tree.parent(directory)
        yield from self._tree.entries(directory, max(position - 2, 0))


def _is_killed(thread: int) -> bool:
    """Whether a SIGKILL is pending for a thread; the kernel makes one of every fatal signal."""
    with suppress(OSError), open(f"/proc/{thread}/status", "rb") as file:
        for line in file:
            if line.startswith(b"SigPnd:"):
                return bool(int(line.split()[1], 16) & _SIGKILL_PENDING)
    return False
