"""``ffserve run``: programs over shares of input files."""

from __future__ import annotations

import os
import re
import sys
from typing import cast

import click

from ffserve.errors import UsageError, printable
from ffserve.order import checked_integer


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="URI[,URI...][#ALIAS]",
    help="Input files, directories or patterns; repeatable.  [default alias: input]",
)
@click.option(
    "--input-strategy",
    "strategy",
    default="download",
    show_default=True,
    type=click.Choice(["download", "placeholder", "stream"], case_sensitive=False),
    help="Files in ./ALIAS/, their URIs in INPUT_FILE_LIST, or their lines on standard input.",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 1 << 20),
    help="Number of workers.  [default: of the launcher's environment, else 1]",
)
@click.option(
    "--rank",
    type=click.IntRange(0),
    help="Run only this worker of a larger job.  [default: of the launcher's environment]",
)
@click.option(
    "--rename-input-files",
    "rename",
    is_flag=True,
    help="Name downloaded files by time and number.",
)
@click.option("--stream-epochs", type=click.IntRange(1), help="Stream everything N times.")
@click.option("--shuffle", type=int, metavar="SEED", help="Stream in random order.")
@click.option(
    "--framing",
    type=click.Choice(["lines", "length"], case_sensitive=False),
    help="End lines or samples with a line feed, or put their size before them.  [default: lines]",
)
@click.option(
    "--output",
    "outputs",
    multiple=True,
    metavar="DIR=URI",
    help="Upload the workers' directories DIR to URI when all have succeeded; repeatable.",
)
@click.option(
    "--job",
    "name",
    metavar="NAME",
    help="Name of this attempt of the job, the same for all ranks; with --rank and --output.  "
    "[default: of the launcher's environment]",
)
@click.option(
    "--grace",
    type=click.IntRange(0, 1 << 20),
    metavar="SECONDS",
    help="Kill a program that has not ended so long after SIGTERM.  [default: 10]",
)
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def run(
    ctx: click.Context,
    inputs: tuple[str, ...],
    strategy: str,
    workers: int | None,
    rank: int | None,
    rename: bool,
    stream_epochs: int | None,
    shuffle: int | None,
    framing: str | None,
    outputs: tuple[str, ...],
    name: str | None,
    grace: int | None,
    program: tuple[str, ...],
) -> int:
    """Run a program on its share of input files, as XLearning does.

    With --workers N there are N workers on this machine. In a job of torchrun, MPI or Slurm, or
    with --rank R, this is one worker. The program gets RANK and WORLD_SIZE. With more than one
    worker, worker R runs in ./worker-R/. The exit code is that of the first program that failed.

    \b
      ffserve run --input '/data/train-*.txt#train' --workers 4 -- python train.py
      ffserve run --input s3://bucket/logs --input-strategy stream -- wc -l
      torchrun --no-python ... ffserve run --input /data/train -- python train.py
    """
    from ffserve.inputs import job
    from ffserve.inputs.outputs import parse_output
    from ffserve.inputs.processes import GRACE_S
    from ffserve.inputs.stream import Framing

    _check_options(ctx)
    parsed = [parse_output(text) for text in outputs]
    if len({output.uri.rstrip("/") for output in parsed}) < len(parsed):
        raise UsageError("two outputs have the same URI", hint="give each output a URI of its own")
    count, only = job.place_in_job(workers, rank, os.environ)

    def say(text: str) -> None:
        click.echo(printable(text), err=True)

    sys.stdout.flush()
    return job.run(
        job.Run(
            command=program,
            inputs=inputs,
            strategy=cast(job.Strategy, strategy),
            workers=count,
            rank=only,
            rename=rename,
            epochs=stream_epochs or 1,
            seed=shuffle,
            framing=cast(Framing, framing or "lines"),
            outputs=parsed,
            name=name,
            grace_s=GRACE_S if grace is None else grace,
        ),
        say,
    )


def _check_options(ctx: click.Context) -> None:
    """Raise UsageError for options that do not belong together, or have a wrong value."""
    if ctx.params["strategy"] != "stream" and any(
        ctx.params[name] is not None for name in ("stream_epochs", "shuffle", "framing")
    ):
        raise UsageError(
            "--stream-epochs, --shuffle and --framing belong to the strategy stream",
            hint="add --input-strategy stream",
        )
    if ctx.params["strategy"] != "download" and ctx.params["rename"]:
        raise UsageError("--rename-input-files belongs to the strategy download")
    if (shuffle := ctx.params["shuffle"]) is not None:
        checked_integer("--shuffle", shuffle, 1 << 128)
    name = ctx.params["name"]
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}", name):
        raise UsageError(
            f"invalid name of a job {name!r}", hint="use letters, digits, '-', '_' and '.'"
        )
