"""HDFS on this machine: a NameNode and a DataNode of Hadoop, which also answer WebHDFS.

Hadoop 2.7 is in the last pyspark package that has all of it; Debian has what that one leaves out
(Jersey 1). `.ci/setup --stores` puts both into one directory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from server_process import running
from store_servers import free_port

START_S = 120.0
JARS = Path(sys.prefix) / "hadoop"
BLOCK_SIZE = 512 << 10
_NAMENODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"
_DATANODE = "org.apache.hadoop.hdfs.server.datanode.DataNode"
_LOG = """log4j.rootLogger=WARN,A
log4j.appender.A=org.apache.log4j.ConsoleAppender
log4j.appender.A.layout=org.apache.log4j.PatternLayout
log4j.appender.A.layout.ConversionPattern=%d %p %c: %m%n
"""


def is_installed() -> bool:
    return shutil.which("java") is not None and any(JARS.glob("hadoop-hdfs-2*.jar"))


def _xml(settings: dict[str, object]) -> str:
    found = "".join(
        f"<property><name>{name}</name><value>{value}</value></property>\n"
        for name, value in settings.items()
    )
    return f"<configuration>\n{found}</configuration>\n"


class Cluster:
    """A running NameNode; its DataNode starts and stops. The user of this process may do all.

    Attributes: hdfs, webhdfs: the beginnings of URLs. files: writes and changes files (WebHDFS).
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self._configuration = place / "conf"
        rpc, web, self._data, data_rpc, data_web = (free_port() for _ in range(5))
        self.hdfs = f"hdfs://127.0.0.1:{rpc}"
        self.webhdfs = f"webhdfs://127.0.0.1:{web}"
        self._web = web
        for name in ("hdfs", "datanode"):  # of its pages, which are not here
            (self._configuration / "webapps" / name).mkdir(parents=True)
        (self._configuration / "log4j.properties").write_text(_LOG)
        (self._configuration / "core-site.xml").write_text(
            _xml({"fs.defaultFS": self.hdfs, "hadoop.tmp.dir": place / "data"})
        )
        own = {
            "dfs.replication": 1,
            "dfs.blocksize": BLOCK_SIZE,
            "dfs.namenode.fs-limits.min-block-size": BLOCK_SIZE,
            "dfs.heartbeat.interval": 1,
            "dfs.namenode.replication.interval": 1,
            "dfs.namenode.http-address": f"127.0.0.1:{web}",
            "dfs.datanode.hostname": "127.0.0.1",
            "dfs.datanode.address": f"127.0.0.1:{self._data}",
            "dfs.datanode.ipc.address": f"127.0.0.1:{data_rpc}",
            "dfs.datanode.http.address": f"127.0.0.1:{data_web}",
        }
        (self._configuration / "hdfs-site.xml").write_text(_xml(own))
        self._rpc = rpc
        self._running = ExitStack()

    def _java(self, *words: str) -> list[str]:
        path = os.pathsep.join([str(self._configuration), *map(str, sorted(JARS.glob("*.jar")))])
        quick = "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"
        return ["java", *quick, "-cp", path, *words]

    @contextmanager
    def started(self) -> Iterator[Cluster]:
        command = self._java(_NAMENODE, "-format", "-nonInteractive")
        done = subprocess.run(command, capture_output=True, timeout=START_S)
        assert done.returncode == 0, done.stderr.decode()
        with running(self._java(_NAMENODE), self._rpc, self._place / "namenode.out"):
            try:
                self.start_datanode()
                yield self
            finally:
                self.stop_datanode()

    def start_datanode(self) -> None:
        """Start it, and wait until it has a file."""
        log = self._place / "datanode.out"
        self._running.enter_context(running(self._java(_DATANODE), self._data, log))
        deadline = time.monotonic() + START_S
        while True:
            try:
                self.files.pipe_file("/.started", b"1")
                return
            except Exception:
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)

    def stop_datanode(self) -> None:
        self._running.close()

    @property
    def files(self) -> Any:
        import fsspec

        return fsspec.filesystem(
            "webhdfs", host="127.0.0.1", port=self._web, user=os.environ.get("USER", "root"),
            skip_instance_cache=True,
        )  # fmt: skip
