"""The public reader: one index space over shards, wherever the samples come from.

A Reader survives what training scripts do to it. It can be used by threads; it can be forked,
spawned and pickled at any time, whatever was done with it before, because the copy connects anew
at its first use; when the daemon restarts in mid-epoch, the batch that was on its way is asked for
again as a whole, so nothing is lost or doubled. A copy, or a reader that reconnects, refuses to go
on if the files are not those that the reader was opened on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from operator import methodcaller
from typing import Any, Generic, Literal, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from ffserve import folders as packed_folders
from ffserve import formats
from ffserve.client.announced import AnnouncedOrders, Order, check_count, check_order
from ffserve.client.daemon import connection as connections
from ffserve.client.daemon.shared_memory import DaemonSource
from ffserve.client.failover import OpenRequest, SourceSelector, closed_error
from ffserve.client.local.local_source import LocalSource
from ffserve.client.local.ranged_source import RangedSource
from ffserve.client.record_stream import RecordStream
from ffserve.client.source import Batch, Leased, SampleSource, cut
from ffserve.dataset.fields import (
    FieldSelection,
    FieldTable,
    MemberNames,
    Rows,
    copies,
    rows_of,
)
from ffserve.dataset.layout import Numbering, Selection, as_int64, check_range
from ffserve.dataset.layout import ShardInfo as ShardInfo
from ffserve.dataset.paths import PathLike, expand_paths
from ffserve.disk.files import is_compressed
from ffserve.dtypes import Bytes, Int64s
from ffserve.errors import (
    ArenaError,
    FFServeError,
    ServerUnavailable,
    UsageError,
    raise_first,
)
from ffserve.formats.members import ABOUT, Members, as_text, key_of
from ffserve.parts import Part, SampleFile
from ffserve.store.origin import ObjectVersion

T = TypeVar("T")
READ_AHEAD_SIZE = 4 * 1024 * 1024
READ_AHEAD_COUNT = 1024
REQUESTS_AHEAD = 3
"""Iteration keeps this many requests in flight."""
GROUP_COUNT, GROUP_SIZE = 512, 2 << 20
"""Small batches are asked for together, up to this many samples and bytes: a request costs the
daemon as much as fifty samples do..."""
GROUP_FIRST = 128
"""... but the first group has at most that many, and each that follows up to twice as many as the
one before it, so that the first batch does not wait for 512 samples."""
SIZES_AT_ONCE = 65_536
"""One request looks up the lengths of this many samples."""

_OF_THIS_PROCESS = {"_announced", "_by_name", "_directories", "_ends", "_indexing", "_labels"}
_OF_THIS_PROCESS |= {"_names", "_opening", "_selector", "_selectors", "_stream"}


def open(
    paths: PathLike | Sequence[PathLike],
    *,
    format: str | None = None,
    server: str = "auto",
    verify: bool = True,
    on_error: Literal["raise", "skip"] = "raise",
    fields: Sequence[str] | None = None,
) -> Reader:
    """Open record files as one sequence of samples.

    Args:
        paths: one file, a directory, a glob pattern, the URL of one of these (`s3://…` and all
            others of fsspec), or a sequence of these; samples are numbered through them in order.
        format: "ffrecord", "recordio", "tfrecord", "tar", or None to tell by content, then by
            suffix.
        server: "auto": the daemon if its socket answers, else an engine in this process; which
            one it is stands in `reader.source`. "start", and "auto" with URLs or with
            FFSERVE_START=1 in the environment: the same, but a daemon is started for this user if
            none serves the files; it ends ten minutes after its last client. "require": the
            daemon. "off": no daemon; URLs are read by ranges, of which nothing is kept
            (`docs/howto/remote.md`). Else a socket's path, which is required to answer.
        verify: check every sample against its checksum, and the files' tables at opening.
        on_error: "raise", or "skip" to leave out damaged samples: everything is read once to find
            them, and the reader then holds only the intact ones, in order. `reader.damaged` has
            the errors of the others. A file that is damaged between its samples, or was cut, is
            read as far as it can be.
        fields: of tar files, the fields of a sample that are read, such as ["jpg", "cls"]; None:
            all. With one field a sample is its bytes, as in other files; with several it is a dict
            (`FieldReader`).

    Of a packed folder the samples are its files, and `reader.names` has their names.

    Compressed TFRecord files (GZIP, ZLIB) are decompressed in order as long as they are only
    iterated. At the first index, or `len`, they are opened by index, which takes one pass over a
    file that has no index file yet (`ffserve index` makes them in advance).

    Returns: a Reader; close it, or use `with`.

    Raises:
        FormatError, ChecksumError, TruncatedError: a file is not what its format demands.
        MissingFile (a FileNotFoundError), AccessDenied, ReadError: a file cannot be opened.
        ServerUnavailable: a daemon is required and does not answer.
        UsageError: an invalid option; a field that no sample has.

    Cost: with a daemon that has the files open already one round trip; else their tables are read.
    """
    return open_files(paths, format, server, verify, on_error, fields=fields)


def open_files(
    paths: PathLike | Sequence[PathLike],
    format: str | None = None,
    server: str = "auto",
    verify: bool = True,
    on_error: Literal["raise", "skip"] = "raise",
    *,
    whole: bool = False,
    fields: Sequence[str] | None = None,
) -> Reader:
    """Open files as `open` does. Args: whole: the names of a packed folder are a sample, too, and
    each member of a tar file is one."""
    suffixes = check_options(format, server, on_error)
    tolerant = on_error == "skip"
    files = expand_paths(paths, suffixes=suffixes)
    if format in (None, "tfrecord") and is_compressed(files[0]):
        if fields is not None:
            raise _no_fields(files[0])
        stream = StreamReader(files, server, verify=verify, tolerant=tolerant)
        if server not in ("auto", "start", "off"):
            stream.open_by_index()
        return stream
    reader = Reader(files, format, server, verify, tolerant, whole=whole, fields=fields)
    if reader._fields is not None and reader._fields.several:
        # What the samples are is known when the files are open.
        reader.__class__ = FieldReader
    if tolerant:
        try:
            reader._leave_out_damaged()
        except BaseException:
            reader.close()
            raise
    return reader


def check_options(format: str | None, server: str, on_error: str) -> Callable[[], tuple[str, ...]]:
    """Return a function that returns the suffixes of the files to look for in directories.

    Raises: UsageError for an invalid option of `open`.
    """
    if on_error not in ("raise", "skip"):
        raise UsageError(f"on_error must be 'raise' or 'skip', not {on_error!r}")
    if not isinstance(server, str) or not server:
        raise UsageError(
            f"server must be 'auto', 'start', 'require', 'off' or a socket's path, not {server!r}"
        )
    if format is not None:
        formats.check_name(format)
    return lambda: formats.suffixes(format)


def _no_fields(path: str) -> UsageError:
    return UsageError(
        "only samples of tar files have fields",
        path=path,
        hint="leave fields out; of tf.train.Examples ffserve.torch.Dataset takes features",
    )


class BaseReader:
    """Readers that block and readers that await: indices, numbers, errors, counters.

    A sample's number is its index among all samples of the files. Hidden are those with the names
    of packed folders and, with `on_error="skip"`, damaged ones.
    """

    _name: str
    """Of the class, for people."""

    def __init__(self, request: OpenRequest) -> None:
        self._request = request
        self._numbering: Numbering | Selection | FieldSelection | None = None
        """None: all samples are shown."""
        self._fields: FieldSelection | None = None
        """Of files whose records are members of samples, unless each is shown as a sample."""
        self._member_names: MemberNames | None = None
        self._folders = np.zeros(0, np.int64)
        """Numbers of the hidden samples with names."""
        self._damaged: list[FFServeError] = []
        self._set_up()

    def _set_up(self) -> None:
        """Make what belongs to this process only; also called for a copy in another process."""
        self._announced = AnnouncedOrders()
        self._names: list[str] | None = None
        self._directories: list[str] = []
        self._labels: dict[str, dict[int, Any]] = {}
        """By column and number of the sample."""
        self._by_name: dict[str, int] | None = None
        self._ends: dict[int, Int64s | None] = {}
        """By epoch of an announced order of samples with several fields; see `Rows.ends`."""
        connections.call_after_fork(self)

    def __len__(self) -> int:
        return self._request.count if self._numbering is None else self._numbering.count

    @property
    def damaged(self) -> list[FFServeError]:
        """The errors of samples that `on_error="skip"` left out; indices are those in the files."""
        return list(self._damaged)

    def _indices(self, indices: Any) -> Int64s:
        """Return indices, which were checked."""
        if self._request.closed:
            raise closed_error()
        return check_range(as_int64(indices, len(self)), len(self))

    def _numbers(self, indices: Any) -> Int64s:
        chosen = self._indices(indices)
        return chosen if self._numbering is None else self._numbering.numbers(chosen)

    def _rows(self, indices: Any, *, together: bool = False) -> Rows:
        """Return what is read of samples. Args: together: see `FieldSelection.rows`."""
        chosen = self._indices(indices)
        if isinstance(self._numbering, FieldSelection):
            return self._numbering.rows(chosen, together=together)
        return Rows(chosen if self._numbering is None else self._numbering.numbers(chosen))

    def _rows_or_all(self, indices: Any = None) -> Rows:
        """Return what is read of samples; None: of all."""
        return self._rows(range(len(self)) if indices is None else indices)

    def sample_numbers(self, indices: Any) -> Int64s:
        """Return the numbers of samples among all of the files, int64[n]: what a source takes. With
        several fields that of the first one's record.

        Args: indices: int64[n], which exist.
        """
        chosen: Int64s = np.asarray(indices, np.int64)
        if isinstance(self._numbering, FieldSelection):
            return self._numbering.first_records(chosen)
        return chosen if self._numbering is None else self._numbering.numbers(chosen)

    def sample_indices(self, numbers: Int64s) -> Int64s:
        """Return the indices of numbers that `sample_numbers` returned."""
        return numbers if self._numbering is None else self._numbering.indices(numbers)

    def _named(self, error: FFServeError, position: int, numbers: Int64s) -> FFServeError:
        if self._numbering is None:
            return error
        [index] = self._numbering.indices(numbers[position : position + 1]).tolist()
        return error.located(index=index)

    @contextlib.contextmanager
    def _by_index(self) -> Iterator[None]:
        """Let errors name a sample by its index, not by its number among all samples."""
        try:
            yield
        except FFServeError as error:
            if self._numbering is None or error.index is None:
                raise
            number = np.array([error.index], np.int64)
            raise error.located(index=int(self._numbering.indices(number)[0])) from None

    def _raise_first(self, failed: dict[int, FFServeError], numbers: Int64s) -> None:
        if failed:
            position = min(failed)
            failed[position] = self._named(failed[position], position, numbers)
            raise_first(failed)

    def _mixed(
        self, arrays: list[Any], failed: dict[int, FFServeError], numbers: Int64s,
        errors: Literal["raise", "return"],
    ) -> list[Any]:  # fmt: skip
        """Return the samples, and errors in the places of failed ones if `errors` says so."""
        if errors != "return":
            self._raise_first(failed, numbers)
            return arrays
        mixed = list(arrays)
        for position, error in failed.items():
            mixed[position] = self._named(error, position, numbers)
        return mixed

    def _leave_out(self, bad: dict[int, FFServeError]) -> None:
        """Hide these samples, by number."""
        numbers = np.array(list(bad), np.int64)
        if self._fields is not None:
            samples = self._fields.table.samples_of(numbers).tolist()
            found, bad = zip(samples, bad.values(), strict=True), {}
            for index, error in found:
                bad.setdefault(index, error.located(index=index))
        self._damaged += bad.values()
        self._hide(numbers)

    def _hide(self, numbers: Int64s) -> None:
        if isinstance(self._numbering, FieldSelection):
            self._numbering = self._numbering.without(self._numbering.indices(numbers))
            return
        if isinstance(self._numbering, Selection):
            shown = self._numbers(range(len(self)))
            self._numbering = Selection(shown[~np.isin(shown, numbers)])
            return
        if isinstance(self._numbering, Numbering):
            numbers = np.concatenate((numbers, self._numbering.hidden))
        if len(numbers):
            self._numbering = Numbering(np.unique(numbers), self._request.count)

    def select(self, indices: Any) -> None:
        """Show only these samples from now on, in this order; `shards` stays as it is.

        Args: indices: as for `read`; none twice.
        """
        shown = self._indices(indices)
        if self._names is not None:
            self._names = [self._names[k] for k in shown.tolist()]
        self._by_name = None
        if isinstance(self._numbering, FieldSelection):
            self._numbering = self._numbering.select(shown)
        else:
            self._numbering = Selection(self._numbers(shown))

    # ---- packed folders -------------------------------------------------------------------

    def _folder_search(self, source: SampleSource) -> packed_folders.FolderSearch:
        # A daemon fetches for all; what a job asked an origin for would be fetched once more.
        objects = source.objects if isinstance(source, RangedSource) else ()
        return packed_folders.FolderSearch(source.shards, source.states, objects)

    def _hide_folders(self, found: list[int]) -> None:
        """Hide the samples with names."""
        self._folders = np.unique(np.array(found, np.int64))
        self._hide(self._folders)

    def _ends_with_names(self, shard: ShardInfo) -> bool:
        end = shard.first + shard.count - 1
        at = int(np.searchsorted(self._folders, end))
        return shard.count > 0 and at < len(self._folders) and int(self._folders[at]) == end

    def _shown_shards(self, shards: list[ShardInfo]) -> list[ShardInfo]:
        """Return the files of a source without the samples that are names."""
        if self._fields is not None:
            counts = self._fields.table.counts
        elif len(self._folders):
            counts = [shard.count - self._ends_with_names(shard) for shard in shards]
        else:
            return list(shards)
        edges = zip(shards, counts, accumulate(counts, initial=0), strict=False)
        return [dataclasses.replace(s, count=count, first=first) for s, count, first in edges]

    def _set_names(
        self, shards: list[ShardInfo], batch: Batch, failed: dict[int, FFServeError]
    ) -> list[str]:
        """Keep and return the names of all samples. Args: batch, failed: of `_folders`."""
        raise_first(failed)
        samples, by_number, directories = iter(batch), dict[int, str](), set[str]()
        labels: dict[str, dict[int, Any]] = {}
        for shard in shards:
            if self._ends_with_names(shard):
                count = shard.count - 1
                folder, table = packed_folders.decode_labelled(
                    next(samples).data, count, path=shard.path, index=shard.first + count
                )
                for parts, node in packed_folders.walk(folder, recursive=True):
                    if isinstance(node, int):
                        by_number[shard.first + node] = "/".join(parts)
                    else:
                        directories.add("/".join(parts))
                for name, values in table.items():
                    labels.setdefault(name, {}).update(enumerate(values, shard.first))
        names = [by_number.get(number, "") for number in self._numbers(range(len(self))).tolist()]
        self._directories, self._labels = sorted(directories), labels
        self._names = names  # last: other threads that see them take the labels, too
        return names

    def _labels_of(self, indices: Any) -> list[dict[str, Any]]:
        """Return the labels. The names were read before."""
        if not self._labels:
            raise UsageError(
                "the files have no labels",
                path=self._request.paths[0],
                hint="`ffserve pack --labels FILE` stores them",
            )
        numbers = self._numbers(indices).tolist()
        columns = self._labels.items()
        return [{name: values.get(k) for name, values in columns} for k in numbers]

    def _index_of(self, name: str, names: list[str]) -> int:
        if self._by_name is None:
            self._by_name = {each: k for k, each in reversed(list(enumerate(names))) if each}
        index = self._by_name.get(name)
        if index is None:
            raise packed_folders.UnknownName(
                f"no file has the name {name!r}" if names else "the files have no names",
                path=self._request.paths[0],
                hint="reader.names has all names" if names else "`ffserve pack` keeps names",
            )
        return index

    # ---- fields ---------------------------------------------------------------------------

    def _abouts(self, source: SampleSource, fields: Sequence[str] | None) -> list[tuple[int, int]]:
        """Return the blocks that describe the files, if their records are members of samples.

        Raises: UsageError: fields are asked for where there are none; there are other files, too.
        """
        shards = source.shards
        others = [shard for shard in shards if shard.format != "tar"]
        if others and fields is not None:
            raise _no_fields(others[0].path)
        if len(others) == len(shards):
            return []
        if others:
            raise UsageError(
                f"tar files cannot be one data set with a file of {others[0].format}",
                path=others[0].path,
                hint="open them by themselves; ffserve.torch.ConcatDataset joins data sets",
            )
        self._member_names = MemberNames(shards)
        return [(k, ABOUT) for k in range(len(shards))]

    def _set_fields(
        self, source: SampleSource, abouts: list[bytes], fields: Sequence[str] | None
    ) -> None:
        """Show samples by fields. Args: abouts: the descriptions of the files."""
        paths = [shard.path for shard in source.shards]
        rows = zip(abouts, source.shards, strict=True)
        members = [Members.of(about, shard.count, shard.path) for about, shard in rows]
        table = FieldTable(members, lambda k: source.tables(k)[2], paths)
        self._fields = FieldSelection(table, fields, paths[0])
        if self._fields.is_identity:
            return
        self._numbering = self._fields
        if self._request.tolerant and (lacking := self._fields.lacking()):
            self._damaged += lacking.values()
            self._numbering = self._fields.without(np.array([*lacking]))

    @property
    def fields(self) -> list[str]:
        """The fields of the samples of tar files, in order; of other files there are none."""
        return [] if self._fields is None else list(self._fields.names)

    def _named_records(self, indices: Any) -> tuple[MemberNames, Int64s]:
        """Return a record of each sample, whose name has its key. Raises: UsageError."""
        if self._member_names is None:
            raise UsageError("only tar files have keys", path=self._request.paths[0])
        return self._member_names, self.sample_numbers(self._indices(indices))

    def _keys_of(self, names: list[bytes]) -> list[str]:
        """Return the keys of samples; those of members that are samples are their names."""
        return list(map(as_text if self._fields is None else key_of, names))

    @property
    def verified(self) -> bool:
        """Whether the bytes of samples are compared with checksums: tar files have none."""
        return self._request.verify and self._member_names is None

    def _summed(
        self, current: SampleSource, spare: SampleSource | None
    ) -> dict[str, int | float | str]:
        facts = dict(current.stats())
        others: list[dict[str, Any]] = [self._request.totals]
        if spare is not None:
            others.append(spare.stats())
        for name in ("hits", "misses", "bytes"):
            facts[name] = int(facts[name]) + sum(int(other.get(name, 0)) for other in others)
        hits, misses = int(facts["hits"]), int(facts["misses"])
        facts["samples"] = hits + misses
        facts["hit_rate"] = hits / max(1, hits + misses)
        facts["source"] = current.description
        if self._request.unserved:
            facts["unserved"] = self._request.unserved
        return facts

    def _checked_order(self, order: Any, epoch: int, name: str | None, replacement: bool) -> Order:
        """Return the arguments of `SampleSource.announce`. Raises: as `Reader.announce`."""
        rows = self._rows(order)
        epoch = check_count("epoch", epoch)
        with self._by_index():
            check_order(rows.numbers, self._request.count, name, replacement)
        self._ends = {epoch - 1: self._ends.get(epoch - 1), epoch: rows.ends}
        return rows.numbers, epoch, name, replacement

    def _counted(self, epoch: int, position: int) -> tuple[int, int]:
        """Return a position in an announced order, which a daemon counts in records."""
        epoch, position = check_count("epoch", epoch), check_count("position", position)
        ends = self._ends.get(epoch)
        return epoch, position if ends is None else int(ends[min(position, len(ends) - 1)])

    def __getstate__(self) -> dict[str, Any]:
        own = dataclasses.replace(self._request, totals={})
        kept = {k: v for k, v in self.__dict__.items() if k not in _OF_THIS_PROCESS}
        return {**kept, "_request": own, "job": connections.job_name()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        connections.join_job(state.pop("job"))
        self.__dict__.update(state)
        self._set_up()

    def __repr__(self) -> str:
        paths = self._request.paths
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        return f"<{self._name} of {len(self)} samples in {paths[0]}{more}>"


class Reader(BaseReader, Sequence[Bytes]):
    """Samples of a data set by index. Made by `ffserve.open`."""

    _name = "ffserve.Reader"

    def __init__(
        self,
        paths: tuple[str, ...],
        format: str | None,
        server: str,
        verify: bool,
        tolerant: bool = False,
        seen: Callable[[int], object] | None = None,
        identities: tuple[ObjectVersion, ...] = (),
        *,
        whole: bool = False,
        fields: Sequence[str] | None = None,
    ) -> None:
        how = format, server, verify, tolerant, seen
        parts = fields is not None
        super().__init__(OpenRequest(paths, *how, identities=identities, parts=parts))
        self._selector.open()
        try:
            if not whole:
                self._find_folders()
            self._find_fields(fields, whole=whole)
        except BaseException:
            self.close()
            raise

    def _find_folders(self) -> None:
        search = self._folder_search(self._selector.current())
        if len(search.last):
            asked = search.look(self._estimates_of(Rows(search.last)))
            answers = self._retrying(methodcaller("named", asked)) if asked else []
            unknown = Rows(search.hear(answers))
            reading = self._in_order(unknown, READ_AHEAD_COUNT, READ_AHEAD_SIZE)
            with contextlib.closing(reading) as batches:
                for rows, batch, failed in batches:
                    search.take(rows.numbers, batch, failed)
            self._hide_folders(search.found)

    def _find_fields(self, fields: Sequence[str] | None, *, whole: bool) -> None:
        source = self._selector.current()
        if (blocks := self._abouts(source, fields)) and not whole:
            self._set_fields(source, self._retrying(methodcaller("named", blocks)), fields)

    def _set_up(self) -> None:
        super()._set_up()
        self._selector = SourceSelector(self._request, self._announced)

    def _retrying(self, attempt: Callable[[SampleSource], T]) -> T:
        """Make a request; if the daemon goes away meanwhile, or its arena has no memory for a
        sample, make it again as a whole."""
        while True:
            source = self._selector.current()
            try:
                return attempt(source)
            except (ServerUnavailable, ArenaError) as error:
                spare = self._selector.after(source, error)
            if spare is not None:
                return attempt(spare)

    def current_source(self, *, lead: bool = False) -> SampleSource:
        """Return the present source; for what belongs to it, such as prepared samples.

        Args: lead: begin a job of its own first, as `announce` does.
        """
        if lead:
            self._selector.lead()
        return self._selector.current()

    @property
    def source(self) -> str:
        """Where samples come from now, such as "daemon /run/ffserve/ffserve.sock" or
        "engine uring"."""
        return self._selector.current().description

    @property
    def shards(self) -> list[ShardInfo]:
        """The files, in order."""
        return self._shown_shards(self._selector.current().shards)

    @property
    def names(self) -> list[str]:
        """The names of the samples in order, their parts joined by "/"; "" for one without a name,
        and an empty list if no file is a packed folder. Names that are not UTF-8 have surrogates,
        as those of `os.listdir`.

        Raises: FormatError, ChecksumError: the names are damaged; otherwise as `read`.
        Of tar files these are the keys of the samples.

        Cost: the first time one to two seconds per million names.
        """
        if self._member_names is not None:
            if self._names is None:
                self._names = self.keys(range(len(self)))
            return self._names
        if not len(self._folders):
            return []
        if self._names is None:
            batch, failed = self._retrying(lambda source: self._batch(source, self._folders))
            return self._set_names(self._selector.current().shards, batch, failed)
        return self._names

    def keys(self, indices: Any) -> list[str]:
        """Return the keys of samples of tar files: a member's name up to the first dot of its last
        part. Names that are not UTF-8 have surrogates, as those of `os.listdir`.

        Args: indices: as for `read`.
        Raises: UsageError: the files have none.
        Cost: about a second per million keys in order.
        """
        names, numbers = self._named_records(indices)
        missing = names.missing(numbers)
        blocks = self._retrying(methodcaller("named", missing)) if missing else []
        return self._keys_of(names.take(numbers, missing, blocks))

    @property
    def directories(self) -> list[str]:
        """The directories of packed folders, sorted, also those without a file; as `names`."""
        return self._directories if self.names else []

    @property
    def label_names(self) -> list[str]:
        """The columns of `labels`; an empty list if there are none. Raises, Cost: as `names`."""
        return list(self._labels) if self.names else []

    def labels(self, indices: Any) -> list[dict[str, Any]]:
        """Return what `ffserve pack --labels` has stored of samples: for each a dict, column →
        value; None for a sample of a file without this column.

        Args: indices: as for `read`.
        Raises: UsageError: no file has labels. Otherwise as `names`.
        Cost: as `names`.
        """
        _ = self.names
        return self._labels_of(indices)

    def index_of(self, name: str) -> int:
        """Return the index of the sample with a name; of several the first.

        Raises: UsageError (also a LookupError): there is none. Otherwise as `names`.
        Cost: as `names`; a table of the names from the first call on.
        """
        return self._index_of(name, self.names)

    @property
    def shown(self) -> tuple[Any, ...]:
        """A key of the files and the samples shown: equal if the same index is the same sample."""
        return self._request.paths, b"" if self._numbering is None else self._numbering.key

    # ---- reading --------------------------------------------------------------------------

    @overload
    def read(self, indices: Any, *, errors: Literal["raise"] = "raise") -> list[Bytes]: ...
    @overload
    def read(self, indices: Any, *, errors: Literal["return"]) -> list[Bytes | FFServeError]: ...
    def read(
        self, indices: Any, *, errors: Literal["raise", "return"] = "raise"
    ) -> list[Bytes] | list[Bytes | FFServeError]:
        """Read samples.

        Args:
            indices: list, tuple, range, set, generator or integer ndarray; any number, also none;
                order and repeats are kept.
            errors: "raise" the first damaged sample's error, or "return" errors in the places of
                their samples, the others being there.

        Returns: one array a sample: uint8[size], writable, in memory of its own.

        Raises:
            SampleIndexError: an index outside the data set; nothing is read.
            ChecksumError, TruncatedError, ReadError: of the first sample that failed.
            ServerUnavailable: the daemon is required and stayed away.

        Cost: at most one round trip for each 8 MiB of the batch, none if all samples are cached;
            one copy.
        """
        kind = type(indices)
        if kind is not list and kind is not tuple and kind is not np.ndarray:
            indices = as_int64(indices, len(self))
        rows = None
        if self._numbering is not None:
            rows = self._rows(indices)
            indices = rows.numbers
        source, lookup = self._selector.selection.source, None
        if source is not None:
            lookup = source.cached_arrays(indices)
            if type(lookup) is list:
                if self._announced.any:
                    self._used(as_int64(indices, self._request.count))
                return lookup if rows is None else rows.by_field(lookup)
        numbers = self._numbers(indices) if self._numbering is None else indices

        def attempt(current: SampleSource) -> tuple[list[Bytes], dict[int, FFServeError]]:
            known = lookup if current is source else None
            request = current.start(numbers, apart=True, found=known)
            failed = current.finish(request)
            assert request.target.arrays is not None
            return request.target.arrays, failed

        arrays, failed = self._retrying(attempt)
        self._used(numbers)
        mixed = self._mixed(arrays, failed, numbers, errors)
        return mixed if rows is None else rows.by_field(mixed)

    def read_batch(self, indices: Any, *, out: Bytes | None = None) -> Batch:
        """Read samples into one buffer.

        Args:
            indices: as for `read`.
            out: a writable, contiguous uint8 array to use instead of a new one; must hold the
                batch, may be larger (pinned memory, for instance).

        Returns: a Batch with `.buffer` uint8[total] and `.offsets` int64[n + 1]; it owns them.

        Raises: as `read`; UsageError for an `out` that cannot be used.

        Cost: as `read`, with one allocation for the whole batch. Least for an int64 array.
        """
        numbers = indices if type(indices) is np.ndarray else as_int64(indices, len(self))
        rows = None
        if self._numbering is not None:
            rows = self._rows(numbers, together=True)
            numbers = rows.numbers
        source, lookup = self._selector.selection.source, None
        if source is not None:
            found = source.cached_batch(numbers, out)
            if isinstance(found, Batch):
                if self._announced.any:
                    self._used(numbers)
                return found if rows is None else rows.divided(found)
            lookup = found
        if self._numbering is None:
            numbers = self._numbers(numbers)

        def attempt(current: SampleSource) -> tuple[Batch, dict[int, FFServeError]]:
            known = lookup if current is source else None
            request = current.start(numbers, apart=False, out=out, found=known)
            failed = current.finish(request)
            assert request.target.buffer is not None
            return Batch(request.target.buffer, request.target.offsets), failed

        batch, failed = self._retrying(attempt)
        self._used(numbers)
        self._raise_first(failed, numbers)
        return batch if rows is None else rows.divided(batch)

    def lease(self, indices: Any) -> AbstractContextManager[Leased]:
        """Read samples in place.

        Args: indices: as for `read`.

        Returns: a context manager that gives a sequence of read-only views, straight into the
            daemon's arena where possible; they are valid until it is left, and may show other
            samples' bytes afterwards. A child that was forked meanwhile sees the same for as long
            as its parent holds them; that a daemon ends changes nothing.

        Raises: SampleIndexError at once; the rest as `read`, on entry.

        Cost: one round trip to the daemon, one message more on leaving, no copy. All leases of all
            processes together hold at most half of the arena; samples beyond that are copied.
            Leased samples cannot be evicted: leave soon.
        """
        return self._leasing(self._rows(indices))

    @contextlib.contextmanager
    def _leasing(self, rows: Rows) -> Iterator[Leased]:
        with self._by_index():
            leased = self._retrying(lambda source: source.lease(rows.numbers))
        try:
            self._used(rows.numbers)
            yield rows.by_field(leased)
        finally:
            leased.release()

    def open_sample(self, index: int, *, verify: bool = False) -> SampleFile:
        """Return a sample as a file: seekable, read-only, of io.RawIOBase, picklable.

        Args: verify: read the whole sample at once and compare its checksum.
        Returns: the file. Its `verified` says whether all bytes that were read so far are of a
            sample whose checksum was compared. A read of little reads 512 KiB.
        Raises: SampleIndexError; with `verify` as `read`. Reads raise as `read_ranges`.
        """
        return SampleFile(self, index, verify=verify)

    def read_range(self, index: int, start: int, stop: int, *, verify: bool = False) -> Part:
        """Read the bytes from `start` up to `stop` of a sample; see `read_ranges`."""
        return self.read_ranges([(index, start, stop)], verify=verify)[0]

    def read_ranges(
        self, ranges: Iterable[tuple[int, int, int]], *, verify: bool = False
    ) -> list[Part]:
        """Read parts of samples: only their bytes, from files and origins.

        Args:
            ranges: index, start and stop of each, in bytes of the sample; any number, in any order.
            verify: read the whole samples, and compare their checksums.
        Returns: one array a range: uint8[stop - start], writable. Its `verified` says whether the
            checksum of the sample was compared. It was where the sample was in the daemon's memory,
            or is in a compressed chunk, and with `verify`, unless the reader compares none or the
            format has none; it was not where the part was read alone.
        Raises: UsageError: a range is not inside its sample. Otherwise as `read`.
        Cost: one batch of reads for the parts that are read alone; the daemon does not keep them,
            nor, of remote files, does its store.
        """
        rows = np.array([(int(i), int(a), int(b)) for i, a, b in ranges], np.int64).reshape(-1, 3)
        numbers = self._numbers(rows[:, 0])
        begins, sizes = rows[:, 1], rows[:, 2] - rows[:, 1]
        bad = (begins < 0) | (sizes < 0) | (rows[:, 2] > self.sizes(rows[:, 0]))
        if bad.any():
            index, start, stop = rows[int(np.argmax(bad))].tolist()
            raise UsageError(
                f"the range from {start} to {stop} is not inside sample {index}",
                hint="reader.sizes([index]) gives its length",
            )
        parts: list[Part | None] = [None] * len(rows)
        whole = np.ones(len(rows), np.bool_)
        source = self._selector.current()
        alone = None if verify else self._selector.beside(source)
        if alone is not None:
            whole = alone.in_chunks(numbers)
            if isinstance(source, DaemonSource):
                whole |= source.cached(numbers)
        if whole.any():
            samples, places = np.unique(numbers[whole], return_inverse=True)
            with self._leasing(Rows(samples)) as views:
                for k, at in zip(np.flatnonzero(whole).tolist(), places.tolist(), strict=True):
                    content = views[at][begins[k] : begins[k] + sizes[k]].copy()
                    parts[k] = Part.of(content, verified=self.verified)
        rest = np.flatnonzero(~whole)
        if len(rest) and alone is not None:
            arrays, failed = alone.parts(numbers[rest], begins[rest], sizes[rest])
            self._raise_first(failed, numbers[rest])
            for k, content in zip(rest.tolist(), arrays, strict=True):
                parts[k] = Part.of(content, verified=False)
        return [part for part in parts if part is not None]

    @overload
    def __getitem__(self, index: int | np.integer[Any]) -> Bytes: ...
    @overload
    def __getitem__(self, index: slice | list[int] | NDArray[np.integer[Any]]) -> list[Bytes]: ...
    def __getitem__(self, index: Any) -> Bytes | list[Bytes]:
        if isinstance(index, slice):
            return self.read(range(*index.indices(len(self))))
        if isinstance(index, (int, np.integer)) and not isinstance(index, bool):
            samples: list[Bytes] = rows_of(self.read([int(index)]))
            return samples[0]
        return self.read(index)

    def __iter__(self) -> Iterator[Bytes]:
        for batch in self.batches():
            yield from copies(batch)

    def batches(
        self, indices: Any = None, *, count: int = READ_AHEAD_COUNT, size: int = READ_AHEAD_SIZE
    ) -> Iterator[Batch]:
        """Read in order with read-ahead.

        The next few requests are on their way. Small batches share a request (`read_ahead`), and
        are parts of one buffer then. Without a daemon a windowed order is read by windows
        (`client/local/window_reads.py`); a daemon does so if the order was announced.

        Args:
            indices: as for `read`; None for all.
            count, size: a batch has at most `count` samples and about `size` bytes.

        Raises: as `read`, when the batch concerned is due.
        """
        rows = self._rows_or_all(indices)
        if indices is not None and isinstance(source := self._selector.current(), LocalSource):
            source.follow(rows.numbers)
        with contextlib.closing(self._in_order(rows, count, size)) as answers:
            for part, batch, failed in answers:
                self._raise_first(failed, part.numbers)
                yield part.by_field(batch)

    def scan(
        self, indices: Any = None, *, count: int = READ_AHEAD_COUNT, size: int = READ_AHEAD_SIZE
    ) -> Iterator[tuple[int, Batch, dict[int, FFServeError]]]:
        """Read in order as `batches` does, and go on behind damage.

        Yields: the position in `indices` of the batch's first sample, the batch, and the errors of
            those samples in it that failed, by position; their bytes in the batch are undefined.
        Raises: ServerUnavailable, as `read`.
        """
        first = 0
        with contextlib.closing(self._in_order(self._rows_or_all(indices), count, size)) as answers:
            for part, batch, failed in answers:
                numbers = part.numbers
                named = {k: self._named(error, k, numbers) for k, error in sorted(failed.items())}
                yield first, part.by_field(batch), part.by_sample(named)
                first += len(part)

    def _in_order(
        self, rows: Rows, count: int, size: int
    ) -> Generator[tuple[Rows, Batch, dict[int, FFServeError]], None, None]:
        ahead = ReadAhead(self._start)
        try:
            for some, last in pieces(rows):
                parts = cut(some, self._estimates_of(some), count, size)
                for asked, begun in ahead.through(parts, last=last):
                    for part, batch, errors in split(asked, *self._finish(*begun)):
                        if self._request.closed:
                            raise closed_error()
                        self._used(part.numbers)
                        yield part, batch, errors
        finally:
            # Requests that were not finished have buffers and pins.
            for _, (_, source, pending) in ahead.begun:
                self._discard(source, pending)

    def _start(self, numbers: Int64s) -> tuple[Int64s, SampleSource, Any]:
        return self._retrying(lambda source: (numbers, source, source.start(numbers, apart=False)))

    def _finish(
        self, numbers: Int64s, source: SampleSource, pending: Any
    ) -> tuple[Batch, dict[int, FFServeError]]:
        if self._request.closed:
            self._discard(source, pending)
            raise closed_error()
        try:
            if self._selector.selection.has(source):
                failed = source.finish(pending)
                return Batch(pending.target.buffer, pending.target.offsets), failed
        except (ServerUnavailable, ArenaError):
            pass
        return self._retrying(lambda source: self._batch(source, numbers))

    @staticmethod
    def _batch(source: SampleSource, numbers: Int64s) -> tuple[Batch, dict[int, FFServeError]]:
        pending: Any = source.start(numbers, apart=False)
        failed = source.finish(pending)
        return Batch(pending.target.buffer, pending.target.offsets), failed

    def _discard(self, source: SampleSource, pending: Any) -> None:
        if self._selector.selection.has(source):
            with contextlib.suppress(FFServeError):
                source.finish(pending)

    # ---- what will be read ----------------------------------------------------------------

    def announce(
        self,
        order: Any,
        epoch: int = 0,
        *,
        name: str | None = None,
        replacement: bool = False,
    ) -> None:
        """Tell the daemon which samples this job will ask for, in order.

        The daemon then prefetches exactly these samples, and keeps those with the nearest next use
        by any job. It needs this epoch and the next: announce both at the beginning, and each
        further one when the one before it begins. Without a daemon this serves windowed orders only
        (`client/local/window_reads.py`). A process that another one started (a rank) is a job of
        its own from its first announcement on.

        Args:
            order: all indices of the epoch, as for `read`; none twice, unless `replacement`. Not
                all samples of the data set need to be in it.
            epoch: integer from 0. Announcing it again replaces what was announced; an earlier
                epoch than the current one means that the job begins anew.
            name: of an order that jobs share, for people to read.
            replacement: the samples are drawn with replacement.

        Raises:
            SampleIndexError: an index outside the data set, or one that comes twice.
            UsageError: an empty order, or one that the daemon has no memory for. The job is
                served as before.

        Cost: 4 bytes a sample through the socket; one round trip.
        """
        announcement = self._checked_order(order, epoch, name, replacement)
        self._selector.lead()
        self._retrying(lambda source: source.announce(*announcement))
        self._announced.add(*announcement)

    def reached(self, epoch: int, position: int) -> None:
        """Tell the daemon that the first `position` samples of an announced order were used.

        A program that reads in the announced order with this reader need not call it: the reader
        counts until this is called for the first time. A loader whose workers read calls it, a few
        times a second.

        Args: epoch, position: integers from 0.
        Raises: UsageError for anything else.
        Cost: one small message, no answer, no waiting: a daemon that started anew is looked for in
            a thread, which announces the orders to it.
        """
        epoch, position = self._counted(epoch, position)
        if self._request.closed:
            raise closed_error()
        self._announced.reached(epoch, position)
        self._report(epoch, position)

    def _report(self, epoch: int, position: int) -> None:
        source = self._selector.selection.source
        known = source is not None and source.reached(epoch, position)
        away = self._selector.selection.away_since is not None
        if self._announced.any and (not known or away):
            self._selector.look_for_daemon(source)

    def _used(self, numbers: Int64s) -> None:
        due = self._announced.read(numbers) if self._announced.any else None
        if due is not None:
            self._report(*due)

    # ---- about the samples ----------------------------------------------------------------

    def estimates(self, indices: Any = None) -> Int64s:
        """Return lengths in bytes, int64[n], as `sizes`, but a guess instead of a read where a
        length is not known."""
        return self._estimates_of(self._rows_or_all(indices))

    def _estimates_of(self, rows: Rows) -> Int64s:
        return rows.sums(self._retrying(lambda source: source.estimate(rows.numbers)))

    def sizes(self, indices: Any = None) -> Int64s:
        """Return lengths in bytes, int64[n]; None for all.

        Raises: as `read`, for a sample whose length cannot be known.

        Cost: no sample is read, except those in chunks (RecordIO) that were never decoded before.
        """
        rows = self._rows_or_all(indices)
        with self._by_index():
            return rows.sums(self._retrying(lambda source: source.sizes(rows.numbers)))

    def tables(
        self, shard: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint32]]:
        """Return copies of the tables of `shards[shard]`: payload offsets in the file, lengths,
        expected checksums."""
        if not 0 <= shard < len(self._request.paths):
            raise UsageError(f"there are {len(self._request.paths)} shards, not {shard + 1}")
        offsets, sizes, checksums = self._retrying(lambda source: source.tables(shard))
        if len(self._folders) and self._ends_with_names(self._selector.current().shards[shard]):
            return offsets[:-1], sizes[:-1], checksums[:-1]
        return offsets, sizes, checksums

    def _leave_out_damaged(self) -> None:
        bad: dict[int, FFServeError] = {}
        for part, _, failed in self._in_order(
            self._rows_or_all(), READ_AHEAD_COUNT, READ_AHEAD_SIZE
        ):
            bad |= by_number(part, failed)
        self._leave_out(bad)

    def stats(self) -> dict[str, int | float | str]:
        """Return what this process read through this reader: samples, bytes, hits (copied
        without asking the daemon), misses, hit_rate, and the source; unserved: why a daemon that
        is there is not that, or not of all samples, where this is so."""
        current = self._selector.current()
        return self._summed(current, self._selector.selection.spare)

    # ---- life -----------------------------------------------------------------------------

    def close(self) -> None:
        """Give everything back; idempotent. Later reads raise UsageError."""
        self._selector.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def after_fork(self) -> None:
        """This process is a child: connect anew at the next use."""
        self._announced.forget()
        self._selector.after_fork()


class FieldReader(Reader):
    """Samples of tar files that have several fields. Made by `ffserve.open`.

    A sample is a dict of its fields: `r[i]` and iteration give one, a field that the sample does
    not have being None. What Reader's methods return is a dict as well, by field in the order of
    `fields`: of `read`, `lease`, `batches` and `scan` a list with a value for each sample, of
    `read_batch` a Batch, in which a field that a sample does not have takes no bytes. An error that
    `read` returns stands in the place of its field. `sizes` and `estimates` are those of all fields
    together. Ranges of bytes are those of one field: open the file with one.
    """

    read: Callable[..., dict[str, list[Any]]]  # type: ignore[assignment]
    read_batch: Callable[..., dict[str, Batch]]  # type: ignore[assignment]
    batches: Callable[..., Iterator[dict[str, list[Any]]]]  # type: ignore[assignment]

    rows_of = staticmethod(rows_of)

    def read_ranges(
        self, ranges: Iterable[tuple[int, int, int]], *, verify: bool = False
    ) -> list[Part]:
        """Raises: UsageError: a range is one of a single field."""
        raise UsageError(
            f"samples have the fields {', '.join(self.fields)}, so a range is of none of them",
            path=self._request.paths[0],
            hint=f"open the file with one field: fields={self.fields[:1]}",
        )


class StreamReader(Reader):
    """Samples of compressed TFRecord files. Made by `ffserve.open`.

    It decompresses the files in order and needs no index for that. The first use that asks for a
    length, a sample by index or anything else that needs one opens the files as a Reader does: by
    their index files, or by one pass that makes them. From then on it is a Reader.

    Args:
        paths: the files. server: as for `open`.
        verify: check lengths and payloads against their checksums.
        tolerant: leave out damaged records; `damaged` has their errors, so far. Behind a damaged
            length, or damage to the compression, nothing more is found in a file.
    """

    _indexed = False

    def __init__(
        self,
        paths: tuple[str, ...],
        server: str = "off",
        *,
        verify: bool = True,
        tolerant: bool = False,
    ) -> None:
        BaseReader.__init__(self, OpenRequest(paths, "tfrecord", server, verify, tolerant))

    def _set_up(self) -> None:
        super()._set_up()
        self._stream: RecordStream | None = None
        self._forget_indexing()

    def _forget_indexing(self) -> None:
        self._indexing = threading.RLock()
        self._opening = False
        """Whether a thread opens the files by index: this one, if it has the lock."""

    def open_by_index(self) -> None:
        """Open the files by index, unless they are open already.

        Raises: as `open`.
        Cost: without index files one pass over the files.
        """
        if self._indexed:
            return
        with self._indexing:
            if self._indexed or self._opening:
                return
            self._opening = True
            try:
                self._selector.open()
                self._damaged.clear()
                if self._request.tolerant:
                    self._leave_out_damaged()
                self._indexed = True
            finally:
                self._opening = False

    def batches(
        self, indices: Any = None, *, count: int = READ_AHEAD_COUNT, size: int = READ_AHEAD_SIZE
    ) -> Iterator[Batch]:
        """Read in order, in batches of at most `count` samples and about `size` bytes.

        Args: indices: as for `Reader.batches`; None for all.

        Raises:
            UsageError: the reader is closed.
            FormatError, ChecksumError, TruncatedError: damage, after all batches before it.
            ReadError: the operating system failed.

        Cost: for all samples, unless the files are open by index: one pass over the files; memory
            for one batch and the largest record.
        """
        if indices is None and not self._indexed:
            return self._streamed(count, size)
        return super().batches(indices, count=count, size=size)

    def _streamed(self, count: int, size: int) -> Iterator[Batch]:
        self._damaged.clear()
        request = self._request
        self._stream = RecordStream(
            request.paths,
            verify=request.verify,
            tolerant=request.tolerant,
            damaged=self._damaged,
        )
        for batch in self._stream.batches(count, size):
            if request.closed:
                raise closed_error()
            yield batch

    def _retrying(self, attempt: Callable[[SampleSource], T]) -> T:
        self.open_by_index()
        return super()._retrying(attempt)

    def __len__(self) -> int:
        self.open_by_index()
        return super().__len__()

    def __bool__(self) -> bool:
        return not self._indexed or len(self) > 0

    @property
    def source(self) -> str:
        """Return "stream" until the files are open by index, then as `Reader.source`."""
        return super().source if self._indexed else "stream"

    @property
    def shards(self) -> list[ShardInfo]:
        """The files, in order."""
        self.open_by_index()
        return super().shards

    def stats(self) -> dict[str, int | float | str]:
        """Return the counters of `Reader.stats`; before the files are open by index what the last
        iteration has read so far."""
        if self._indexed:
            return super().stats()
        stream = self._stream
        samples, size = (0, 0) if stream is None else (stream.samples, stream.size)
        counts = {"samples": samples, "bytes": size, "hits": 0, "misses": samples}
        return {**counts, "hit_rate": 0.0, "source": self.source}

    def after_fork(self) -> None:
        """This process is a child: the thread that was opening the files is not here."""
        self._forget_indexing()
        super().after_fork()

    def __repr__(self) -> str:
        if self._indexed:
            return super().__repr__()
        return f"<ffserve.Reader in order of {', '.join(self._request.paths[:3])}>"


# ---- reading in order ----------------------------------------------------------------------------


class ReadAhead(Generic[T]):
    """Requests that are on their way. Args: start: begins one. begun: those not finished."""

    def __init__(self, start: Callable[[Int64s], T]) -> None:
        self._start = start
        self.begun: deque[tuple[list[Rows], T]] = deque()

    def through(
        self, parts: Iterable[tuple[Rows, int]], *, last: bool
    ) -> Iterator[tuple[list[Rows], T]]:
        """Begin the requests for some more batches; yield those that are due to be finished, with
        their batches. Args: parts: see `cut`. last: no more batches follow."""
        for some, whole in read_ahead(parts):
            self.begun.append((some, self._start(whole)))
            if len(self.begun) >= REQUESTS_AHEAD:
                yield self.begun.popleft()
        while last and self.begun:
            yield self.begun.popleft()


def pieces(rows: Rows) -> Iterator[tuple[Rows, bool]]:
    """Yield the samples whose lengths are looked up together, and whether they are the last."""
    step = max(SIZES_AT_ONCE // rows.width, 1)
    for end in range(step, len(rows) + step, step):
        yield rows[end - step : end], end >= len(rows)


def by_number(part: Rows, failed: dict[int, FFServeError]) -> dict[int, FFServeError]:
    """Return errors by number instead of by position in a batch."""
    return {int(part.numbers[k]): error for k, error in failed.items()}


def read_ahead(parts: Iterable[tuple[Rows, int]]) -> Iterator[tuple[list[Rows], Int64s]]:
    """Group small batches that follow each other into requests. `parts`: see `cut`.

    Yields: the batches of a request, and all their samples.
    """
    for some in _grouped(parts):
        numbers = [each.numbers for each in some]
        yield some, numbers[0] if len(some) == 1 else np.concatenate(numbers)


def _grouped(parts: Iterable[tuple[Rows, int]]) -> Iterator[list[Rows]]:
    some: list[Rows] = []
    count = total = 0
    most = GROUP_FIRST
    for part, size in parts:
        if some and (count + len(part) > most or total + size > GROUP_SIZE):
            yield some
            some, count, total = [], 0, 0
            most = min(2 * most, GROUP_COUNT)
        some.append(part)
        count, total = count + len(part), total + size
    if some:
        yield some


def split(
    parts: list[Rows], batch: Batch, failed: dict[int, FFServeError]
) -> Iterator[tuple[Rows, Batch, dict[int, FFServeError]]]:
    """Split the answer to a request into its batches.

    Yields: what was read of samples, the batch (a part of the whole one's buffer), the errors by
    position in it.
    """
    if len(parts) == 1:
        yield parts[0], batch, failed
        return
    first = 0
    for part in parts:
        count = len(part.numbers)
        offsets = batch.offsets[first : first + count + 1]
        low, high = int(offsets[0]), int(offsets[-1])
        errors = {k - first: e for k, e in failed.items() if 0 <= k - first < count}
        yield part, Batch(batch.buffer[low:high], offsets - low), errors
        first += count
