"""Completion in bash, zsh and fish: what the shells' scripts ask for, and the scripts themselves.

click completes commands, options and choices. Other parameters are plain text here, and their
metavar says what they take: words (``off|auto|PATH``) or files.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click
from click.shell_completion import BashComplete, CompletionItem, FishComplete, ZshComplete

SCRIPTS = {
    BashComplete: "/usr/share/bash-completion/completions/ffserve",
    ZshComplete: "/usr/share/zsh/vendor-completions/_ffserve",
    FishComplete: "/usr/share/fish/vendor_completions.d/ffserve.fish",
}
"""Where Debian's shells look for the script of a command."""

_FILES = re.compile(r"\b(FILES?|DIR|PATHS?|IN|OUT|INPUTS|MOUNTPOINT|SOCKET|URI|PROGRAM)\b")


if TYPE_CHECKING:  # generic for type checkers only, in many versions
    _TextType = click.ParamType[str]
else:
    _TextType = click.ParamType


class _PlainText(_TextType):
    """Text of which the metavar says what it may be."""

    name = "text"

    def __init__(self, metavar: str) -> None:
        self._words = [word for word in metavar.split("|") if "|" in metavar and word.islower()]
        self._files = _FILES.search(metavar) is not None

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the words that begin so, and let the shell complete the names of files."""
        found = [CompletionItem(word) for word in self._words if word.startswith(incomplete)]
        return found or [CompletionItem(incomplete, type="file")] * self._files


def complete_parameters(command: click.Command) -> None:
    """Make the parameters of a command that are plain text complete."""
    for param in command.params:
        if param.type in (click.STRING, click.UNPROCESSED):
            param.type = _PlainText(param.metavar or (param.name or "").upper())


def scripts(command: click.Command) -> dict[str, str]:
    """Return the shells' scripts for the command, by the paths at which a package has them."""
    return {
        path: shell(command, {}, "ffserve", "_FFSERVE_COMPLETE").source()
        for shell, path in SCRIPTS.items()
    }
