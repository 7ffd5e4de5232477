"""The daemon: sessions over a Unix socket, on top of the cache and the engines.

Each folder is one subject, and imports only those before it in this list:

1. `users`: who is at the other end of a connection, what they may read, what is charged to them.
2. `files`: which files are open, for whom, and whether they are sound.
3. `reading`: which request gets the next turn, and how its samples come into memory.
4. `prepared`: samples that clients make and hand over.
5. `sessions`: the event loop, the connections, and what each message causes.
6. `life`: start, restart, hand-over, change of size, log.
7. `status`: what the daemon says about itself.

`sessions/state.py` puts the parts together, so it knows all of them. `tests/unit/test_layers.py`
has the exceptions, with their reasons.
"""
