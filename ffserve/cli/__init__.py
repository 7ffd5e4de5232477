"""The command line: ``ffserve COMMAND``.

This file has the list of commands and the exit code of each error. A command is a module that is
imported when the command runs, so that ``ffserve --help`` imports nothing but click.

Every error is a line ``error: …`` and a line ``hint: …`` with what to do next, those of click among
them. Exit codes: EXIT_CODES.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import logging
import math
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ffserve.errors import (
    AccessDenied,
    CoreError,
    FFServeError,
    MissingFile,
    SampleIndexError,
    ServerUnavailable,
    UsageError,
    printable,
)

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

EXIT_BAD_DATA = 1
EXIT_USAGE = 2
EXIT_NO_DAEMON = 3
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
EXIT_CODES = (
    "Exit codes: 0 success, 1 bad or unreadable data, 2 usage (also a missing path, or one without "
    "permission), 3 no daemon, 4 warnings (doctor), 130 interrupted, 141 nobody reads the output."
)
"""The last words of every help text; docs/howto/command-line.md has the same."""

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("trials.demo", "Pack files, serve them and train on them, in less than a minute."),
    "serve": ("daemon.serve", "Run the daemon."),
    "status": ("daemon.status", "Show the daemon's memory, files and jobs."),
    "doctor": ("daemon.doctor", "Find out what is wrong with machine, daemon and data."),
    "top": ("daemon.top", "Show the daemon's jobs, live."),
    "stop": ("daemon.stop", "Stop the daemon."),
    "resize": ("daemon.resize", "Change the size of the daemon's arena."),
    "bench": ("trials.bench", "Measure ffserve beside this machine's memory and disk."),
    "install-service": ("daemon.service", "Install the daemon as a service of systemd."),
    "uninstall-service": ("daemon.service", "Stop and remove the service."),
    "simulate": ("trials.simulate", "Simulate the hit rates of a cache size."),
    "pack": ("files.pack", "Pack a directory or files into record files."),
    "inspect": ("files.inspect", "Show samples, sizes and checksums of record files."),
    "ls": ("files.ls", "List the samples of a record file, with sizes and names."),
    "verify": ("files.verify", "Read all samples and check their checksums."),
    "scrub": ("files.scrub", "Find damage at a limited rate, while the daemon is idle."),
    "cat": ("files.cat", "Write samples to standard output."),
    "convert": ("files.convert", "Convert record files, tar files, arrays and directories."),
    "index": ("files.index", "Write index files for TFRecord files."),
    "run": ("programs", "Run a program on its share of input files."),
    "stage": ("files.stage", "Copy remote files to a local directory."),
    "warm": ("files.warm", "Bring files into store and memory before a job reads them."),
    "mount": ("files.mount", "Show record files as a file system."),
    "unmount": ("files.mount", "Remove what 'mount' has mounted."),
}
"""Command → its module and its line in the list of commands."""


class CommandLine(click.Group):
    """The group of all commands, each imported when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order in which a newcomer needs them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module and return the command."""
        if cmd_name not in COMMANDS:
            if ctx.resilient_parsing:  # completion
                return None
            raise UsageError(
                f"no such command {cmd_name!r}",
                hint=did_you_mean(cmd_name, COMMANDS) + "`ffserve --help` lists all commands",
            )
        module = importlib.import_module(f"{__name__}.{COMMANDS[cmd_name][0]}")
        command = getattr(module, cmd_name.replace("-", "_"))
        assert isinstance(command, click.Command)
        command.epilog = EXIT_CODES
        if ctx.resilient_parsing:
            from ffserve.cli.completion import complete_parameters

            complete_parameters(command)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands that begin so, without importing them."""
        from click.shell_completion import CompletionItem

        found = [
            CompletionItem(name, help=line)
            for name, (_, line) in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command and turn exceptions into exit codes."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            # The reader of the output (head, less) has ended. The descriptor is redirected, since
            # Python flushes it once more at exit and would report the error again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise click.exceptions.Exit(EXIT_BROKEN_PIPE) from None
        except KeyboardInterrupt:
            # click would end the line of the terminal's ^C, which leaves an empty one elsewhere.
            click.echo("interrupted", err=True)
            raise click.exceptions.Exit(EXIT_INTERRUPTED) from None
        except (FFServeError, OSError, MemoryError) as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            raise click.exceptions.Exit(report(error)) from None
        return result


class FloatRange(click.FloatRange):
    """click's FloatRange, which takes nan for a number inside of any range, without nan."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


def exit_code(error: BaseException) -> int:
    """Return the exit code for an error."""
    if isinstance(error, ServerUnavailable):
        return EXIT_NO_DAEMON
    if isinstance(error, (UsageError, SampleIndexError, MissingFile, AccessDenied, CoreError)):
        return EXIT_USAGE
    return EXIT_BAD_DATA


def exit_code_of_all(codes: Iterable[str]) -> int:
    """Return the exit code of a command that continued after errors with these codes."""
    found = set(codes)
    if found <= {MissingFile.code, AccessDenied.code, UsageError.code}:
        return EXIT_USAGE if found else 0
    return EXIT_BAD_DATA


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the beginning of a hint: the known words that are like a word, or nothing."""
    near = difflib.get_close_matches(word, list(known))
    return f"did you mean {' or '.join(near)}? " if near else ""


def colours() -> bool | None:
    """Return False if the user wants no colours; None lets terminals have them."""
    return False if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" else None


def report(error: BaseException) -> int:
    """Write an error to standard error, below it a hint; return its exit code."""
    from ffserve.system.systemd import priority

    if isinstance(error, OSError) and isinstance(error.filename, (str, bytes)):
        from ffserve.disk.files import os_error

        error = os_error(error, os.fsdecode(error.filename))
    hint = error.hint if isinstance(error, FFServeError) else None
    if isinstance(error, MemoryError):
        hint = "free some memory, or raise the memory limit (ulimit -v, the cgroup's)"
    text = str(error) or type(error).__name__
    if isinstance(error, ServerUnavailable) and (removed := _removed(error.path)):
        text, hint = text.removesuffix(f" ({hint})"), removed
    elif hint:
        text = text.removesuffix(f" ({hint})")
    if not hint and isinstance(error, FFServeError):
        usage = isinstance(error, UsageError)
        hint = _help_of(click.get_current_context(silent=True)) if usage else _DOCTOR
    _write_error(priority(logging.ERROR), text, hint)
    return exit_code(error)


_DOCTOR = "`ffserve doctor`, with the path of the data, looks for the cause"


def _help_of(context: click.Context | None) -> str:
    """Return a hint: the help of the command that runs."""
    words = [context.command_path, context.invoked_subcommand] if context else ["ffserve"]
    return f"see `{' '.join(word for word in words if word)} --help`"


def _write_error(begin: str, text: str, hint: str | None) -> None:
    """Args: begin: see `systemd.priority`."""
    word = click.style("error:", fg="red", bold=True)
    click.echo(f"{begin}{word} {printable(text)}", err=True, color=colours())
    if hint:
        click.echo(f"{begin}  hint: {printable(hint)}", err=True)


def _report_usage(error: click.ClickException) -> int:
    """Write an error of click in the form of all others; return its exit code."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    text, hint = error.format_message(), _help_of(context)
    if isinstance(error, click.NoSuchOption):
        text = f"no such option {error.option_name}"
        near = " or ".join(error.possibilities or ())
        hint = f"did you mean {near}? {hint}" if near else hint
    _write_error("", text[:1].lower() + text[1:].removesuffix("."), hint)
    return error.exit_code


def _removed(path: str | None) -> str:
    """Return a hint if the socket of a service was removed."""
    from ffserve.system.socket_path import SYSTEM_SOCKET, restart_if_removed

    for each in (path or SYSTEM_SOCKET, SYSTEM_SOCKET):
        if restart := restart_if_removed(each):
            what = f"as root, `{restart}` makes it anew"
            return f"{each} was removed while a daemon listens on it; {what}"
    return ""


def _print_version(ctx: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from ffserve import __version__

        click.echo(f"ffserve {__version__}")
        ctx.exit()


@click.group(
    cls=CommandLine,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXIT_CODES,
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version,
    help="Show the version.",
)  # fmt: skip
def cli(debug: bool) -> None:
    """Serve record files to all training jobs of a machine.

    One daemon reads the files with io_uring, checks each sample once, and keeps samples in memory
    that all jobs share.

    \b
      ffserve demo                                see it work
      ffserve pack photos/ -o photos.ffr          make a record file
      ffserve serve --root /data                  serve all files below /data
      ffserve status                              show its memory and jobs
    """


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="surrogateescape")  # file names go out as they came in
    code = run(arguments)
    if code == EXIT_INTERRUPTED:
        # Everything is cleaned up, but threads may still wait for a disk.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def _open_closed_streams() -> None:
    """Open closed standard streams (``>&-``) on /dev/null, so that no file takes their numbers."""
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
            None if arguments is None else list(arguments),
            "ffserve",
            standalone_mode=False,
            color=colours(),
        )
    except click.ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # since click 8.2: `ffserve` alone
            error.show()
            return error.exit_code
        return _report_usage(error)
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except OSError as error:  # of writing a help text
        return report(error)
    return code if isinstance(code, int) else 0
