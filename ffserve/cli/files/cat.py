"""``ffserve cat``: write samples to standard output."""

from __future__ import annotations

import sys
from pathlib import PurePath
from typing import TYPE_CHECKING

import click
import numpy as np
from numpy.typing import NDArray

from ffserve.cli.files.record_files import batches_of, opened_by_member
from ffserve.cli.flags import format_option
from ffserve.errors import UsageError, outside

if TYPE_CHECKING:
    import ffserve


def _is_text(sample: NDArray[np.uint8]) -> bool:
    try:
        text = sample.tobytes().decode()
    except UnicodeDecodeError:
        return False
    return all(char.isprintable() or char in "\t\n\r" for char in text)


def _write(samples: list[NDArray[np.uint8]], *, force: bool) -> None:
    out = sys.stdout.buffer
    for sample in samples:
        if sys.stdout.isatty() and not force and not _is_text(sample):
            raise UsageError(
                "the sample is binary and standard output is a terminal",
                hint="redirect it to a file, or add --force",
            )
        out.write(sample.data)
    out.flush()


def _as_indices(word: str, count: int) -> range | None:
    """Return the indices that ``7`` or ``3:9`` means; None if the word is not of that form.

    Args: count: number of samples.
    Raises: SampleIndexError for indices from ``count`` on.
    """
    first, colon, stop = word.partition(":")
    if not colon:
        stop = first
    else:
        first = first or "0"
        stop = stop or str(count)
    if not all(part.isascii() and part.isdecimal() for part in (first, stop)):
        return None
    found = range(int(first), int(stop) + (not colon))
    if max(found.start, found.stop) > count:
        raise outside(max(found.start, count), count)
    return found


@click.command()
@click.argument("file")
@click.argument("which", nargs=-1, required=True, metavar="INDEX|NAME...")
@click.option("--force", is_flag=True, help="Write binary samples to a terminal, too.")
@click.option(
    "--server", default="off", show_default=True, metavar="off|auto|require|SOCKET",
    help="Read through a daemon.",
)  # fmt: skip
@format_option
def cat(
    file: str, which: tuple[str, ...], force: bool, server: str, format_name: str | None
) -> int:
    """Write samples to standard output, byte for byte, one after the other.

    A sample is given by its index, by a range such as 3:9, or by its name in a file made by
    'ffserve pack'. Of a tar file these are the members, as 'ffserve ls' has them.

    \b
      ffserve cat train.ffr 0 > first.jpg
      ffserve cat photos.ffr cats/tom.jpg > tom.jpg
    """
    with opened_by_member(file, format_name, server) as reader:
        asked = [(word, _as_indices(word, len(reader))) for word in which]
        # All words are checked before anything is written.
        wanted = [
            [_named(reader, word, file)] if indices is None else indices for word, indices in asked
        ]
        for indices in wanted:
            if len(indices) == 1:
                _write(reader.read(indices), force=force)
                continue
            for batch in batches_of(reader.estimates(indices)):
                _write(reader.read(indices[batch.start : batch.stop]), force=force)
    return 0


def _named(reader: ffserve.Reader, name: str, file: str) -> int:
    """Return the index of the sample with a name."""
    try:
        if any(shard.format == "tar" for shard in reader.shards):
            return reader.names.index(name)
        return reader.index_of("/".join(PurePath(name).parts))
    except (LookupError, ValueError):
        raise UsageError(
            f"no sample has the name {name!r}"
            if reader.names
            else f"{name!r} is not an index, and the file has no names",
            path=file,
            hint="'ffserve ls' lists the samples and their names",
        ) from None
