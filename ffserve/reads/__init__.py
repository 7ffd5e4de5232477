"""Reads: what the daemon and a reader without a daemon both do between an extent and its bytes.

Every read of ffserve is four things: *these extents*, *this check*, *this decoding*, *that
destination*. The table of all kinds of read is in docs/ARCHITECTURE.md ("Reads"). The modules here
know no socket, session, event loop or arena: they are given extents to read, and addresses or slots
to put bytes at. The driver of an engine (a blocking call, an event loop, the daemon) submits the
batches that these modules make, and passes batches that have ended back to them.

* `shard_tables`: open files to the tables of their shards, several files at a time.
* `records`: records to engine batches, and a batch that has ended to the outcome of each record.
* `fetched`: batches over files whose bytes come as ranges, not from the kernel.
* `chunks`: batches of chunks, their memory and their decoding.
* `second_read`: the second read of what did not match its checksum.
* `windows`: windows of an order.
* `page_cache`: which extents are read through the page cache.
"""
