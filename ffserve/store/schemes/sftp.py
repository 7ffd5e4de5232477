"""SFTP, with paramiko: one connection per thread, since two threads on one would hang."""

from __future__ import annotations

import contextlib
import getpass
import importlib
import io
import logging
import os
from typing import Any, ClassVar
from urllib.parse import urlsplit

from ffserve.store.schemes.scheme import (
    Options,
    Scheme,
    new_file_system,
    refuse_others,
)

if not logging.getLogger("paramiko").level:  # it logs errors that it raises, with tracebacks
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)

MOST_KEYS = 8
"""Private keys of one user that are tried."""


class Sftp(Scheme):
    """Files of SSH servers."""

    name = "sftp"
    protocols = "sftp", "ssh"
    package = module = "paramiko"
    loggers = ("asyncssh",)
    settings = ("SSH_AUTH_",)
    options: ClassVar = {"username": str, "password": str, "port": int, "keys": list}
    credential_errors = ("AuthenticationException",)
    connection_errors = ("SSHException",)
    closed_texts = "Socket is closed", "Server connection dropped"

    def collect(self, settings: Options) -> Options:
        found: Options = {"username": settings.pop("username", None) or getpass.getuser()}
        for name in ("password", "port"):
            if name in settings:
                found[name] = settings.pop(name)
        named = settings.pop("key_filename", None)
        refuse_others(settings, self)
        if named is None:
            directory = os.path.expanduser("~/.ssh")
            named = [os.path.join(directory, f"id_{kind}") for kind in ("ed25519", "ecdsa", "rsa")]
        keys: list[str] = []
        for path in [named] if isinstance(named, str) else named:
            with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
                text = file.read()
                if len(keys) < MOST_KEYS and _private_key(text) is not None:
                    keys.append(text)
        if keys:
            found["keys"] = keys
        return found

    def is_valid(self, name: str, value: Any) -> bool:
        if name == "keys":
            return len(value) <= MOST_KEYS and all(isinstance(text, str) for text in value)
        return super().is_valid(name, value)

    def place(self, url: str, origin: str, options: Options, access: str) -> str:
        protocol, _, host = origin.partition("://")
        parts = urlsplit(url)
        user = parts.username or options.get("username", "")
        port = f":{options['port']}" if "port" in options and parts.port is None else ""
        return f"{protocol}://{user}@{host.rpartition('@')[2]}{port}"

    def connect(self, url: str, options: Options) -> tuple[Any, str]:
        paramiko = importlib.import_module("paramiko")
        usual: Options = {"look_for_keys": False, "allow_agent": False, "timeout": self.connect_s}
        parts = urlsplit(url)
        for name in ("username", "password", "port"):
            if name in options and getattr(parts, name) is None:
                usual[name] = options[name]
        keys = [key for text in options.get("keys", ()) if (key := _private_key(text)) is not None]
        ways = [{"pkey": key} for key in keys]
        if parts.password or "password" in options or not ways:
            ways.insert(0, {})
        refused: Exception | None = None
        for way in ways:
            try:
                return new_file_system(url, **usual, **way)
            except (paramiko.AuthenticationException, paramiko.BadAuthenticationType) as error:
                refused = error
            except paramiko.SSHException as error:
                if "No authentication methods" not in str(error):
                    raise
                refused = paramiko.AuthenticationException(str(error))
        assert refused is not None
        raise refused

    def defaults(self, settings: Options) -> Options:
        return {"timeout": self.connect_s}

    def is_connected(self, system: Any) -> bool:
        # fsspec keeps file systems whose connection was lost.
        transport = getattr(getattr(system, "client", None), "get_transport", None)
        return transport is None or bool((found := transport()) and found.is_active())


def _private_key(text: str) -> Any:
    """Return a private key; None: the text is not one, or needs a passphrase."""
    paramiko = importlib.import_module("paramiko")
    for kind in (paramiko.Ed25519Key, paramiko.ECDSAKey, paramiko.RSAKey):
        with contextlib.suppress(Exception):
            return kind.from_private_key(io.StringIO(text))
    return None


SCHEME = Sftp()
