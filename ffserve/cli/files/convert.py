"""``ffserve convert``: convert records of any format to record files of any format."""

from __future__ import annotations

import glob
import os

import click

from ffserve.cli.files.record_files import total_size
from ffserve.cli.terminal import counted, print_json, progress
from ffserve.config import format_size, parse_size
from ffserve.errors import printable


@click.command()
@click.argument("inputs", nargs=-1, required=True, metavar="IN...")
@click.argument("out")
@click.option(
    "--format", "format_name", metavar="ffrecord|recordio|tfrecord|tar",
    help="Format of OUT.  [default: by its suffix]",
)  # fmt: skip
@click.option(
    "--shards", type=click.IntRange(1, 100_000), default=1, show_default=True,
    help="Number of files; if more than one, OUT is a directory.",
)  # fmt: skip
@click.option(
    "--jobs", type=click.IntRange(1, 256), default=min(4, os.cpu_count() or 1),
    show_default=True, help="Number of processes; each writes one shard at a time.",
)  # fmt: skip
@click.option(
    "--compress", metavar="none|snappy|gzip|zlib", help="Compression; depends on OUT's format."
)
@click.option("--dialect", metavar="py|go", help="Dialect of RecordIO.")
@click.option("--max-chunk-size", metavar="SIZE", help="RecordIO: bytes per chunk, such as 1MiB.")
@click.option(
    "--from", "kind", metavar="KIND",
    help="What IN is: mds, litdata, arrayrecord, parquet, arrow, lmdb, h5py or imagefolder.  "
    "[default: recognized]",
)  # fmt: skip
@click.option(
    "--fields",
    metavar="[NAME=]COLUMN,...",
    help="Columns of IN to take; a tar file gets them as fields.  [default: all]",
)
@click.option("--drop-names", is_flag=True, help="Do not store the names of files.")
@click.option(
    "--verify", is_flag=True, help="Read the written files and compare them with the input."
)
@click.option("--json", "as_json", is_flag=True, help="Write the result as JSON.")
def convert(
    inputs: tuple[str, ...],
    out: str,
    format_name: str | None,
    shards: int,
    jobs: int,
    compress: str | None,
    dialect: str | None,
    max_chunk_size: str | None,
    kind: str | None,
    fields: str | None,
    drop_names: bool,
    verify: bool,
    as_json: bool,
) -> int:
    """Convert records of any format to record files.

    IN are record files of any format, directories of them, patterns, tar files (WebDataset), .npy
    arrays (a row is a record), .txt and .jsonl files (a line is a record), directories of other
    files (a file is a record), or what other packages write, read by these: MDS, litData,
    ArrayRecord, Parquet, Arrow, LMDB, HDF5. Record files, tar files, text and OUT may be URLs.

    Names are kept: FFRecord stores them in an additional sample at the end; in tar they are those
    of the members; in the other formats, files that share a name up to its first dot become one
    tf.train.Example. Several columns become fields of tar; other formats hold one (--fields).

    A file takes its name when it is complete, so an interrupted run leaves no partial file. With
    --shards, completed files are kept when the same command runs again; without, conversion starts
    from the beginning.

    \b
      ffserve convert '/data/*.tfrecord.gz' train.tfrecord
      ffserve convert web-{000..099}.tar /fast/web --format ffrecord --shards 64 --jobs 8
      ffserve convert features.npy features.ffr --verify
      ffserve convert corpus.txt lines.ffr
      ffserve convert mds/train train --format tar --fields jpg=image,cls=label --shards 16
    """
    from ffserve.convert import convert as run

    files = [path for given in inputs for path in glob.glob(given) or [given]]
    with progress("converting", total_size(files), as_bytes=True) as shown:
        written = run(
            inputs,
            out,
            format=format_name,
            shards=shards,
            jobs=jobs,
            compression=compress,
            dialect=dialect,
            max_chunk_size=parse_size(max_chunk_size) if max_chunk_size else None,
            names="drop" if drop_names else "keep",
            kind=kind,
            fields=fields.split(",") if fields else None,
            verify=verify,
            progress=lambda _count, size: shown.advance(size),
        )
    if as_json:
        print_json(
            {
                "paths": list(written.paths),
                "samples": written.samples,
                "size_bytes": written.bytes,
                "kept": written.kept,
            }
        )
        return 0
    where = out if shards == 1 else f"{shards} files in {out}"
    kept = f" ({written.kept} of them from an earlier run)" if written.kept else ""
    verified = ", verified" if verify else ""
    samples, size = counted(written.samples, "sample"), format_size(written.bytes)
    click.echo(f"{samples}, {size}: {printable(where)}{kept}{verified}")
    return 0
