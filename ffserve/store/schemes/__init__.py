"""Schemes of remote files: one module each. To add a scheme, add a module that defines `SCHEME`.

There is no list of the modules: they are found in this folder when the first URL is looked at. They
import no package of a scheme; `scheme.py` says what one consists of.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable

from ffserve.store.schemes.scheme import Scheme


@functools.cache
def schemes() -> dict[str, Scheme]:
    """Return the schemes of this folder, by name."""
    names = sorted(each.name for each in pkgutil.iter_modules(__path__) if each.name != "scheme")
    found = [importlib.import_module(f"{__name__}.{name}").SCHEME for name in names]
    return {scheme.name: scheme for scheme in found}


@functools.cache
def _by_protocol() -> dict[str, Scheme]:
    return {name: scheme for scheme in schemes().values() for name in scheme.protocols}


def scheme_of(url: str) -> Scheme:
    """Return the scheme of a URL; the general one if the protocol has no module here."""
    protocol = protocol_of(url)
    return _by_protocol().get(protocol) or Scheme(protocol)


def protocol_of(url: str) -> str:
    """Return the part before ``://``, in lower case."""
    return url.partition("://")[0].lower()


def travelling(*, installed: bool = False) -> list[str]:
    """Return the protocols by which the daemon fetches for its clients, with the credentials that
    they pass.

    Args: installed: only those whose package this process has.
    """
    return sorted(
        protocol
        for protocol, scheme in _by_protocol().items()
        if scheme.travels and (not installed or scheme.is_installed())
    )


def union(field: Callable[[Scheme], Iterable[str]]) -> frozenset[str]:
    """Return the texts that a field has in any scheme."""
    return frozenset(text for scheme in schemes().values() for text in field(scheme))
