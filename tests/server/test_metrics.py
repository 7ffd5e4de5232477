"""Metrics and HTTP: what is shown to whom, that it is right, and that no client of it does harm."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from daemon import DEADLINE_S, Raw, damage, get, run_python, sample, until, write
from http_daemon import answers, ask, connection_to, free_port, measured, measured_unix

import ffserve
from ffserve import limits, protocol
from ffserve.engine.shm import DURATIONS
from ffserve.errors import BY_CODE, ChecksumError, UsageError
from ffserve.server.files.remote import store_facts
from ffserve.server.reading.statistics import BOUNDS_S, Histogram

parser = pytest.importorskip("prometheus_client.openmetrics.parser")
classic = pytest.importorskip("prometheus_client.parser")


ROOT = Path(__file__).parents[2]
COUNT = 60
TRUTH = [sample(index, [5000]) for index in range(COUNT)]
ALICE = 61_001
Series = dict[tuple[tuple[str, str], ...], float]


def test_a_daemon_without_a_store_has_none() -> None:
    names = ("limit", "used", "fetched", "evicted", "from_cache", "cache_faults")
    nothing = dict.fromkeys(names, 0)
    assert store_facts(None) == {"directory": "", **nothing}


def parse(text: str) -> dict[str, Series]:
    """Return the samples of a scrape, by name and labels."""
    found: dict[str, Series] = {}
    for family in parser.text_string_to_metric_families(text):
        for each in family.samples:
            labels = tuple(sorted(each.labels.items()))
            assert labels not in found.setdefault(each.name, {}), f"twice: {each}"
            found[each.name][labels] = each.value
    return found


def scrape(address: str) -> dict[str, Series]:
    """Return the present samples; see `http_daemon.FRESH`."""
    time.sleep(0.03)
    status, kind, text = ask(address)
    assert status == 200 and kind.startswith("application/openmetrics-text"), (status, kind)
    return parse(text)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A record file."""
    return write(tmp_path / "a.ffr", TRUTH)


# ---------------------------------------------------------------- what is measured


def test_the_metrics_say_what_happened(path: str, tmp_path: Path) -> None:
    broken = write(tmp_path / "broken.ffr", TRUTH)
    damage(broken, 3)
    chunks = write(tmp_path / "a.recordio", TRUTH)
    with measured() as (daemon, address):
        with daemon.open(path) as reader:
            for _ in range(3):
                reader.read(range(COUNT))
        with daemon.open(broken) as reader, pytest.raises(ChecksumError):
            reader.read([3])
        with daemon.open(chunks) as reader:
            assert bytes(reader[7]) == TRUTH[7]
        found, status = scrape(address), daemon.status()
    none: tuple[tuple[str, str], ...] = ()
    assert found["ffserve_hits_total"][none] == sum(job["hits"] for job in status["jobs"])
    assert found["ffserve_hits_total"][none] == 2 * COUNT
    assert found["ffserve_hit_bytes_total"][none] == 2 * COUNT * 5000
    assert found["ffserve_misses_total"][none] == COUNT + 2
    assert found["ffserve_read_bytes_total"][none] == status["cache"]["read_size"] > 0
    assert found["ffserve_arena_size_bytes"][none] == status["arena"]["size"]
    assert found["ffserve_arena_used_bytes"][none] == status["arena"]["used"]
    assert found["ffserve_errors_total"][(("class", "checksum"),)] == 1
    assert {labels[0][1] for labels in found["ffserve_errors_total"]} == set(BY_CODE)
    assert found["ffserve_request_duration_seconds_count"][none] >= 3
    phases = found["ffserve_request_phase_duration_seconds_count"]
    count = {labels[0][1]: value for labels, value in phases.items()}
    assert set(count) == {"queue", "memory", "disk", "decode"}
    assert count["queue"] >= 3 and count["disk"] >= 3 and count["decode"] >= 1, count
    sums = found["ffserve_request_phase_duration_seconds_sum"]
    assert all(0 <= value < 60 for value in sums.values())
    assert found["process_resident_memory_bytes"][none] > 1 << 20
    [(labels, one)] = found["ffserve_build_info"].items()
    assert one == 1 and dict(labels)["version"] == ffserve.__version__


@pytest.mark.check
def test_clients_report_how_long_hits_take(path: str) -> None:
    with measured() as (daemon, address), daemon.open(path) as reader:
        reader.read(range(COUNT))
        end, found = time.monotonic() + DEADLINE_S, scrape(address)
        while found["ffserve_hit_batch_duration_seconds_count"][()] <= 10:
            assert time.monotonic() < end, "they are reported"
            for _ in range(100):
                reader.read_batch(range(COUNT))
                reader.read(range(COUNT))
            found = scrape(address)
    buckets = found["ffserve_hit_batch_duration_seconds_bucket"]
    count = found["ffserve_hit_batch_duration_seconds_count"][()]
    assert count > 10
    assert buckets[(("le", "+Inf"),)] == count
    assert len(buckets) == DURATIONS
    assert 0 < found["ffserve_hit_batch_duration_seconds_sum"][()] < DEADLINE_S
    rising = [buckets[key] for key in sorted(buckets, key=lambda key: float(key[0][1]))]
    assert rising == sorted(rising)


def test_an_invalid_report_of_durations_ends_the_session(path: str) -> None:
    expect = [r"closed a session \(pid \d+\): invalid TIMES message.*"]
    with measured(expect=expect) as (daemon, address):
        for message in (
            protocol.Times(5, bytes(4 * DURATIONS - 4)),
            protocol.Times(-1, bytes(4 * DURATIONS)),
            protocol.Times(1 << 63, bytes(4 * DURATIONS)),
        ):
            with Raw(daemon.socket) as raw:
                raw.send(message)
                assert "TIMES" in str(raw.refused())
        with Raw(daemon.socket) as raw:
            raw.send(protocol.Times(9_000, np.arange(DURATIONS, dtype="<u4").tobytes()))
            raw.send(protocol.Status(1))
            raw.receive()
        found = scrape(address)
        assert found["ffserve_hit_batch_duration_seconds_count"][()] == sum(range(DURATIONS))
        assert found["ffserve_hit_batch_duration_seconds_sum"][()] == pytest.approx(9e-6)
        assert found["ffserve_clients_cut_off_total"][()] == 3


def test_a_duration_lies_below_the_end_of_its_bucket() -> None:
    for seconds in (0.0, 1e-7, 0.9e-6, 1.5e-6, 0.0042, 1.0, 8.0, 9.0, 1e6, -1e-9):
        histogram = Histogram()
        histogram.note(seconds)
        [bucket] = [k for k, count in enumerate(histogram.counts) if count]
        ends = [*BOUNDS_S, float("inf")]
        assert seconds <= ends[bucket]
        assert bucket == 0 or seconds >= ends[bucket - 1]


def test_every_metric_is_explained_and_named_as_is_usual(path: str) -> None:
    section = (ROOT / "docs" / "REFERENCE.md").read_text()
    section = section.partition("\n## Metrics\n")[2].partition("\n## ")[0]
    explained = set(re.findall(r"^\| `(ffserve_\w+)` \|", section, re.M))
    with measured_unix() as (daemon, unix), daemon.open(path) as reader:
        reader.announce(range(COUNT))
        reader.read(range(COUNT))
        _, _, text = ask(unix)
    families = list(parser.text_string_to_metric_families(text))
    own = {family.name for family in families if family.name.startswith("ffserve_")}
    assert own == explained
    for family in families:
        assert family.documentation.endswith("."), family.name
        if family.name.startswith("ffserve_") and family.type == "histogram":
            assert family.unit == "seconds" and family.name.endswith("_seconds")
        assert not re.search(r"_(ms|us|ns|kb|mb|percent)(_|$)", family.name), family.name


# ---------------------------------------------------------------- who sees what


def job_labels(found: dict[str, Series]) -> set[str]:
    """Return all values of labels that say something about a user."""
    return {
        value
        for series in found.values()
        for labels in series
        for name, value in labels
        if name in {"ffserve_job", "number", "user", "namespace"}
    }


def test_only_administrators_see_names_of_jobs_and_users(path: str) -> None:
    with measured_unix() as (daemon, unix), daemon.open(path) as reader:
        reader.read(range(COUNT))
        job = daemon.status()["jobs"][0]["name"]
        assert job in job_labels(scrape(unix))
        if os.geteuid() == 0:
            program = f"""
import os, socket, sys
os.setgroups([]); os.setgid({ALICE}); os.setuid({ALICE})
sock = socket.socket(socket.AF_UNIX)
sock.connect({unix!r})
sock.sendall(b"GET /metrics HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
answer = b"".join(iter(lambda: sock.recv(65536), b"")).decode()
sys.stdout.write(answer.partition("\\r\\n\\r\\n")[2])
"""
            others = parse(run_python(program).stdout)
            assert others["ffserve_misses_total"][()] == COUNT
            assert job_labels(others) == set()
    assert not os.path.exists(unix)


@pytest.mark.parametrize("shown", ["administrators", "all"])
def test_a_port_shows_names_only_if_the_administrator_says_so(path: str, shown: str) -> None:
    with measured("--http-jobs", shown) as (daemon, address), daemon.open(path) as reader:
        reader.read(range(COUNT))
        found = scrape(address)
        assert bool(job_labels(found)) == (shown == "all")
        if shown == "all":
            [labels] = found["ffserve_job_misses_total"]
            assert found["ffserve_job_misses_total"][labels] == COUNT
            assert dict(labels)["user"] == str(os.geteuid())


def test_clients_cannot_make_more_series_than_are_bounded(path: str) -> None:
    names = [f'a"b\\c\n{index}\u202e' for index in range(2 * limits.MOST_SERIES_JOBS)]
    names += ["x" * 200, "x" * 199 + "y"]
    with measured("--http-jobs", "all") as (daemon, address), contextlib.ExitStack() as stack:
        for name in names:
            raw = stack.enter_context(Raw(daemon.socket, job=name))
            raw.open(path)
        found = scrape(address)
        assert found["ffserve_jobs"][()] == len(names)
        series = found["ffserve_job_sessions"]
        assert len(series) in (limits.MOST_SERIES_JOBS, limits.MOST_SERIES_JOBS - 1)
        for labels in series:
            for name in ("ffserve_job", "number"):
                assert len(dict(labels)[name]) <= limits.MOST_LABEL
                assert "\n" not in dict(labels)[name]


def test_jobs_have_the_names_that_they_gave_themselves_and_no_label_of_prometheus(
    path: str,
) -> None:
    with measured("--http-jobs", "all") as (daemon, address), contextlib.ExitStack() as stack:
        for name, title in (("1", "resnet"), ("2", "resnet"), ("3", "")):
            stack.enter_context(Raw(daemon.socket, job=name, title=title)).open(path)
        found = scrape(address)
    series = [dict(labels) for labels in found["ffserve_job_sessions"]]
    jobs = sorted((each["number"], each["ffserve_job"]) for each in series)
    assert jobs == [("1", "resnet"), ("2", "resnet"), ("3", "3")]
    labels = {name for series in found.values() for each in series for name, _ in each}
    assert not labels & {"job", "instance"}, "Prometheus renames them to exported_*"


def test_a_scraper_gets_the_format_that_it_accepts(path: str) -> None:
    old = "text/plain; version=0.0.4; charset=utf-8"
    prometheus = (
        "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
    )
    with measured() as (daemon, address), daemon.open(path) as reader:
        reader.read(range(COUNT))
        for accept in ("text/plain; version=0.0.4", "text/plain;version=0.0.4,*/*;q=0.1"):
            status, kind, text = ask(address, accept=accept)
            assert (status, kind) == (200, old)
            families = list(classic.text_string_to_metric_families(text))
            samples = {each.name: each.value for family in families for each in family.samples}
            assert samples["ffserve_misses_total"] == COUNT and samples["ffserve_build_info"] == 1
            assert "# EOF" not in text
        for accept in ("", "*/*", "application/openmetrics-text", prometheus):
            assert ask(address, accept=accept)[1].startswith("application/openmetrics-text")
            parse(ask(address, accept=accept)[2])


# ---------------------------------------------------------------- health


def test_health_and_other_paths(tmp_path: Path) -> None:
    with measured() as (_, address):
        assert ask(address, "/healthz") == (200, "text/plain; charset=utf-8", "ok\n")
        assert ask(address, "/readyz?verbose")[::2] == (200, "ok\n")
        status, _, text = ask(address, "/etc/passwd")
        assert status == 404 and "/metrics" in text
        assert ask(address, "/healthz", "POST")[0] == 405
        status, kind, text = ask(address, "/metrics", "HEAD")
        assert status == 200 and text == "" and kind.startswith("application/openmetrics-text")


def test_a_daemon_that_ends_is_alive_and_not_ready(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ffr", [bytes(7 << 20), bytes(10 << 20)])
    line = r"stopped with unanswered requests after .* s"
    options = ["--drain-timeout", "60"]
    with (
        measured(*options, arena="16MiB", expect=[line]) as (daemon, address),
        daemon.open(path) as holder,
    ):
        with holder.lease([0]), Raw(daemon.socket) as raw:
            raw.open(path)
            raw.send(get(2, 1, [1]))
            until(lambda: daemon.cache()["blocked"], "a request waits for memory")
            os.kill(daemon.pid, signal.SIGTERM)
            until(lambda: ask(address, "/readyz")[::2] == (503, "stopping\n"), "it is not ready")
            assert ask(address, "/healthz")[0] == 200
        assert daemon.process is not None
        assert daemon.process.wait(DEADLINE_S) == 0
        daemon.process = None


# ---------------------------------------------------------------- hostile clients


@pytest.fixture(scope="module")
def shown() -> Iterator[str]:
    """The address of a daemon that shows names to all."""
    with measured("--http-jobs", "all") as (_, address):
        yield address


REQUEST = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
ATTACKS: dict[str, Callable[[socket.socket], object]] = {
    "nothing": lambda sock: None,
    "half a request": lambda sock: sock.sendall(REQUEST[:-2]),
    "another protocol": lambda sock: sock.sendall(b"\x16\x03\x01\x02\x00" * 100),
    "garbage": lambda sock: sock.sendall(os.urandom(3000)),
    "a large header": lambda sock: sock.sendall(b"GET / HTTP/1.1\r\nA: " + b"x" * 1_000_000),
    "a large body": lambda sock: sock.sendall(
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n" + bytes(1_000_000)
    ),
    "many requests at once": lambda sock: sock.sendall(REQUEST * 2000),
    "nobody reads the answer": lambda sock: sock.sendall(REQUEST),
    "the end at once": lambda sock: sock.shutdown(socket.SHUT_WR),
    "a binary target": lambda sock: sock.sendall(
        b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n"
    ),
    "an old version": lambda sock: sock.sendall(b"GET /metrics HTTP/0.9\r\n\r\n"),
}


def attack(address: str, what: Callable[[socket.socket], object]) -> socket.socket:
    """Connect and do something; return the connection, which stays."""
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
    with contextlib.suppress(OSError):
        what(sock)
    return sock


@pytest.mark.check
def test_hostile_clients_delay_nobody_and_are_closed(path: str) -> None:
    patch = "import ffserve.server.status.http_server as http; http.REQUEST_TIMEOUT_S = 3.0"
    with measured(patch=patch) as (daemon, address), daemon.open(path) as reader:
        parse(ask(address)[2])
        before = daemon.socket_count()
        held = [attack(address, what) for _ in range(20) for what in ATTACKS.values()]
        for _ in range(5):
            assert ask(address, "/healthz")[0] == 200
            assert "ffserve_hits_total" in parse(ask(address)[2])
            assert [bytes(each) for each in reader.read(range(COUNT))] == TRUTH
        until(lambda: daemon.socket_count() <= before, "their connections are closed")
        for sock in held:
            sock.close()
        assert daemon.private_size() < 200 << 20


@pytest.mark.check
@pytest.mark.parametrize(
    ("what", "status"), [("a large header", 431), ("another protocol", 400), ("a large body", 405)]
)
def test_a_request_that_is_refused_gets_a_reason(what: str, status: int) -> None:
    with measured() as (_, address):
        sock = attack(address, ATTACKS[what])
        received = b""
        with contextlib.closing(sock), contextlib.suppress(ConnectionError):
            while chunk := sock.recv(65536):
                received += chunk
        assert not received or received.startswith(f"HTTP/1.1 {status} ".encode()), received
        assert received or what != "another protocol"


def test_more_clients_than_connections_are_all_served() -> None:
    with measured() as (_, address):
        idle = [attack(address, ATTACKS["nothing"]) for _ in range(200)]
        answers: list[int] = []
        threads = [
            threading.Thread(target=lambda: answers.append(ask(address, "/metrics")[0]))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [200] * 8
        for sock in idle:
            sock.close()


def test_a_flood_from_one_address_closed_the_connections_of_others() -> None:
    with measured() as (_, address):
        host, _, port = address.rpartition(":")
        with contextlib.ExitStack() as stack:
            watching = stack.enter_context(contextlib.closing(connection_to(address)))
            watching.request("GET", "/events")
            answer = watching.getresponse()
            slow = stack.enter_context(socket.create_connection((host, int(port)), DEADLINE_S))
            slow.sendall(b"GET /healthz HTTP/1.1\r\n")
            for _ in range(300):
                flood = stack.enter_context(socket.socket())
                flood.bind(("127.0.0.2", 0))
                flood.connect((host, int(port)))
            slow.sendall(b"Host: a.b\r\n\r\n".replace(b"a.b", host.encode()))
            assert slow.recv(100).startswith(b"HTTP/1.1 200 ")
            for _ in range(2):
                assert answer.readline().startswith(b"event: ")
                assert answer.readline().startswith(b"data: ") and answer.readline() == b"\n"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("rebound.example", 421), ("rebound.example:9469", 421), ("127.0.0.1.example", 421),
        ("localhost.example", 421), ("1.2.3", 421), ("[rebound]", 421), ("localhost", 200),
        ("LocalHost.:80", 200), ("127.0.0.1:9469", 200), ("[::1]:9469", 200), ("10.1.2.3", 200),
        (socket.gethostname(), 200),
    ],
)  # fmt: skip
def test_a_site_that_gave_its_name_the_address_of_the_daemon_read_its_answers(
    shown: str, host: str, status: int
) -> None:
    for path in ("/", "/metrics", "/healthz", "/events"):
        with contextlib.closing(connection_to(shown)) as connection:
            connection.putrequest("GET", path, skip_host=True)
            connection.putheader("Host", host)
            connection.endheaders()
            answer = connection.getresponse()
            assert answer.status == status, (path, host)
            if status != 200:
                assert b"use localhost or an address" in answer.read()


def test_names_of_this_machine_in_the_file_of_hosts_were_refused(shown: str) -> None:
    """Such as its name with its domain."""
    names: set[str] = set()
    for line in Path("/etc/hosts").read_text().splitlines():
        address, *others = line.partition("#")[0].split() or [""]
        if address in ("127.0.0.1", "::1"):
            names.update(others)
    for name in names:
        with contextlib.closing(connection_to(shown)) as connection:
            connection.request("GET", "/healthz", headers={"Host": f"{name.upper()}:80"})
            assert connection.getresponse().status == 200, name


def test_descriptors_that_come_with_a_request_are_closed() -> None:
    with measured_unix() as (daemon, unix):
        before = daemon.fd_count()
        for _ in range(20):
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(unix)
            with contextlib.suppress(OSError):  # Linux 6.16: refused by the kernel
                socket.send_fds(sock, [REQUEST], [0, 1, 2])
            sock.close()
        until(lambda: daemon.fd_count() <= before, "nothing is kept")
        assert ask(unix, "/healthz")[0] == 200


# ---------------------------------------------------------------- starting


def serve(*options: str, patch: str = "") -> subprocess.CompletedProcess[str]:
    """Run a daemon that does not start."""
    program = f"{patch}\nfrom ffserve.cli import main\nraise SystemExit(main())"
    command = [sys.executable, "-c", program, "serve", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.mark.check
@pytest.mark.parametrize("check", [[], ["--check"]])
@pytest.mark.parametrize("package", ["prometheus_client", "h11"])
def test_a_missing_package_is_named(package: str, check: list[str], tmp_path: Path) -> None:
    patch = f"import sys; sys.modules[{package!r}] = None"
    with free_port() as address:
        options = ["--socket", str(tmp_path / "s"), "--http", address, *check]
        done = serve(*options, patch=patch)
    assert done.returncode == 2
    assert f"needs a package that is not installed: {package}" in done.stderr
    assert "pip install 'ffserve[metrics]'" in done.stderr


def test_without_http_nothing_of_it_is_imported() -> None:
    program = "import sys, ffserve.server.life.daemon; print('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_an_address_that_is_taken_is_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = serve("--socket", str(tmp_path / "s"), "--http", address)
    assert done.returncode == 2
    assert f"cannot listen on {address} for HTTP: Address already in use" in done.stderr
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    "address", ["9469", "localhost", ":9469", "a:0", "a:65536", "a:b", "::1:9", "relative/path"]
)
def test_invalid_addresses_are_refused(address: str) -> None:
    from ffserve.config import split_address

    with pytest.raises(UsageError, match="HOST:PORT"):
        split_address(address)
    assert split_address("[::1]:9469") == ("::1", 9469)


def test_a_port_that_the_service_manager_passes_is_served(tmp_path: Path, path: str) -> None:
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(str(tmp_path / "s"))
    unix.listen()
    with unix, socket.create_server(("127.0.0.1", 0)) as port:
        address = f"127.0.0.1:{port.getsockname()[1]}"
        program = (
            "import os, sys\n"
            "os.dup2(int(sys.argv[1]), 100); os.dup2(int(sys.argv[2]), 101)\n"
            "os.dup2(100, 3); os.dup2(101, 4)\n"
            "os.environ |= {'LISTEN_FDS': '2', 'LISTEN_PID': str(os.getpid())}\n"
            "os.execv(sys.executable, [sys.executable, '-m', 'ffserve', *sys.argv[3:]])"
        )
        fds = (unix.fileno(), port.fileno())
        process = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, fds), "serve", "--arena", "16MiB"],
            pass_fds=fds,
            stderr=subprocess.DEVNULL,
        )
        try:
            # A client waits for less long than a busy machine may take to start the daemon.
            until(lambda: answers(address), "it answers HTTP requests")
            with ffserve.open(path, server=str(tmp_path / "s")) as reader:
                assert bytes(reader[5]) == TRUTH[5]
            assert parse(ask(address)[2])["ffserve_misses_total"][()] == 1
        finally:
            process.terminate()
            assert process.wait(DEADLINE_S) == 0


# ---------------------------------------------------------------- dashboard and alerts

MONITORING = ROOT / "docs" / "monitoring"
NAME = re.compile(r"\b(?:ffserve|process)_\w+\b(?<!\bffserve_job)")
"""A series, not the label `ffserve_job`."""


def names_of_series() -> set[str]:
    """Return the names of all series that a daemon offers."""
    with measured_unix() as (_, unix):
        return set(parse(ask(unix)[2])) | explained_series()


def explained_series() -> set[str]:
    """Return those of jobs and domains, which need some: as the documents have them."""
    section = (ROOT / "docs" / "REFERENCE.md").read_text()
    section = section.partition("\n## Metrics\n")[2].partition("\n## ")[0]
    names = set()
    for kind in section.split("\n### ")[1:]:
        suffix = "_total" if kind.startswith("Counters\n") else ""
        found = re.findall(r"^\| `(ffserve_(?:job|domain)_\w+)` \|", kind, re.M)
        names |= {name + suffix for name in found}
    return names


def test_dashboard_and_alerts_use_series_that_exist() -> None:
    yaml = pytest.importorskip("yaml")
    known = names_of_series()
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    alerts = list(itertools.chain(*(group["rules"] for group in rules["groups"])))
    expressions += [alert["expr"] for alert in alerts]
    assert len(panels) >= 12 and len(alerts) >= 8
    for expression in expressions:
        assert NAME.findall(expression), expression
        assert set(NAME.findall(expression)) <= known, set(NAME.findall(expression)) - known
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places) and len({p["id"] for p in panels}) == len(panels)
    operations = (ROOT / "docs" / "OPERATIONS.md").read_text()
    for alert in alerts:
        assert alert["labels"]["severity"] in {"warning", "critical"}
        assert set(alert["annotations"]) == {"summary", "description"}
        assert f"| `{alert['alert']}` |" in operations, "what to do stands in OPERATIONS.md"


def test_promtool_accepts_the_alerts() -> None:
    beside = Path(sys.executable).parent / "promtool"
    promtool = str(beside) if beside.exists() else shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool here: .ci/setup found no package of it")
    for arguments in (("check", "rules", "alerts.yaml"), ("test", "rules", "alerts_test.yaml")):
        done = subprocess.run(
            [promtool, *arguments], cwd=MONITORING, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
