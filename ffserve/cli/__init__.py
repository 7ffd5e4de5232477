"""The command line: ``ffserve COMMAND``.

This file knows which commands there are and what an error costs; each command is a file of its
own, imported when it is called, so that ``ffserve --help`` imports nothing but click.

Exit codes: 0 fine, 1 the data are bad or could not be read, 2 usage (also when a file is not there,
or may not be read or written), 3 the daemon is not there, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import click

from ffserve.errors import (
    AccessDenied,
    CoreError,
    FFServeError,
    MissingFile,
    SampleIndexError,
    ServerUnavailable,
    UsageError,
)

EXIT_BAD_DATA = 1
EXIT_USAGE = 2
EXIT_NO_DAEMON = 3
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("demo", "Pack, serve, train, and show what was read: the whole in a minute."),
    "serve": ("serve", "Run the daemon."),
    "status": ("status", "Show what the daemon holds and does."),
    "resize": ("resize", "Give the daemon's arena another size."),
    "bench": ("bench", "Measure this machine, ffserve, and what else is installed."),
    "simulate": ("simulate", "Try a cache size without buying it."),
    "pack": ("pack", "Pack a directory or files into record files."),
    "inspect": ("inspect", "Show what is in record files."),
    "verify": ("verify", "Read everything and check every checksum."),
    "cat": ("cat", "Write samples to standard output."),
    "convert": ("convert", "Convert record files, tar files, arrays and directories."),
    "index": ("index", "Keep what a walk over files without tables (TFRecord) finds."),
}
"""Command → its module here and its line in the list of commands."""


class CommandLine(click.Group):
    """The group of all commands; it imports one when that one is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order in which a newcomer meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module and return the command."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"{__name__}.{COMMANDS[cmd_name][0]}")
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command and turn what it raises into an exit code."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            # The reader of our output (head, less) has seen enough. Python would complain once
            # more while flushing at exit, so the descriptor is led elsewhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise click.exceptions.Exit(EXIT_BROKEN_PIPE) from None
        except (FFServeError, OSError, MemoryError) as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            report(error)
            raise click.exceptions.Exit(exit_code(error)) from None
        return result


def exit_code(error: BaseException) -> int:
    """Return the exit code that an error stands for."""
    if isinstance(error, ServerUnavailable):
        return EXIT_NO_DAEMON
    if isinstance(error, (UsageError, SampleIndexError, MissingFile, AccessDenied, CoreError)):
        return EXIT_USAGE
    return EXIT_BAD_DATA


def exit_code_of_all(codes: Iterable[str]) -> int:
    """Return the exit code of a command that went on behind errors with these codes."""
    found = set(codes)
    if found <= {MissingFile.code, AccessDenied.code}:
        return EXIT_USAGE if found else 0
    return EXIT_BAD_DATA


def report(error: BaseException) -> None:
    """Write an error to standard error: what happened, and below it what can be done."""
    from ffserve.cli.terminal import printable

    hint = error.hint if isinstance(error, FFServeError) else None
    if isinstance(error, MemoryError):
        hint = "free some memory, or lift the limit on it (ulimit -v, the cgroup's)"
    text = str(error) or type(error).__name__
    if hint:
        text = text.removesuffix(f" ({hint})")
    click.echo(f"error: {printable(text)}", err=True)
    if hint:
        click.echo(f"  hint: {printable(hint)}", err=True)


def _print_version(ctx: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from importlib.metadata import version

        click.echo(f"ffserve {version('ffserve')}")
        ctx.exit()


@click.group(
    cls=CommandLine,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 fine, 1 the data are bad, 2 usage, 3 the daemon is not there.",
)
@click.option("--debug", is_flag=True, help="Show where in the program an error arose.")
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version,
    help="Show the version.",
)  # fmt: skip
def cli(debug: bool) -> None:
    """Serve record files to every training job of a machine.

    One daemon owns the files, reads them with io_uring, checks them once and keeps samples in
    memory that all jobs share.

    \b
      ffserve demo                                see it work
      ffserve pack photos/ -o photos.ffr          make a record file
      ffserve serve --root /data --arena 16GiB    serve all below /data
      ffserve status                              what it does
    """


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="surrogateescape")  # file names go out as they came in
    code = run(arguments)
    if code == EXIT_INTERRUPTED:
        # All is cleaned up; threads that are left may hang on a disk.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def _open_closed_streams() -> None:
    """Lead standard streams that are closed (``>&-``) nowhere, for no file to take its place."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
    sys.stdin, sys.stdout, sys.stderr = (
        stream or os.fdopen(fd, mode)
        for fd, (stream, mode) in enumerate(
            ((sys.stdin, "r"), (sys.stdout, "w"), (sys.stderr, "w"))
        )
    )


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        code = cli.main(
            None if arguments is None else list(arguments), "ffserve", standalone_mode=False
        )
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except OSError as error:  # of writing a help text
        report(error)
        return exit_code(error)
    return code if isinstance(code, int) else 0
