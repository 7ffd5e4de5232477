"""What several test modules share."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop
from costs import Costs
from daemon import Daemon, serving
from hypothesis import HealthCheck, settings

from ffserve.client import failover

# A shell's background job ignores Ctrl-C, and that of nohup the end of its terminal; so would every
# process that the tests send them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


# pytest has put this folder there. Its folders torch, ray and spark would be found as packages
# where the real ones are not installed.
sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)]


# Hundreds of processes are started here; to compile the sources anew takes each a quarter of its
# start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


# Each worker of "forkserver" begins with what the server has imported; torch takes seconds.
multiprocessing.set_forkserver_preload(["__main__", "torch"])


# A slow or busy machine is no failure. `make test` and CI draw the same examples in each run, so
# that what they say depends on the sources only; `make check`, `make soak` and `make fuzz` draw
# new ones.
settings.register_profile(
    "ffserve",
    settings(),
    deadline=None,
    derandomize="FFSERVE_NEW_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ffserve")


@pytest.fixture(autouse=True)
def new_log() -> None:
    """Let this process write again what it writes once."""
    failover._logged.clear()


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon for all tests of a module that leave it as they found it."""
    with serving() as running:
        yield running


@pytest.fixture(scope="module", params=["daemon", "off"])
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    """`server=` of a reader: the socket of a daemon, then "off"."""
    if request.param == "off":
        yield "off"
        return
    with serving(options=["--max-chunk-size", "8MiB"]) as daemon:
        yield daemon.socket


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--costs`."""
    parser.addoption("--costs", action="store_true", help="print the CPU per folder and per file")


def pytest_configure(config: pytest.Config) -> None:
    """Measure what tests cost, where that is asked for."""
    if config.getoption("--costs"):
        config.pluginmanager.register(Costs())


def pytest_collection_finish() -> None:
    """Let no collection of garbage look at the modules again, here and in forked processes: PyTorch
    alone has half a million objects."""
    gc.collect()
    gc.freeze()


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Every asynchronous test runs on both event loops."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
