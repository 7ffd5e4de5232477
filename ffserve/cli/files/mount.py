"""``ffserve mount`` and ``ffserve unmount``: record files as a file system."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import click

from ffserve.cli import EXIT_BAD_DATA, report
from ffserve.cli.flags import format_option
from ffserve.cli.terminal import counted
from ffserve.errors import FFServeError


@click.command()
@click.argument("mountpoint")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option(
    "--foreground", is_flag=True, help="Stay in the foreground, and write errors to the terminal."
)
@click.option(
    "--allow-other", is_flag=True,
    help="Show the view to all users, and only the files that everybody may read.",
)  # fmt: skip
@click.option(
    "--suffix", default="", metavar="TEXT",
    help="Of the names of samples that go by number, such as .jpg.",
)  # fmt: skip
@click.option(
    "--server", default="auto", show_default=True, metavar="off|auto|require|SOCKET",
    help="Read through a daemon.",
)  # fmt: skip
@format_option
def mount(
    mountpoint: str,
    paths: tuple[str, ...],
    foreground: bool,
    allow_other: bool,
    suffix: str,
    server: str,
    format_name: str | None,
) -> int:
    """Show record files as a read-only file system, for programs that want files.

    MOUNTPOINT is an empty directory. Below it are the files themselves in shards/, and the samples
    of each, one file a sample, in samples/NAME/: by name if the file was packed or converted from
    files, else by number, in folders of 10,000. Of URLs only the samples are shown. Only you see
    the view, unless you give --allow-other. A sample that is damaged gives an I/O error; the others
    are served. 'ffserve unmount' removes the view.

    \b
      mkdir view
      ffserve mount view photos.ffr
      ls view/samples/photos.ffr
      ffserve unmount view
    """
    options = {
        "format": format_name,
        "server": os.path.abspath(server) if os.sep in server else server,
        "allow_other": allow_other,
        "suffix": suffix,
    }
    if foreground:
        return _serve_in_turn(mountpoint, paths, options)
    return _in_background(
        lambda started: _serve(mountpoint, paths, options, started, _leave_terminal)
    )


def _serve_in_turn(mountpoint: str, paths: tuple[str, ...], options: dict[str, Any]) -> int:
    """Call `_serve`, after a pause if earlier starts by a service manager have failed."""
    from ffserve.server.life import starts

    starts.wait_turn()
    served = threading.Timer(starts.SERVED_S, starts.forget)
    served.daemon = True
    code = _serve(mountpoint, paths, options, served.start)
    served.cancel()
    if code == 0:
        starts.forget()
    return code


def _serve(
    mountpoint: str,
    paths: tuple[str, ...],
    options: dict[str, Any],
    started: Callable[[], object] = lambda: None,
    forked: Callable[[], object] = lambda: None,
) -> int:
    """Mount, serve and unmount; return the exit code.

    Args:
        options: of `ffserve.view.supervisor.Options`.
        started: called when it is mounted.
        forked: called in each process that answers.
    """
    from ffserve.system.systemd import notify
    from ffserve.view.supervisor import Options, View

    view = View(paths, Options(**options))

    def ready() -> None:
        files = counted(len(view.files), "file")
        click.echo(f"{mountpoint}: {counted(len(view), 'sample')} in {files}, by {view.source}")
        notify("READY=1")
        started()

    try:
        return view.serve(mountpoint, ready, forked)
    finally:
        view.close()


def _leave_terminal() -> None:
    """Detach from the terminal, from pipes and from the file system of the working directory."""
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)


def _in_background(serve: Callable[[Callable[[], object]], int]) -> int:
    """Run a function in a process of its own, and return when that has started; return its exit
    code if it ends before.

    Args: serve: gets a function to call when it has started.
    """
    receiver, sender = os.pipe()
    child = os.fork()
    if child:
        os.close(sender)
        with os.fdopen(receiver, "rb") as pipe:
            if pipe.read(1):
                return 0
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def started() -> None:
        sys.stdout.flush()
        _leave_terminal()
        os.write(sender, b".")

    code = EXIT_BAD_DATA
    try:
        os.close(receiver)
        os.setsid()
        code = serve(started)
    except (FFServeError, OSError, MemoryError) as error:
        code = report(error)
    finally:
        os._exit(code)


@click.command()
@click.argument("mountpoint")
@click.option("--lazy", is_flag=True, help="Also if files are open; their programs get errors.")
def unmount(mountpoint: str, lazy: bool) -> int:
    """Remove a view that 'ffserve mount' has mounted.

    It also removes what is left of a view whose process was killed.

    \b
      ffserve unmount view
    """
    from ffserve.view import mounting

    mounting.unmount_view(mounting.resolved(mountpoint), lazy=lazy)
    return 0
