"""The inventory's layout, which daemons of several versions read."""

from __future__ import annotations

import hashlib
import os

from ffserve import limits
from ffserve.cache import inventory
from ffserve.cache.arena import SMALLEST_SLOT
from ffserve.cache.inventory import LAYOUT, MAGIC, Inventory, ShardRow
from ffserve.cache.tables import ENTRY_DTYPE
from ffserve.engine.slots import FAILED, FREE, LOADING, RESIDENT


def test_another_layout_has_another_number() -> None:
    facts = (
        MAGIC,
        inventory.HEADER.descr,
        inventory.DOMAIN.descr,
        limits.MOST_DOMAINS,
        inventory.SHARD.descr,
        limits.MOST_SHARDS,
        inventory._places(1000, 1_000_000),
        ENTRY_DTYPE.descr,
        SMALLEST_SLOT,
        (FREE, LOADING, RESIDENT, FAILED),
    )
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    known = {1: "c8881ed2c02f75fc"}
    assert known.get(LAYOUT) == digest, "raise LAYOUT, and add the digest of the new layout"


def test_rows_survive_and_are_reused() -> None:
    made = Inventory.create(1 << 18, 16, (5, 6), bytes(32))
    rows = [
        ShardRow(
            base=10 * k,
            count=10,
            identity=(1 << 63, k, 3, -4, 5),
            domain=1,
            fingerprint=(1 << 64) - 1,
            payload_size=7,
            alignment=512,
            group=0,
            checksum_kind=1,
            flags=3,
            asked="",
            format="ffrecord",
            path="/d/" + "x" * 400 + f"/{k}",
        )
        for k in range(3)
    ]
    for row in rows:
        made.add_shard(row)
    made.set_group([10, 999], 8)
    made.remove_shard(0)
    made.remove_shard(0)
    fd = os.dup(made.file.fd)
    other = Inventory.adopt(fd, made.file.size)
    found = other.shards()
    other.close()
    assert [row.base for row in found] == [10, 20]
    assert (found[0].group, found[1].group) == (8, 0)
    assert found[0].identity == rows[1].identity and found[0].fingerprint == rows[1].fingerprint
    assert found[1].path == rows[2].path[-376:]
    made.add_shard(rows[0])
    assert made.get("shard_rows") == 3, "the row of the first was used again"
    made.close()


def test_tables_by_slot_are_read_where_they_were_written() -> None:
    made = Inventory.create(1 << 20, 1024, (5, 6), bytes(32))
    end = len(made.states)
    assert not len(made.held()) and not len(made.leased())
    made.states[[5, end // 2, end - 1]] = 1
    made.leases[[0, end - 1]] = 1, -1
    taken = os.fstat(made.file.fd).st_blocks
    assert made.held().tolist() == [5, end // 2, end - 1]
    assert made.leased().tolist() == [0, end - 1]
    assert os.fstat(made.file.fd).st_blocks == taken, "reading took memory"
    made.close()
