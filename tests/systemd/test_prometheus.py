"""Eight daemons under a real Prometheus with the alert rules that are shipped."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon import Daemon, until
from http_daemon import free_port, measured

pytestmark = [pytest.mark.systemd, pytest.mark.timeout(600)]

MONITORING = Path(__file__).parents[2] / "docs" / "monitoring"
DAEMONS = 8
FIRES_S = 120.0
"""A node that is lost is told within this time."""
CONFIGURATION = """
global: {{scrape_interval: 15s, evaluation_interval: 15s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: ffserve
    static_configs: [{{targets: {targets}}}]
"""


@contextlib.contextmanager
def prometheus(place: Path, targets: list[str]) -> Iterator[str]:
    """A Prometheus that scrapes these; gives its address."""
    beside = Path(sys.executable).with_name("prometheus")
    program = str(beside) if beside.exists() else shutil.which("prometheus")
    if program is None:
        pytest.skip("no prometheus here: run `make systemd`, which brings it")
    config = place / "prometheus.yml"
    config.write_text(
        CONFIGURATION.format(rules=MONITORING / "alerts.yaml", targets=json.dumps(targets))
    )
    with free_port() as address, (place / "log").open("wb") as log:
        words = [f"--config.file={config}", f"--storage.tsdb.path={place}/data"]
        process = subprocess.Popen(
            [program, *words, f"--web.listen-address={address}"], stdout=log, stderr=log
        )
        try:
            yield address
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def asked(address: str, what: str) -> Any:
    """Return what Prometheus answers; None: it does not yet."""
    url = f"http://{address}/api/v1/{what}"
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)["data"]
    return None


def test_one_node_of_eight_that_is_lost_gives_one_alert(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        daemons: list[Daemon] = []
        addresses: list[str] = []
        for _ in range(DAEMONS):
            daemon, address = stack.enter_context(measured(arena="16MiB"))
            daemons.append(daemon)
            addresses.append(address)
        server = stack.enter_context(prometheus(tmp_path, addresses))

        def scraped() -> int:
            found = asked(server, "targets") or {"activeTargets": []}
            return sum(each["health"] == "up" for each in found["activeTargets"])

        def firing() -> list[tuple[str, str]]:
            found = (asked(server, "alerts") or {"alerts": []})["alerts"]
            return [
                (each["labels"]["alertname"], each["labels"].get("instance", ""))
                for each in found
                if each["state"] == "firing"
            ]

        until(lambda: scraped() == DAEMONS, "all are scraped")
        assert firing() == []
        lost = 3
        begin = time.monotonic()
        daemons[lost].end(signal.SIGKILL)
        until(firing, "an alert", FIRES_S)
        seconds = time.monotonic() - begin
        assert firing() == [("FfserveDown", addresses[lost])]
        time.sleep(FIRES_S - seconds)
        assert firing() == [("FfserveDown", addresses[lost])], "and no other one"
        print(f"one alert of {DAEMONS} nodes after {seconds:.0f} s")
