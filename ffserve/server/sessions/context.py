"""Context: the state that the parts of one session share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ffserve import protocol
from ffserve.errors import FFServeError
from ffserve.protocol import Message
from ffserve.server.reading.requests import Requester
from ffserve.server.sessions.datasets import Steps
from ffserve.server.sessions.job_table import Job
from ffserve.server.sessions.outbox import MemoryMessage
from ffserve.server.sessions.state import ServerState
from ffserve.server.users.peers import Peer
from ffserve.server.users.shares import User

NEW, READY, OVER = "new", "ready", "over"


@dataclass(slots=True, eq=False)
class SessionContext:
    """See the module's text.

    peer: the user behind the connection. user: with whom the session shares bounds and turns.
    owner: the session as the scheduler sees it. send: takes a message for the client. later: has
    these steps taken before the next message is received.
    """

    state: ServerState
    peer: Peer
    user: User
    owner: Requester
    send: Callable[[Message | MemoryMessage], None]
    later: Callable[[Steps], object]
    phase: str = NEW
    job: Job | None = None
    """None: there was no HELLO yet."""
    joined: bool = False
    """Whether the session counts for its job: it has opened a data set."""

    def fail(self, tag: int, error: FFServeError) -> None:
        """Report that a request failed, or with tag 0 that the session failed."""
        if self.job is not None:
            self.job.errors += 1
        self.state.statistics.errors[error.code] += 1
        self.send(protocol.Fail(tag, protocol.error_to_wire(error)))

    def join_job(self, now: float) -> None:
        """Count the session for its job from the first data set on: a client that only asks for the
        status is no job."""
        assert self.job is not None
        if self.joined:
            return
        self.joined = True
        self.job = self.state.jobs.join(self.job, self.peer, now)
        self.job.time.begin(self.owner.time, now)
        self.owner.job = self.job.key
