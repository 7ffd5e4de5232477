"""Inputs of a job: the files of each input, and their distribution over workers.

The rules are those of XLearning without its faults (`docs/INPUTS.md`). An input is a string
``URI[,URI…][#ALIAS]``. Inputs of one alias are joined in the order in which they are given. File i
of an alias goes to worker i mod n.

    shares = ffserve.inputs.assign(["/data/train-*.txt#train", "s3://bucket/test#test"], workers=4)
    shares[0]["train"]      # the files of worker 0
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence

from ffserve.errors import MissingFile, UsageError, printable
from ffserve.inputs.places import InputFile, Listing, find
from ffserve.store.public import HIDDEN, SPECIAL, shown

__all__ = ["DEFAULT_ALIAS", "InputFile", "Listing", "assign", "find_inputs", "parse_input", "share"]

DEFAULT_ALIAS = "input"
EMPTY = "empty"
"""A reason why a file is left out; the others are HIDDEN and SPECIAL."""
_NAMED = 3
"""A message names at most this many of the files that are left out."""


def assign(inputs: Sequence[str], workers: int) -> list[dict[str, list[str]]]:
    """Return which files each worker gets.

    Args:
        inputs: strings ``URI[,URI…][#ALIAS]``; the alias is ``input`` where none is given. A URI is
            a file, a directory (with all below it) or a pattern. A comma within ``{…}`` separates
            no URIs.
        workers: number of workers, at least 1.
    Returns: for each worker its URIs by alias, in listing order. Each worker has all aliases, those
        of which it gets nothing with an empty list. A local file that was given by its path is an
        absolute path. It depends on nothing but the arguments and the files.
    Raises:
        MissingFile: a URI matches nothing, or an alias has no file.
        AccessDenied, ReadError: a directory cannot be listed.
        UsageError: an invalid input or number of workers.
    Warns: of hidden files, which are left out, and of an alias with fewer files than workers.
    """
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise UsageError(f"invalid number of workers {workers!r}: at least 1 is needed")
    found = find_inputs([inputs] if isinstance(inputs, str) else inputs)
    if left_out := describe_left_out(found):
        warnings.warn(f"inputs are left out: {left_out}", stacklevel=2)
    for alias, listing in found.items():
        if len(listing.files) < workers:
            warnings.warn(
                f"alias {printable(alias)} has {len(listing.files)} files for {workers} workers: "
                "some workers get none",
                stacklevel=2,
            )
    return [
        {
            alias: [file.uri for file in share(listing.files, rank, workers)]
            for alias, listing in found.items()
        }
        for rank in range(workers)
    ]


def share(files: Sequence[InputFile], rank: int, workers: int) -> list[InputFile]:
    """Return the files of one alias that one worker gets."""
    return list(files[rank::workers])


def parse_input(text: str) -> tuple[list[str], str]:
    """Return the URIs and the alias of one input. The alias stands behind the last ``#``.

    Raises: UsageError: no URI, or an alias that cannot be the name of a directory.
    """
    uris, mark, alias = text.rpartition("#")
    if not mark:
        uris, alias = text, DEFAULT_ALIAS
    check_alias(alias, text)
    found = [uri for uri in _split(uris) if uri]
    if not found:
        raise UsageError(f"the input {text!r} has no URI", hint="write URI[,URI…][#ALIAS]")
    return found, alias


def check_alias(alias: str, text: str) -> None:
    """Raise UsageError unless an alias can be the name of a directory."""
    if alias in ("", ".", "..") or "/" in alias or "\0" in alias or len(os.fsencode(alias)) > 255:
        raise UsageError(
            f"invalid alias {alias!r} in the input {text!r}: it is the name of a directory",
            hint="write URI[,URI…]#ALIAS; if the URI itself contains #, put #ALIAS behind it",
        )


def _split(uris: str) -> list[str]:
    """Split at commas, but not within braces."""
    if uris.count("{") != uris.count("}"):
        return uris.split(",")
    parts, depth, last = [], 0, 0
    for at, char in enumerate(uris):
        depth += (char == "{") - (char == "}")
        if char == "," and depth <= 0:
            parts.append(uris[last:at])
            last = at + 1
    return [*parts, uris[last:]]


def find_inputs(inputs: Iterable[str], *, empty: bool = True) -> dict[str, Listing]:
    """Return the files of each alias, the aliases in the order in which they are first named.

    Args:   empty: whether empty files are inputs; otherwise they are left out.
    Raises: as `assign`.
    """
    found: dict[str, Listing] = {}
    for text in inputs:
        if not isinstance(text, str):
            raise UsageError(f"invalid input {text!r}: it is not a string")
        uris, alias = parse_input(text)
        listing = found.setdefault(alias, Listing())
        for uri in uris:
            more = find(uri)
            listing.files += [file for file in more.files if empty or file.size]
            listing.left_out += more.left_out
            if not empty:
                listing.left_out += [(file.uri, EMPTY) for file in more.files if not file.size]
    for alias, listing in found.items():
        if not listing.files:
            left_out = describe_left_out({alias: listing})
            raise MissingFile(
                f"the alias {alias!r} has no file"
                + (f"; left out: {left_out}" if left_out else ""),
                hint="check the inputs",
            )
    return found


def describe_left_out(found: dict[str, Listing]) -> str:
    """Return what was left out of inputs, in one line; empty if nothing was."""
    texts = []
    for reason in (HIDDEN, EMPTY, SPECIAL):
        uris = [uri for each in found.values() for uri, why in each.left_out if why == reason]
        if uris:
            named = ", ".join(printable(shown(uri)) for uri in uris[:_NAMED])
            more = f" and {len(uris) - _NAMED:,} more" if len(uris) > _NAMED else ""
            texts.append(f"{reason}: {named}{more}")
    return "; ".join(texts)
