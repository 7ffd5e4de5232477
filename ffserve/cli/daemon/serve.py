"""``ffserve serve``: run the daemon. Its flags are generated from the settings."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import click

from ffserve.cli import exit_code
from ffserve.config import CONFIG_PATH, REMOVED, ServerConfig, format_size, load_config
from ffserve.errors import FFServeError
from ffserve.server.life.starts import wait_turn

log = logging.getLogger("ffserve")

Command = TypeVar("Command", bound=Callable[..., Any])


def _name_of(key: str) -> str:
    """Return the name of a setting among the arguments of the command."""
    return key.replace(".", "_")


def _setting_flags(command: Command) -> Command:
    """Add one option for every field of ServerConfig, and for settings of earlier releases."""
    for key in REMOVED:
        command = click.option(f"--{key}", key, hidden=True)(command)
    for field in reversed(dataclasses.fields(ServerConfig)):
        option = field.metadata
        command = click.option(
            option["flag"],
            _name_of(option["key"]),
            metavar=option["metavar"],
            multiple=option["key"] in ("roots", "file_systems", "store.common"),
            help=f"{option['doc']}  [default: {option['shown_default']}]",
        )(command)
    return command


def _check(config: ServerConfig, path: str, ignored: list[str]) -> None:
    """Check settings. Root is told about the service, which runs as another user with other
    limits."""
    from ffserve.server.life.startup import Unit, check, closed_fault

    unit = Unit.of(path) if os.geteuid() == 0 else None
    if unit is not None and (fault := closed_fault(path, unit)) is not None:
        raise fault
    check(config, ignored, unit)
    text = f"the settings are valid: arena {format_size(config.arena_size)}, "
    text += f"roots {' '.join(config.roots)}"
    click.echo(text if unit is None else f"{text}; {unit.judged(config)}")


@click.command(context_settings={"max_content_width": 100})
@click.option(
    "--config",
    "config_path",
    metavar="FILE",
    help=f"Settings in TOML, named as these flags; flags override them. [default: {CONFIG_PATH}]",
)
@click.option("--check", is_flag=True, help="Check the settings and exit; serve nothing.")
@click.option(
    "--handover",
    is_flag=True,
    help="Take over from the daemon that serves the socket: its memory, its socket, its clients. "
    "Only for its own user; a service is restarted instead.",
)
@_setting_flags
def serve(config_path: str | None, check: bool, handover: bool, **settings: Any) -> int:
    """Run the daemon until SIGTERM or Ctrl-C.

    It serves files below its roots to processes that have permission to read them, and keeps
    samples in an arena of shared memory. After SIGTERM it completes the requests in flight and
    exits with 0. SIGHUP makes it read its settings again; if it has a terminal, SIGHUP ends it.

    \b
      ffserve serve --root /data --arena 16GiB
      ffserve serve --config ffserve.toml
      ffserve serve --config ffserve.toml --check
      systemctl enable --now ffserve.socket     as a service
    """
    keys = [*(field.metadata["key"] for field in dataclasses.fields(ServerConfig)), *REMOVED]
    given = {key: settings[_name_of(key)] for key in keys}
    given = {key: value for key, value in given.items() if value not in (None, ())}
    if "roots" in given:
        given["roots"] = [os.path.abspath(root) for root in given["roots"]]
    if "socket" in given:
        given["socket"] = os.path.abspath(given["socket"])
    if given.get("store.directory"):
        given["store.directory"] = os.path.abspath(given["store.directory"])
    load = partial(load_config, config_path, given)
    ignored: list[str] = []
    failed = 0 if check else wait_turn()
    config = load(ignored)
    if check:
        _check(config, config_path or CONFIG_PATH, ignored)
        return 0
    from ffserve.server.life import daemon

    try:
        return daemon.serve(config, load, ignored, handover=handover, failed=failed)
    except FFServeError as error:
        if config.log_format != "json":
            raise
        log.critical("cannot serve: %s", error)
        return exit_code(error)
