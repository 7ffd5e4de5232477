"""The client for the guests of the package, such as the commands: the door of this folder.

Commands ask a daemon by `status` or over a `Connection`; torch has samples read into its own memory
(`placing`), and shares prepared ones and items; a view serves a `DaemonSource` from C. What lies
behind these names may change.
"""

from __future__ import annotations

from ffserve.client.daemon.autostart import start_wanted
from ffserve.client.daemon.connection import Connection, lead_job, status
from ffserve.client.daemon.mapped_memory import MORE_FILES
from ffserve.client.daemon.preparing import PreparedSource, prepared_source
from ffserve.client.daemon.shared_memory import DaemonSource
from ffserve.client.items import KeptItems
from ffserve.client.source import placing
from ffserve.engine.arrays import addresses

__all__ = [
    "MORE_FILES",
    "Connection",
    "DaemonSource",
    "KeptItems",
    "PreparedSource",
    "addresses",
    "lead_job",
    "placing",
    "prepared_source",
    "start_wanted",
    "status",
]
