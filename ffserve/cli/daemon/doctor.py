"""``ffserve doctor``: find out what is wrong with the machine, the daemon, the data."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from ffserve.cli.flags import json_option, socket_option
from ffserve.cli.terminal import counted, print_facts, print_json
from ffserve.config import CONFIG_PATH
from ffserve.doctor.case import Finding, gather
from ffserve.errors import CoreError, printable

if TYPE_CHECKING:
    from ffserve.doctor.case import Case

EXIT_ERRORS, EXIT_WARNINGS = 1, 4
TIMEOUT_S = 30.0
"""All checks together may take this long. A directory service, for instance, may never answer."""


@click.command()
@click.argument("paths", metavar="[PATH]...", nargs=-1)
@socket_option
@click.option(
    "--config",
    "config_path",
    metavar="FILE",
    help=f"The daemon's settings.  [default: the running daemon's, else {CONFIG_PATH}]",
)
@json_option
def doctor(
    paths: tuple[str, ...], socket: str | None, config_path: str | None, as_json: bool
) -> int:
    """Find out what is wrong with this machine, the daemon and the data.

    PATH is data: a file, a directory or a pattern, as a job opens it. Each finding has the commands
    that mend it. Nothing is changed, and nothing is written. It works without a daemon and for
    every user, who is told what concerns this user. The exit code is 0 if nothing was found, 1 if
    something does not work, 4 if everything works, but worse than it could.

    \b
      ffserve doctor
      ffserve doctor /data/train
      sudo -u alice ffserve doctor /data/train --json
    """
    case = gather(paths, socket, config_path)
    facts: dict[str, list[str]] = {}
    findings: list[Finding] = []
    late = _examine(case, facts, findings)
    # A check that is late may add to both.
    facts = dict(facts)
    findings = sorted(findings, key=lambda finding: finding.level != "error")
    if as_json:
        print_json({"facts": facts, "findings": [dataclasses.asdict(each) for each in findings]})
    else:
        _print(facts, findings)
    if any(finding.level == "error" for finding in findings):
        code = EXIT_ERRORS
    else:
        code = EXIT_WARNINGS if findings else 0
    if late:
        # A thread waits for something that may never come.
        sys.stdout.flush()
        os._exit(code)
    return code


def _examine(case: Case, facts: dict[str, list[str]], findings: list[Finding]) -> bool:
    """Run all checks; return whether one of them has not ended."""
    try:
        from ffserve.doctor import checks
    except CoreError as error:
        commands = (error.hint.removeprefix("run ").partition(", or ")[0],) if error.hint else ()
        text = f"{error.path}: {error.message}" if error.path else error.message
        findings.append(Finding("core", "error", text, "Nothing can be read or served.", commands))
        return False

    running = ["daemon"]

    def run() -> None:
        checks.greet(case)
        for running[0], check in checks.chosen(case).items():
            _sort(check(case), facts.setdefault(running[0], []), findings)

    return _in_time(run, running, findings)


def _sort(found: Iterator[str | Finding], facts: list[str], findings: list[Finding]) -> None:
    for each in found:
        if isinstance(each, str):
            facts.append(each)
        elif each not in findings:
            findings.append(each)


def _in_time(run: Callable[[], None], running: list[str], findings: list[Finding]) -> bool:
    """Run a function in a thread that is left alone if it does not end; return whether it was."""
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=guarded, name="ffserve-doctor", daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    if failed:
        raise failed[0]
    if not thread.is_alive():
        return False
    text = f"the check of {running[0]} has not ended after {TIMEOUT_S:g} s"
    effect = "What comes after it is not checked. A file system or a directory service is silent."
    command = "getent group ffserve"
    findings.append(Finding("check-silent", "error", text, effect, (command,)))
    return True


def _print(facts: dict[str, list[str]], findings: list[Finding]) -> None:
    if facts:
        print_facts([(name, text) for name, texts in facts.items() for text in texts])
    for finding in findings:
        colour: dict[str, Any] = {"fg": "red" if finding.level == "error" else "yellow"}
        level = click.style(f"{finding.level}:", bold=True, **colour)
        click.echo(f"\n{level} {printable(finding.text)} [{finding.name}]")
        click.echo(f"  {printable(finding.effect)}")
        for command in finding.commands:
            click.echo(f"    {printable(command)}")
    errors = sum(finding.level == "error" for finding in findings)
    if findings:
        kinds = (counted(errors, "error"), counted(len(findings) - errors, "warning"))
        click.echo(f"\nfound {' and '.join(kinds)}; docs/REFERENCE.md explains them")
    else:
        click.echo("\nfound nothing that is wrong")
