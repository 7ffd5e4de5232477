"""The Hugging Face Hub, with huggingface_hub: files are read at a commit, which never changes."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

from ffserve.store import urls
from ffserve.store.schemes.scheme import (
    OpenVersion,
    Options,
    Scheme,
    file_of,
    new_file_system,
    opened,
    refuse_others,
    without_none,
)

_ENDPOINT = "https://huggingface.co"


class Hub(Scheme):
    """Files of repositories and buckets of the Hub."""

    name = "hf"
    protocols = ("hf",)
    package = module = "huggingface_hub"
    loggers = "httpx", "httpx2", "huggingface_hub"
    settings = "HF_", "HUGGING_FACE_"
    forgotten = "HF_", "HUGGING_FACE_"
    options: ClassVar = {"token": str, "endpoint_url": str}
    tags = "ETag", "etag", "blob_id", "sha256"

    def collect(self, settings: Options) -> Options:
        hub = importlib.import_module("huggingface_hub")
        token = settings.pop("token", None)
        endpoint = settings.pop("endpoint", None) or hub.constants.ENDPOINT
        refuse_others(settings, self)
        if token is None or token is True:
            token = hub.get_token()
        found = {"token": token or None, "endpoint_url": endpoint.rstrip("/")}
        if found["endpoint_url"] == _ENDPOINT:
            del found["endpoint_url"]
        return without_none(found)

    def place(self, url: str, origin: str, options: Options, access: str) -> str:
        repository = "/".join(url.partition("://")[2].split("/")[:3]).partition("@")[0]
        return f"hf://{repository}@{urls.shown(options.get('endpoint_url', _ENDPOINT))}"

    def connect(self, url: str, options: Options) -> tuple[Any, str]:
        # Without a token, False: otherwise the package looks for one in files.
        endpoint, token = options.get("endpoint_url", _ENDPOINT), options.get("token", False)
        return new_file_system(url, endpoint=endpoint, token=token)

    def open(self, system: Any, path: str, *, size: int, tag: str) -> OpenVersion:
        hub = importlib.import_module("huggingface_hub")
        found = system.resolve_path(path)
        if not hasattr(found, "repo_id"):  # a bucket, which has no commits
            return opened(file_of(system, path))
        api = hub.HfApi(endpoint=system.endpoint, token=system.token)
        asked = {"repo_type": found.repo_type, "revision": found.revision, "timeout": self.silent_s}
        commit = api.repo_info(found.repo_id, **asked).sha
        before = hub.constants.REPO_TYPES_URL_PREFIXES.get(found.repo_type, "")
        file = file_of(system, f"{before}{found.repo_id}@{commit}/{found.path_in_repo}")
        return opened(file, conditional=True, facts=file.details)


SCHEME = Hub()
