"""WebHDFS: HDFS over HTTP, with requests."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar
from urllib.parse import urlsplit

from ffserve.store.schemes.scheme import (
    Options,
    Scheme,
    new_file_system,
    refuse_others,
    restrict_session,
    without_none,
)


class WebHdfs(Scheme):
    """Files of HDFS, by the web server of a NameNode."""

    name = "webhdfs"
    protocols = ("webhdfs",)
    splits_query = True
    package = module = "requests"
    loggers = "requests", "webhdfs"
    settings = "HADOOP_", "KRB5"
    options: ClassVar = {"user": str, "password": str, "token": str, "port": int, "use_https": bool}
    needed: ClassVar = {"password": ("user",)}
    tags = ("fileId",)
    times = ("modificationTime",)
    connection_errors = ("ChunkedEncodingError",)

    def collect(self, settings: Options) -> Options:
        found = {name: settings.pop(name) for name in self.options if name in settings}
        refuse_others(settings, self)
        return without_none(found)

    def place(self, url: str, origin: str, options: Options, access: str) -> str:
        parts = urlsplit(url)
        user = parts.username or options.get("user")
        port = parts.port or options.get("port")
        web = "swebhdfs" if options.get("use_https") else "webhdfs"
        return f"{web}://{f'{user}@' if user else ''}{parts.hostname}{f':{port}' if port else ''}"

    def connect(self, url: str, options: Options) -> tuple[Any, str]:
        timeout = self.connect_s, self.silent_s
        adapters = importlib.import_module("requests.adapters")

        class Impatient(adapters.HTTPAdapter):  # type: ignore[name-defined, misc]
            """Gives up an origin that is silent: fsspec's file system would wait for ever."""

            def send(self, *given: Any, **how: Any) -> Any:
                return super().send(*given, **{**how, "timeout": timeout})

        named = urlsplit(url)
        usual = {
            name: value for name, value in options.items() if getattr(named, name, None) is None
        }
        if named.username is not None:
            usual.pop("user", None)
        system, path = new_file_system(url, **usual)
        restrict_session(system.session)
        for begin in ("http://", "https://"):
            system.session.mount(begin, Impatient())
        return system, path


SCHEME = WebHdfs()
