"""A Ceph cluster on this machine (one monitor, one OSD in memory) and its S3 gateway."""

from __future__ import annotations

import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from server_process import running
from store_servers import free_port

PROGRAMS = ("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw")
_CONFIGURATION = """[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{monitor}]
public addr = 127.0.0.1
keyring = {place}/keyring
mon data = {place}/mon
osd data = {place}/osd
rgw data = {place}/rgw
run dir = {place}
log file = {place}/$name.log
mon cluster log file = {place}/cluster.log
admin socket = {place}/$name.asok
pid file =
osd objectstore = memstore
memstore device bytes = 1073741824
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
mon allow pool size one = true
osd crush chooseleaf type = 0
mon data avail crit = 1
auth allow insecure global id reclaim = false
rgw frontends = beast endpoint=127.0.0.1:{gateway}
rgw dns name = localhost
mon max pg per osd = 1000
"""
"""Sources: Ceph's manual of a deployment by hand, and its reference of settings. A disk of this
machine that is nearly full is no reason to stop. Buckets are also virtual hosts of `localhost`."""


@dataclass(frozen=True)
class Gateway:
    """The S3 gateway: `url` has its address, `key` and `secret` are those of its one user."""

    port: int
    key: str
    secret: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def is_installed() -> bool:
    return all(shutil.which(name) for name in PROGRAMS)


@contextmanager
def gateway(place: Path) -> Iterator[Gateway]:
    """Run a cluster and its gateway in an empty directory."""
    found = Gateway(free_port(), "key", "geheim")
    fsid, monitor, osd = str(uuid.uuid4()), free_port(), str(uuid.uuid4())
    for name in ("mon", "osd", "rgw"):
        (place / name).mkdir(parents=True)
    configuration = place / "ceph.conf"
    configuration.write_text(
        _CONFIGURATION.format(fsid=fsid, monitor=monitor, gateway=found.port, place=place)
    )

    def call(*words: object) -> None:
        done = subprocess.run([*map(str, words)], capture_output=True, timeout=120, cwd=place)
        assert done.returncode == 0, (words, done.stderr.decode())

    keyring = place / "keyring"
    call("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.",
         "--cap", "mon", "allow *")  # fmt: skip
    call("ceph-authtool", keyring, "--gen-key", "-n", "client.admin",
         "--cap", "mon", "allow *", "--cap", "osd", "allow *")  # fmt: skip
    call("monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v2:127.0.0.1:{monitor}]",
         place / "monmap")  # fmt: skip
    settings = "-c", configuration
    call("ceph-mon", *settings, "-i", "a", "--mkfs", "--monmap", place / "monmap",
         "--keyring", keyring)  # fmt: skip
    with running(["ceph-mon", *settings, "-i", "a", "-f"], monitor, place / "mon.out"):
        call("ceph", *settings, "osd", "new", osd)
        call("ceph-authtool", place / "osd" / "keyring", "-C", "--gen-key", "-n", "osd.0",
             "--cap", "mon", "allow profile osd", "--cap", "osd", "allow *")  # fmt: skip
        call("ceph", *settings, "auth", "add", "osd.0", "-i", place / "osd" / "keyring")
        daemon = ["ceph-osd", *settings, "-i", "0", "--keyring", place / "osd" / "keyring"]
        call(*daemon, "--mkfs", "--osd-uuid", osd)
        with running([*daemon, "-f"], None, place / "osd.out"):
            call("radosgw-admin", *settings, "user", "create", "--uid=one", "--display-name=One",
                 f"--access-key={found.key}", f"--secret-key={found.secret}")  # fmt: skip
            served = ["radosgw", *settings, "-n", "client.admin", "--keyring", keyring, "-f"]
            with running(served, found.port, place / "rgw.out"):
                yield found
