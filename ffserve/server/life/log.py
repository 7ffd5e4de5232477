"""Log of the daemon: lines for people, for the journal, or JSON; and lines that repeat.

The journal reads the severity of a line from its beginning (sd-daemon(3)), so that
`journalctl -p err` finds errors. What clients and files cause may happen a thousand times a second:
`RepeatedLines` writes it once, and then how often it happened.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeAlias

from ffserve.config import LogFormat
from ffserve.errors import printable
from ffserve.limits import (
    MOST_LOG_KEYS,
    MOST_LOG_LINE,
    MOST_LOG_LINES,
    MOST_SAME_LINES,
    MOST_USER_LOG_KEYS,
)
from ffserve.system.systemd import is_journal, priority

log = logging.getLogger("ffserve")

FIRST_INTERVAL_S, LONGEST_INTERVAL_S = 60.0, 3600.0
"""The interval between two lines about the same event. It doubles while the event goes on, up to
LONGEST_INTERVAL_S."""
NOBODY = -1
"""The user of a line that no user caused."""

# ---- formats -----------------------------------------------------------------------------------


def start_logging(level: str, log_format: LogFormat) -> None:
    """Write messages of this level and above to standard error, and keep warnings in `latest`."""
    handler = logging.StreamHandler()
    handler.addFilter(SameLines())
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    logging.basicConfig(handlers=[handler, latest], level=level.upper())


class SameLines(logging.Filter):
    """Lets through MOST_SAME_LINES of one text in an interval. The next line of that text says how
    many were left out. Threads of the store log what happens to each origin and object, of which
    users can name any number."""

    def __init__(self, interval_s: float = FIRST_INTERVAL_S) -> None:
        super().__init__()
        self._interval_s = interval_s
        self._written: Counter[str] = Counter()
        self._left_out: Counter[str] = Counter()
        self._until = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the line is written."""
        text = record.msg
        if text == "%s":  # `RepeatedLines` has counted it
            return True
        now = time.monotonic()
        if now >= self._until:
            self._written.clear()
            self._until = now + self._interval_s
        self._written[text] += 1
        if self._written[text] > MOST_SAME_LINES:
            self._left_out[text] += 1
            return False
        if count := self._left_out.pop(text, 0):
            record.msg = f"{text} ({count} more before)"
        return True


class _TextFormatter(logging.Formatter):
    """The journal names the program by itself."""

    def __init__(self) -> None:
        super().__init__()
        self._name = "" if is_journal() else "ffserve: "

    def format(self, record: logging.LogRecord) -> str:
        text = self._name + printable(record.getMessage())
        if record.exc_info:
            text += f"\n{self.formatException(record.exc_info)}"
        # Each line of a traceback is an entry of the journal.
        begin = priority(record.levelno)
        return "\n".join(begin + line for line in text.split("\n"))


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        facts = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            "pid": record.process,
        }
        if record.exc_info:
            facts["traceback"] = self.formatException(record.exc_info)
        return priority(record.levelno) + json.dumps(facts)


# ---- what is shown -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the log.

    time: in seconds since 1970. level: `warning`, `error` or `critical`. user: who caused it.
    """

    time: float
    level: str
    text: str
    user: int


class LatestLines(logging.Handler):
    """Keeps the last warnings and errors."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: deque[Line] = deque(maxlen=MOST_LOG_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().encode(errors="backslashreplace").decode()[:MOST_LOG_LINE]
        user = getattr(record, "user", NOBODY)
        self._lines.append(Line(record.created, record.levelname.lower(), text, user))

    def lines(self) -> list[Line]:
        """Return them, the latest last."""
        self.acquire()
        try:
            return list(self._lines)
        finally:
            self.release()


latest = LatestLines()
"""The latest lines of this process."""


# ---- what repeats ------------------------------------------------------------------------------


_Place: TypeAlias = tuple[str, int, Hashable]
"""Text, user, key."""


@dataclass(slots=True)
class _Repeated:
    """A repeated event: the time of its next line, and how often it happened since the last one."""

    level: int
    next_at: float
    interval_s: float = FIRST_INTERVAL_S
    count: int = 0
    latest: str = ""


class RepeatedLines:
    """Lines about what may happen often: the first at once, later ones as a count.

    Lines are the same if text, user and key are: so each file or device has lines of its own, and a
    user who causes many cannot hide those of others. user: the number of who caused it. `now` is
    monotonic time in seconds. `flush` must be called every second or so.
    """

    def __init__(self) -> None:
        self._lines: dict[_Place, _Repeated] = {}
        self._of_user: Counter[int] = Counter()

    def warning(
        self, text: str, *arguments: object, now: float, user: int = NOBODY, key: Hashable = None
    ) -> None:
        """Something may be wrong with a client or a disk."""
        self._note(logging.WARNING, text, arguments, (text, user, key), now)

    def error(
        self, text: str, *arguments: object, now: float, user: int = NOBODY, key: Hashable = None
    ) -> None:
        """Data or disks are damaged."""
        self._note(logging.ERROR, text, arguments, (text, user, key), now)

    def _note(
        self, level: int, text: str, arguments: tuple[object, ...], place: _Place, now: float
    ) -> None:
        user = place[1]
        if place not in self._lines and self._of_user[user] >= MOST_USER_LOG_KEYS:
            place = text, user, None
        if place not in self._lines and len(self._lines) >= MOST_LOG_KEYS:
            place = text, NOBODY, None
        line = text % arguments
        repeated = self._lines.get(place)
        if repeated is None:
            self._lines[place] = _Repeated(level, now + FIRST_INTERVAL_S)
            self._of_user[place[1]] += 1
            log.log(level, "%s", line, extra={"user": place[1]})
        else:
            repeated.count += 1
            repeated.latest = line

    def flush(self, now: float, *, ending: bool = False) -> None:
        """Write the counts that are due; with `ending` all of them."""
        for place, repeated in list(self._lines.items()):
            if now < repeated.next_at and not ending:
                continue
            if not repeated.count:
                del self._lines[place]
                self._of_user[place[1]] -= 1
                continue
            since_s = now - repeated.next_at + repeated.interval_s
            more = f"({repeated.count} more in {since_s:.0f} s)"
            log.log(repeated.level, "%s %s", repeated.latest, more, extra={"user": place[1]})
            repeated.interval_s = min(2 * repeated.interval_s, LONGEST_INTERVAL_S)
            repeated.next_at, repeated.count = now + repeated.interval_s, 0
        self._of_user += Counter()  # forgets users without lines
