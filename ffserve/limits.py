"""Limits: everything that bounds what the daemon holds, for each user and in all.

What one message may carry is part of the protocol and stands in `protocol.py`; times are where they
are used. What would exceed a limit waits, gives way, or is refused; the note of each limit says
which. A user is a uid, in whatever namespaces its processes are (`server/users/peers.py: Account`).
Users share some things by a rule instead of a number: a user may have OTHERS_SHARE = 4 times what
no user has (`server/users/shares.py`), so one user alone gets four fifths. Administrators have the
limit of all users.

**Memory.** A user can make the daemon hold, beside samples in the arena, at most the sum of

- incomplete messages, MOST_RECEIVED and one message more, and replies that the user does not
  read, MOST_UNSENT and one more: USER_MESSAGES_SIZE = 32 + 16 + 32 + 16 = 96 MiB;
- requests: MOST_ASKED samples, with an index and a slot of 8 bytes each: 64 MiB;
- announced orders: four fifths of 1 part in ORDERS_SHARE of the arena (at least of
  LEAST_ORDERS_SIZE, at most of half the memory beside the arena);
- tables of prepared samples: four fifths of 1 part in PREPARED_SHARE of the arena (at least of
  LEAST_PREPARED_SIZE);
- bytes on their way from origins, FETCH_SIZE for each of ORIGIN_THREADS requests to each of
  MOST_ORIGINS: 4 GiB; and for each run of neighbouring blocks that waits 3 KB, and 200 bytes for
  each of its blocks, POOL_BLOCKS and MOST_QUEUED of announced orders at each of these: 700 MB;
- first blocks of remote files that are opened, PROVEN_AT_ONCE for each of USER_OPENINGS: 512 MiB,
  and HEAD_SIZE of those that are long, REMOTE_COUNT for each: 256 MiB;
- tables of open files, TABLE_SAMPLE_SIZE bytes per sample, and of files that are closed while their
  samples are kept: four fifths of 1 part in TABLES_SHARE of the arena (at least of
  LEAST_TABLES_SIZE, at most of half the memory beside the arena). Of these, MOST_UNBACKED may be
  tables of files with holes, which cost their owner nothing;
- buffers of the engines: BOUNCES_KEPT, and while files on several devices are read, 64 MiB for each
  of MOST_ENGINES.

With an arena of 64 GiB that is 1.2 GiB + 3 times 12.8 GiB at the very most, and 5.2 GiB with remote
files. In the arena, leases of one user pin at most four fifths of 1 part in LEASED_SHARE:
two fifths.

**Descriptors.** With a limit of N on open files (RLIMIT_NOFILE), the daemon opens

- shards: SHARDS_PART = 3/4 of N; half of these for one user;
- second descriptors of shards, and MOST_DOMAINS domains with 3 each: EXTRA_PART = 1/8 of N; what
  domains need beyond it is taken from the shards;
- sessions: SESSIONS_PART = 1/4 of N, RESERVED_SESSIONS among them; four fifths for one user; and
  MOST_USER_NAMESPACES of each user's containers;
- memory files of prepared samples: 1 part in MEMORY_FILES_SHARE of N; four fifths for one user;
- what OPENs pass until it is open or closed: 1 part in PASSED_SHARE of N for each of
  USER_OPENINGS, and MOST_CLOSING that are being closed, for each user;
- connections to origins: ORIGIN_THREADS for each of MOST_ORIGINS of a user, and PROVEN_AT_ONCE for
  each of USER_OPENINGS, while requests are on their way, and MOST_UNUSED;
- LEAST_FILES for the process itself, and MOST_HTTP_CONNECTIONS.

This is more than N. The parts are limits and not reservations: with many sessions there are fewer
shards, and an OPEN that finds no descriptor closes idle shards or fails with a hint.

**Threads.** For each user USER_OPENINGS that open files (PROVEN_AT_ONCE each for remote files),
MOST_SCANS of them for damaged files, CLOSING_THREADS, one that explains damaged samples, one that
reads samples a second time, one that copies prepared samples, and for each of MOST_ORIGINS
ORIGIN_THREADS, and one that tries a cache network that has failed. For all users, BLOCK_THREADS.

**Disk.** The store takes at most `store.limit`. Of that, the state of one object has at most 1 part
in OVERHEAD_SHARE, and an announced order fetches at most MOST_FETCHED_AHEAD before it is used.
"""

from __future__ import annotations

from ffserve.protocol import MAX_FRAME_SIZE

# ---- each user --------------------------------------------------------------------------------

OTHERS_SHARE = 4
"""A user may have this many times what no user has, of sessions, leases, orders and prepared
samples."""
MOST_RECEIVED = 32 << 20
"""Bytes of incomplete messages; beyond, only small messages are received."""
MOST_UNSENT = 32 << 20
"""Bytes of replies that the user has not read; beyond, no message of the user is handled."""
USER_MESSAGES_SIZE = MOST_RECEIVED + MOST_UNSENT + 2 * MAX_FRAME_SIZE
"""Bytes of messages and replies together; the last one of each may exceed its limit."""
MOST_USER_REQUESTS = 4096
"""GETs and LEASEs without a reply; beyond, further ones wait."""
MOST_ASKED = 1 << 22
"""Samples in these, and samples that the user has not acknowledged or released; beyond, pins are
taken back and requests wait."""
MOST_PATHS = 1 << 19
"""Paths in OPENs without a reply; beyond, further OPENs wait."""
MOST_USER_DATASETS = 1 << 16
"""Open data sets, in all sessions; a further OPEN fails."""
MOST_ANNOUNCED = 512
"""Data sets in which the jobs of the user have announced an order; a further order fails."""
MOST_USER_CLAIMED = 1 << 18
"""Samples that the user has claimed or waits for, in all sessions; beyond, nothing is shared."""
MOST_USER_DOMAINS = 64
"""Domains of one user, who can make any number of namespaces; beyond, an OPEN fails."""
MOST_USER_NAMESPACES = 256
"""Mount namespaces that are told apart for one user, with a descriptor each; each connection from a
further one counts as a namespace of its own."""
NAMESPACE_OPENINGS, USER_OPENINGS = 4, 16
"""OPENs that are carried out at once for the processes of a user in one mount namespace, and for
the user in all namespaces, of which there may be any number; further ones wait. Each has a thread,
or one for each of PROVEN_AT_ONCE remote files, and the descriptors of a message."""
ASKED_AT_ONCE = 16
"""Threads of one OPEN that read tables of remote files; also objects whose origin is asked at the
same time, if its scheme has no more."""
PROVEN_AT_ONCE = 64
"""Remote files of one OPEN whose origin is asked at the same time whether the user may read them,
for their first blocks as a rule; further ones wait. Over 20 ms latency that takes 0.3 ms for each,
less than the CPU that a file costs."""
REMOTE_COUNT = 256
"""Remote files of one OPEN of which the beginnings are kept until their tables are read."""
MOST_SCANS = 1
"""Tolerant scans of one user at once, which search damaged files for intact records; further ones
wait."""
MOST_ORIGINS = 64
"""Origins of which the user has objects open at a time; a further one fails. Each has threads."""
CLOSING_THREADS = 4
"""Threads that close descriptors of the user at once."""
MOST_CLOSING = 64
"""Descriptors that came from the user and are being closed; beyond, no message is received."""
MOST_EXPLANATIONS = 4
"""Replies that wait until their damaged samples are explained; beyond, the plain error is sent."""
MOST_EXPLAINED_FILES = 16
"""Files that are looked at for one such reply; each takes a descriptor meanwhile."""
MOST_EXPLAINED_SAMPLES = 64
"""Samples of a file that are compared with its tables for one such reply, in a few ms."""
MOST_USER_LOG_KEYS = 32
"""Subjects of which repeated log lines are counted apart, if the user causes them; beyond, they are
counted together."""

# ---- each session -----------------------------------------------------------------------------

MOST_UNREAD = 1 << 20
"""Unsent bytes of replies at which no further message of the session is handled."""
MOST_UNACKNOWLEDGED = 1024
"""GETs whose pins wait for an acknowledgement; beyond, the oldest lose theirs. So a client that
never acknowledges does not make the daemon's memory grow."""
MOST_DATASETS = 4096
"""Data sets that are open or being opened; a further OPEN fails."""
MOST_HELD = 8192
"""Samples that one data set has claimed; further ones are not shared."""
LEAST_WAITING = 64
"""A CLAIM that waits counts as this many samples at least."""
MOST_WAITING = 64
"""CLAIMs of one data set that wait."""
MOST_ERRORS = 1024
"""Failed samples in one READY, so that it fits into a frame; it then answers for fewer samples."""
MOST_NAME = 200
"""Characters in the name of a job, of an order, or of a preparation."""
MOST_TAG, MOST_URL = 1024, 8192
"""Characters of an ETag (or of what an origin has instead), and of a URL."""

# ---- remote files -----------------------------------------------------------------------------

ORIGIN_THREADS = 16
"""Requests to one origin at the same time, each in a thread; further ones wait."""
MOST_UNUSED = 256
"""Connections to origins that are kept for later requests, of which users can name any number;
beyond, the oldest is closed."""
HEAD_SIZE = 64 << 10
"""Opening a long remote file asks for this many bytes first, which contain the tables of most."""
FETCH_SIZE = 4 << 20
"""Bytes of one request to an origin; each costs milliseconds of CPU and a round trip."""
MOST_ACCESS = 64 << 10
"""Characters of the credentials that a client passes with an OPEN; longer ones are refused."""
OPENED_AT_ONCE = 128
"""A process that reads remote files without a daemon opens this many at the same time. Over 20 ms
latency that takes 0.16 ms for each, less than the CPU that a file costs."""
MOST_LISTED, MOST_PAGE_SIZE = 1 << 22, 256 << 20
"""Files in one listing of an origin, of which those that are wanted take half a KB of memory each,
and bytes of a page that lists them; a longer listing, which may have no end, fails."""
GATE_BLOCKS, POOL_BLOCKS = 256, 1024
"""Blocks that a request waits for at a time (beyond, it is answered in part), and all requests of a
user at one origin; further ones wait before they ask. A block takes 3 KB until it comes, as do
neighbouring small ones with as many bytes."""
MOST_QUEUED = 512
"""Runs of blocks that wait for the threads of one origin, beyond which announced orders ask for no
more; of small blocks, which are up to 128 in a run, a quarter."""
BLOCK_THREADS = 4
"""Threads that look for blocks in the store, for all users; further calls wait."""
MOST_FETCHED_AHEAD = 256 << 20
"""Bytes that an announced order fetches ahead; at most a quarter of the store."""
MOST_READ_AHEAD = 128 << 20
"""Bytes that are fetched ahead of a reader in order."""
OVERHEAD_SHARE, MOST_BLOCKS = 8, 1 << 21
"""The state of one object takes at most 1 part in OVERHEAD_SHARE of the store, and has at most
MOST_BLOCKS blocks (1 TiB), since each takes 30 bytes of memory while all are looked at; a larger
object is refused."""
MOST_VICTIMS = 1 << 17
"""The store remembers this many objects for eviction, 300 bytes each. If it has more, those that
were seen first are evicted first."""

# ---- descriptors ------------------------------------------------------------------------------

SHARDS_PART, EXTRA_PART, SESSIONS_PART = 3 / 4, 1 / 8, 1 / 4
"""Parts of the limit on open files; see above."""
FDS_OF_OBJECT = 2
"""Descriptors of a remote object besides that of its shard: the two files of the store."""
PASSED_SHARE = 32
"""An OPEN asks the client for 1 part in PASSED_SHARE of the descriptors at once, since several
sessions of one user may pass some at the same time."""
MEMORY_FILES_SHARE = 16
"""Files that prepared samples come through are 1 part in MEMORY_FILES_SHARE of the descriptors."""
RESERVED_SESSIONS = 16
"""Sessions beyond `max_sessions` for administrators. They open no data set."""
FEWEST_SESSIONS = 32
"""Sessions for which there are always descriptors."""
LEAST_FILES = 64
"""Descriptors without which the daemon does not start: it needs two dozen itself, and some more for
each client that connects."""
MOST_HTTP_CONNECTIONS = 64
"""Connections for metrics and the status page; beyond, the oldest one of the address with most is
closed."""

# ---- memory -----------------------------------------------------------------------------------

OWN_SIZE = 32 << 20
"""Memory of a daemon beside its arena when it starts, with a margin. Tables of samples and orders
come on top (docs/CONFIGURATION.md)."""
BOUNCES_KEPT = 64 << 20
"""Bytes of buffers that engines keep for further reads (FFS_BOUNCES_KEPT in
engine/reading/backend.h)."""
ORDERS_SHARE, LEAST_ORDERS_SIZE = 4, 1 << 30
"""Announced orders take at most 1 part in ORDERS_SHARE of the arena's size as memory of their own,
or LEAST_ORDERS_SIZE, and at most half of the memory beside the arena."""
PREPARED_SHARE, LEAST_PREPARED_SIZE = 4, 1 << 30
"""Prepared samples need no file, but tables. These take at most 1 part in PREPARED_SHARE of the
arena's size, or LEAST_PREPARED_SIZE, if each sample takes PREPARED_SAMPLE_SIZE bytes."""
PREPARED_SAMPLE_SIZE = 32
TABLES_SHARE, LEAST_TABLES_SIZE = 4, 1 << 30
"""Tables of files take at most 1 part in TABLES_SHARE of the arena's size, or LEAST_TABLES_SIZE,
and at most half of the memory beside the arena; a further file is refused. That is enough for 13
million samples of one user with the smallest arena."""
TABLE_SAMPLE_SIZE, OPENING_SAMPLE_SIZE = 32, 32
"""Bytes of tables for a sample: while its file is open, and besides while it is being opened."""
TABLES_PER_BYTE = 64
"""A byte of a file that is stored accounts for this many bytes of tables; an honest sample takes
one byte at least, even where the file system compresses."""
MOST_UNBACKED = 8 << 20
"""Bytes of tables of one user for which no bytes of the files account; a further file is
refused."""
SCANNED_ALLOWED, SCANNED_PER_BYTE = 2 << 30, 16
"""A scan reads SCANNED_ALLOWED bytes of a file, and SCANNED_PER_BYTE for each byte that is stored;
then the file is refused, since it consists of holes."""
LEASED_SHARE = 2
"""All leases together pin at most 1 part in LEASED_SHARE of the arena; beyond, clients copy."""
LEASED_SLABS = 3 / 4
"""The part of the slabs in which leases may pin slots. Without this bound a few small leases in
every slab would leave none that can be emptied for another size class."""
ARENA_SHARE = 8
"""A request that has pinned 1 part in ARENA_SHARE of the arena is answered in part."""

# ---- tables -----------------------------------------------------------------------------------

MOST_DOMAINS = 256
"""Domains of all users. Each has three descriptors and a row of the inventory."""
MOST_SHARDS = 1 << 18
"""Rows of the inventory. Further shards are not kept over a restart."""
MOST_CLOSED = 16_384
"""Closed shards whose samples are kept; beyond, those of the shard closed first are evicted."""
MOST_ALIASES = 64
"""Aliases of a shard that are known; under others its users pass descriptors each time."""
MOST_ENGINES = 16
"""Engines. Users can make devices without a disk (tmpfs, subvolumes), which share engines beyond
this number."""
MOST_EPOCHS = 4
"""Announced epochs that are held for one job."""
MOST_VISITS = 1024
"""Positions per sample of the data set that an order with replacement may have."""
MOST_KEPT_JOBS = 256
"""Jobs whose counters are kept, ended ones included."""
MOST_COUNTED_JOBS = 1024
"""Jobs whose reads are counted."""
MOST_SLOW_FILES = 256
"""Files with slow reads that are remembered, the latest ones."""
MOST_USER_DISTRUSTED, MOST_DISTRUSTED = 1024, 1 << 15
"""Preparations of one user, and of all users, that are remembered for not being deterministic.
Beyond, the user's oldest one is forgotten, or the oldest one of the user who has most."""
MOST_LOG_KEYS = 1024
"""Files, users and devices of which repeated log lines are counted apart; beyond, together."""
MOST_SAME_LINES = 20
"""Log lines a minute of one text about origins and stores, of which users can name any number."""
MOST_LOG_LINES, MOST_LOG_LINE = 100, 500
"""Log lines that are kept for STATUS, and characters of each."""

# ---- status and metrics -----------------------------------------------------------------------

MOST_REPORT_ROWS = 1000
"""Rows in each list of a REPORT, so that it fits into a frame whatever clients open."""
MOST_PAGE_JOBS, MOST_PAGE_ROWS = 32, 16
"""Rows about jobs, and in each other list, of an event of the status page."""
MOST_SERIES_JOBS, MOST_SERIES_DOMAINS, MOST_SERIES_FILES = 64, 64, 64
"""Jobs, domains and files with metrics of their own."""
MOST_LABEL = 100
"""Characters of a label of a metric."""
MOST_HTTP_REQUEST_SIZE = 8192
"""Bytes of an HTTP request."""


def most_sessions(wanted: int, most_files: int) -> int:
    """Return how many sessions there may be: each needs a descriptor, of which shards take three
    quarters."""
    return min(wanted, max(int(most_files * SESSIONS_PART) - RESERVED_SESSIONS, FEWEST_SESSIONS))
