"""The Hugging Face Hub: huggingface_hub lists, files are read at a commit, which never changes."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

from ffserve.store import urls
from ffserve.store.schemes.http import HttpFiles
from ffserve.store.schemes.scheme import (
    OpenVersion,
    Options,
    Scheme,
    new_file_system,
    open_file,
    refuse_others,
    without_none,
)
from ffserve.store.web import Web
from ffserve.store.web_files import RenewedOptions

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
            return open_file(system, path)
        api = hub.HfApi(endpoint=system.endpoint, token=system.token)
        asked = {"repo_type": found.repo_type, "revision": found.revision, "timeout": self.silent_s}
        commit = api.repo_info(found.repo_id, **asked).sha
        before = hub.constants.REPO_TYPES_URL_PREFIXES.get(found.repo_type, "")
        whole = f"{before}{found.repo_id}@{commit}/{found.path_in_repo}"
        url = hub.hf_hub_url(
            found.repo_id, found.path_in_repo, repo_type=found.repo_type, revision=commit,
            endpoint=system.endpoint,
        )  # fmt: skip
        read = self._files(system).ranges(url).fetch
        facts = system.info(whole)  # the same for ever

        def fetch(start: int, end: int) -> tuple[bytes, dict[str, Any]]:
            return read(start, end)[0], facts

        return OpenVersion(fetch, shared=True)

    def _files(self, system: Any) -> HttpFiles:
        """Return what reads for a file system of the package, which keeps it."""
        found: HttpFiles | None = vars(system).get("ffserve_files")
        if found is None:
            hub = importlib.import_module("huggingface_hub")
            token = hub.get_token() if system.token in (None, True) else system.token
            headers = {"headers": {"Authorization": f"Bearer {token}"}} if token else {}
            found = HttpFiles(Web(self.connect_s, self.silent_s), RenewedOptions(headers))
            vars(system)["ffserve_files"] = found
        return found


SCHEME = Hub()
