"""Clients of the long run: each kind uses ffserve in one way, and hashes every sample it gets.

    python clients.py KIND NUMBER SEED FOLDER SECONDS

A client prints "begun", and ends after SECONDS, or when FOLDER/going is gone. It reads through the
daemon of FFSERVE_SOCKET, and by itself while none answers. A kind that follows orders keeps its
position in FOLDER/state, so that one that is killed is continued by the next of its number. It
exits with 1 and a traceback if anything is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import allocator
import numpy as np
import random_client
from contents import (
    CHANGING,
    COMPRESSED,
    DAMAGED,
    KEPT_VERSIONS,
    MIXED,
    OVERWRITTEN,
    REMOTE,
    REPLACED,
    SMALL,
    SOUND,
    Int64s,
    Spec,
    Truth,
    Versions,
    WrongSampleError,
    forget_version,
    key_of,
    write_version,
)
from counts import Counts

import ffserve
from ffserve.errors import ChecksumError, FFServeError, FormatError, ReadError
from ffserve.order import epoch_order

RATES = {
    "reading": 10_000,
    "ordered": 8000,
    "windowed": 8000,
    "loaded": 5000,
    "threaded": 3000,
    "mixture": 3000,
    "prepared": 1500,
    "awaiting": 5000,
    "alone": 15_000,
    "dropin": 3000,
    "remote": 2000,
}
"""Samples a second that a client of a kind asks for at most; so the run is one of many kinds, and
leaves the machine time for what happens to them."""
BURST_S = 5.0
"""A client that was held up catches up with so many seconds."""
BATCH = 1024
MOST_SIZE = 4 << 20
"""Bytes of a request, about; the arenas are small."""
SAVE_EVERY = 20
"""Batches between two checkpoints of a loader."""


class Client:
    """What all kinds share: counters, pace, files, and when to end."""

    def __init__(self, kind: str, number: int, seed: int, folder: Path, seconds: float) -> None:
        self.kind, self.number, self.folder = kind, number, folder
        self.chance = random.Random(seed)
        self.rng = np.random.default_rng(seed)
        self.state_path = folder / "state" / f"{kind}.{number}"
        self._counts = Counts(folder / "counts" / f"{kind}.{number}")
        self._end = time.monotonic() + seconds
        self._rate = RATES.get(kind, 0)
        self._due = time.monotonic()

    def going(self) -> bool:
        """Whether to go on."""
        self._counts.add(steps=1)
        return time.monotonic() < self._end and (self.folder / "going").exists()

    def count(self, **amounts: int) -> None:
        """Count."""
        self._counts.add(**amounts)
        if self._rate and (samples := amounts.get("samples")):
            self._due = max(self._due, time.monotonic() - BURST_S) + samples / self._rate

    def ahead_s(self) -> float:
        """Return how long to wait, at most half a second, because of the rate."""
        return min(max(self._due - time.monotonic(), 0.0), 0.5)

    def truth(self, specs: Sequence[Spec]) -> Truth:
        """Return what files hold."""
        return Truth(self.folder, specs)

    def open(self, paths: Any, **options: Any) -> ffserve.Reader:
        """Open files."""
        self.count(opened=1)
        return ffserve.open(paths, **options)

    def checked(self, truth: Truth, indices: Any, batch: Any) -> None:
        """Hash a batch, or a list of arrays; then wait if the client is ahead of its rate."""
        self.hashed(truth, indices, batch)
        while (ahead_s := self.ahead_s()) and self.going():
            time.sleep(ahead_s)

    def hashed(self, truth: Truth, indices: Any, batch: Any) -> None:
        """Hash a batch, or a list of arrays."""
        if isinstance(batch, ffserve.Batch):
            samples = truth.check(indices, batch.buffer, batch.offsets)
            size = int(batch.offsets[-1] - batch.offsets[0])
        else:
            samples = truth.check_arrays(indices, batch)
            size = sum(map(len, batch))
        self.count(samples=samples, size=size)

    def some(self, truth: Truth, most: int) -> Int64s:
        """Return indices with repeats, from everywhere or from one place."""
        count = int(self.rng.integers(1, most))
        if self.chance.random() < 0.5:
            first = int(self.rng.integers(0, max(1, len(truth) - count)))
            found = np.arange(first, min(first + count, len(truth)), dtype=np.int64)
        else:
            found = self.rng.integers(0, len(truth), count)
        fits = int(np.searchsorted(np.cumsum(truth.sizes[found]), MOST_SIZE)) + 1
        return found[:fits]


# ---- by index -----------------------------------------------------------------------------------


def reading(client: Client) -> None:
    """Random reads by every method of a reader."""
    specs = SOUND if client.number % 2 else SMALL + MIXED
    truth = client.truth(specs)
    steps = (_by_batch, _by_batch, _by_batch, _by_read, _by_lease, _by_scan, _by_iteration, _by_one)
    while client.going():
        with client.open(truth.paths) as reader:
            until = time.monotonic() + 20 * client.chance.random()
            while client.going() and time.monotonic() < until:
                client.chance.choice(steps)(client, reader, truth)
            client.count(alone="unserved" in reader.stats())


def _by_batch(client: Client, reader: ffserve.Reader, truth: Truth) -> None:
    indices = client.some(truth, 4 * BATCH)
    out = None
    if client.chance.random() < 0.3:
        out = np.full(int(truth.sizes[indices].sum()) + 7, 255, np.uint8)
    client.checked(truth, indices, reader.read_batch(indices, out=out))


def _by_read(client: Client, reader: ffserve.Reader, truth: Truth) -> None:
    indices = client.some(truth, 256)
    client.checked(truth, indices, reader.read(indices.tolist()))


def _by_lease(client: Client, reader: ffserve.Reader, truth: Truth) -> None:
    indices = client.some(truth, 128)
    with reader.lease(indices) as leased:
        client.checked(truth, indices, list(leased))
        time.sleep(0.05 * client.chance.random())
        client.checked(truth, indices, list(leased))


def _by_scan(client: Client, reader: ffserve.Reader, truth: Truth) -> None:
    indices = client.some(truth, 8 * BATCH)
    for first, batch, failed in reader.scan(indices, count=client.chance.choice((64, BATCH))):
        assert not failed, failed
        client.checked(truth, indices[first : first + len(batch)], batch)


def _by_iteration(client: Client, reader: ffserve.Reader, truth: Truth) -> None:
    indices = client.some(truth, 4 * BATCH)
    first = 0
    for batch in reader.batches(indices, count=256):
        client.checked(truth, indices[first : first + len(batch)], batch)
        first += len(batch)
    assert first == len(indices)


def _by_one(client: Client, reader: ffserve.Reader, truth: Truth) -> None:
    index = int(client.rng.integers(0, len(truth)))
    client.checked(truth, [index], [reader[index]])
    client.checked(truth, range(index, min(index + 9, len(truth))), reader[index : index + 9])


def alone(client: Client) -> None:
    """The same without a daemon, and windowed orders, which are then read ahead."""
    truth = client.truth(SOUND)
    steps = (_by_batch, _by_batch, _by_read, _by_lease, _by_scan, _by_iteration, _by_one)
    while client.going():
        with client.open(truth.paths, server="off") as reader:
            until = time.monotonic() + 30 * client.chance.random()
            while client.going() and time.monotonic() < until:
                client.chance.choice(steps)(client, reader, truth)
        small = client.truth(SMALL[:1])
        with client.open(small.paths, server="off") as reader:
            _windows(client, reader, small, 4096, client.chance.randrange(1000))


def awaiting(client: Client) -> None:
    """Several requests at once in an event loop, a new one now and then."""
    import uvloop

    truth = client.truth(SMALL + MIXED)

    async def one(reader: ffserve.aio.Reader, until: float) -> None:
        while client.going() and time.monotonic() < until:
            indices = client.some(truth, BATCH)
            if client.chance.random() < 0.7:
                client.hashed(truth, indices, await reader.read_batch(indices))
            else:
                client.hashed(truth, indices[:128], await reader.read(indices[:128]))
            await asyncio.sleep(client.ahead_s())

    async def several() -> None:
        async with ffserve.aio.open(truth.paths) as reader:
            client.count(opened=1)
            until = time.monotonic() + 15 * client.chance.random()
            await asyncio.gather(*(one(reader, until) for _ in range(4)))
            indices, first = client.some(truth, 8 * BATCH), 0
            async for batch in reader.batches(indices):
                client.hashed(truth, indices[first : first + len(batch)], batch)
                first += len(batch)
            assert first == len(indices)

    while client.going():
        if client.chance.random() < 0.5:
            asyncio.run(several())
        else:
            uvloop.run(several())


def arbitrary(client: Client) -> None:
    """`random_client`: leases over forks, threads, loops, errors, orders; every byte compared."""
    paths = sorted(str(path) for path in (client.folder / "random").glob("[0-9]*"))
    other = random_client.Client(client.chance.randrange(1 << 30), "auto", paths)
    client.count(opened=1)
    while client.going():
        samples, size = other.checked, other.checked_size
        other.step()
        client.count(samples=other.checked - samples, size=other.checked_size - size)
    other.close()


# ---- in orders ----------------------------------------------------------------------------------


def ordered(client: Client) -> None:
    """Announced orders; each epoch has each sample once."""
    truth = client.truth(SMALL + MIXED if client.number % 2 else SMALL[:2] + MIXED[:2])
    epoch = 0
    with client.open(truth.paths) as reader:
        reader.announce(epoch_order(len(truth), seed=client.number, epoch=0), 0)
        while client.going():
            order = epoch_order(len(truth), seed=client.number, epoch=epoch)
            reader.announce(epoch_order(len(truth), seed=client.number, epoch=epoch + 1), epoch + 1)
            used = 0
            while used < len(order) and client.going():
                part = order[used : used + client.chance.choice((64, 512, BATCH))]
                client.checked(truth, part, reader.read_batch(part))
                used += len(part)
            if used == len(order):
                _whole(client, order, len(truth))
            epoch += 1
        client.count(alone="unserved" in reader.stats())


def windowed(client: Client) -> None:
    """Windowed orders, announced, read with read-ahead."""
    truth = client.truth(SMALL)
    epoch = 0
    with client.open(truth.paths) as reader:
        while client.going():
            _windows(client, reader, truth, client.chance.choice((2048, 16_384)), epoch)
            epoch += 1


def _windows(client: Client, reader: ffserve.Reader, truth: Truth, window: int, epoch: int) -> None:
    order = epoch_order(len(truth), seed=client.number, epoch=epoch, window=window)
    reader.announce(order, epoch)
    used = 0
    for batch in reader.batches(order, count=BATCH):
        part = order[used : used + len(batch)]
        client.checked(truth, part, batch)
        used += len(part)
        if not client.going():
            return
    assert used == len(order), (used, len(order))
    _whole(client, order, len(truth))


def _whole(client: Client, order: Int64s, count: int) -> None:
    """Count an epoch that was delivered as a whole, if its order has each sample once."""
    assert (np.bincount(order, minlength=count) == 1).all()
    client.count(epochs=1)


# ---- loaders ------------------------------------------------------------------------------------


def loaded(client: Client) -> None:
    """Raw samples by two worker processes, resumed in mid-epoch after kills; every second number
    with windowed orders, and workers that are not forked."""
    from ffserve.torch import EpochSampler, RawDataset

    truth = client.truth(SMALL)
    sampler = EpochSampler(
        len(truth),
        seed=client.number,
        window=4096 if client.number % 2 else None,
        shared="soak" if client.number % 3 == 0 else None,
    )
    method = "forkserver" if client.number % 2 else "fork"
    dataset = RawDataset(truth.paths)
    _epochs(client, truth, dataset, sampler, num_workers=2, multiprocessing_context=method)


def threaded(client: Client) -> None:
    """The same by two threads, of samples of all sizes."""
    from ffserve.torch import EpochSampler

    truth = client.truth(SMALL[1:] + MIXED + COMPRESSED)
    sampler = EpochSampler(len(truth), seed=client.number)
    _epochs(client, truth, _dataset("Plain", truth.paths), sampler, threads=2)


def mixture(client: Client) -> None:
    """A mixture: each epoch has the share of each file, and none more often than need be."""
    from ffserve.torch import Mixture, RawDataset

    specs = (*SMALL, MIXED[0])
    truth = client.truth(specs)
    parts = [RawDataset(path) for path in truth.paths]
    mixed = Mixture(parts, weights=[0.3, 0.4, 0.2, 0.1], seed=client.number, epoch_size=20_000)
    sampler = mixed.sampler()

    def check(order: Int64s, epoch: int) -> None:
        place = np.searchsorted(truth.firsts, order, "right") - 1
        counts = np.bincount(place, minlength=len(specs)).tolist()
        assert counts == mixed.counts(epoch), (counts, mixed.counts(epoch))
        often = np.bincount(order, minlength=len(truth))
        for k, count in enumerate(counts):
            whole = truth.firsts[k + 1] - truth.firsts[k]
            most = often[truth.firsts[k] : truth.firsts[k + 1]].max()
            assert most <= -(-count // whole), (k, most)

    _epochs(client, truth, mixed, sampler, check, num_workers=1)


def prepared(client: Client) -> None:
    """Prepared samples, shared with the other clients of this kind."""
    from ffserve.torch import EpochSampler

    truth = client.truth(MIXED)
    sampler = EpochSampler(len(truth), seed=client.number)
    _epochs(client, truth, _dataset("Inverted", truth.paths), sampler, num_workers=1)


def _dataset(name: str, paths: Sequence[str]) -> Any:
    import datasets_of_soak

    return getattr(datasets_of_soak, name)(paths)


def _epochs(
    client: Client,
    truth: Truth,
    dataset: Any,
    sampler: Any,
    check: Callable[[Int64s, int], None] | None = None,
    **options: Any,
) -> None:
    """Run a loader epoch by epoch, and go on where the last process of this number was."""
    from ffserve.torch import DataLoader

    loader = DataLoader(dataset, batch_size=256, sampler=sampler, collate_fn=list, **options)
    epoch = used = 0
    if client.state_path.exists():
        state = pickle.loads(client.state_path.read_bytes())
        epoch, used = state["epoch"], state["used"]
        loader.load_state_dict(state["loader"])
    client.count(opened=1)
    while client.going():
        sampler.set_epoch(epoch)
        order = sampler.order()
        for number, batch in enumerate(loader):
            client.checked(truth, order[used : used + len(batch)], batch)
            used += len(batch)
            if number % SAVE_EVERY == 0:
                _save(client, epoch, used, loader)
            if not client.going():
                _save(client, epoch, used, loader)
                return
        assert used == len(order), f"{used} samples of an epoch of {len(order)}"
        if check is None:
            _whole(client, order, len(truth))
        else:
            check(order, epoch)
            client.count(epochs=1)
        epoch, used = epoch + 1, 0
        sampler.set_epoch(epoch)
        _save(client, epoch, used, loader)


def _save(client: Client, epoch: int, used: int, loader: Any) -> None:
    part = client.state_path.with_name(client.state_path.name + ".part")
    state = {"epoch": epoch, "used": used, "loader": loader.state_dict()}
    part.write_bytes(pickle.dumps(state))
    part.rename(client.state_path)


# ---- programs -----------------------------------------------------------------------------------


def dropin(client: Client) -> None:
    """Programs for ffrecord and pyrecordio, with another import."""
    import ffserve as ffrecord
    from ffserve.recordio import File

    truth = client.truth((SMALL[0], MIXED[0]))
    records = client.truth(SMALL[2:])
    own = client.folder / "state" / f"dropin-{client.number}.ffr"
    while client.going():
        reader = ffrecord.FileReader(truth.paths, check_data=True)
        client.count(opened=1)
        assert reader.n == len(truth)
        for _ in range(20):
            indices = client.some(truth, BATCH)
            client.checked(truth, indices, reader.read(indices.tolist()))
        reader.close()

        writer = ffrecord.FileWriter(str(own), 200)
        first = client.some(truth, len(truth) - 200)[0] % (len(truth) - 200)
        with client.open(truth.paths) as source:
            for sample in source.read(range(first, first + 200)):
                writer.write_one(sample)
        writer.close()
        copied = ffrecord.FileReader([str(own)], check_data=True)
        client.checked(truth, range(first, first + 200), copied.read(list(range(200))))
        copied.close()

        with File(records.paths[0], "r") as file:
            first = client.chance.randrange(len(records) - 500)
            got = list(file.get_reader(first, first + 500))
            client.checked(
                records, range(first, first + 500), [np.frombuffer(s, np.uint8) for s in got]
            )


def command(client: Client) -> None:
    """The command line."""
    truth, broken = client.truth(SMALL[:2] + MIXED[:1]), client.truth(DAMAGED[:1])
    socket = os.environ["FFSERVE_SOCKET"]

    def run(*words: str, codes: Sequence[int] = (0,)) -> bytes:
        done = subprocess.run(
            [sys.executable, "-m", "ffserve", *words], capture_output=True, timeout=300
        )
        assert done.returncode in codes, (words, done.returncode, done.stdout, done.stderr)
        client.count(steps=1, errors=int(done.returncode != 0))
        return done.stdout

    def cat(server: str) -> None:
        file = client.chance.randrange(len(truth.paths))
        first = client.chance.randrange(truth.firsts[file + 1] - truth.firsts[file] - 300)
        out = run("cat", truth.paths[file], f"{first}:{first + 300}", "--server", server)
        begin = truth.firsts[file] + first
        sizes = truth.sizes[begin : begin + 300]
        offsets = np.concatenate(([0], np.cumsum(sizes)))
        assert len(out) == offsets[-1], (len(out), offsets[-1])
        client.count(
            samples=truth.check(range(begin, begin + 300), np.frombuffer(out, np.uint8), offsets),
            size=len(out),
        )

    def inspect() -> None:
        found = json.loads(run("inspect", "--json", truth.paths[0]))
        samples = (
            [each["samples"] for each in found] if isinstance(found, list) else [found["samples"]]
        )
        assert samples == [truth.firsts[1]], found

    def verify_damaged() -> None:
        out = run("verify", broken.paths[0], codes=(1,)).decode()
        for index in broken.damaged.tolist():
            assert f"sample {index}:" in out, out

    def status() -> None:
        # 3: the daemon is being restarted just now; 1: it has ended while it was asked.
        run("status", "--socket", socket, codes=(0, 1, 3))

    steps = (
        lambda: cat("auto"),
        lambda: cat("off"),
        inspect,
        lambda: run("verify", truth.paths[1]),
        verify_damaged,
        status,
        lambda: run("ls", truth.paths[2], "--start", "5", "--count", "20", "--json"),
    )
    while client.going():
        client.chance.choice(steps)()
        time.sleep(8.0)


# ---- files that change, and damaged ones --------------------------------------------------------


def writing(client: Client) -> None:
    """Replace files under their names, and overwrite one in place."""
    while client.going():
        spec = client.chance.choice(CHANGING + OVERWRITTEN)
        versions = Versions(client.folder, spec)
        version = versions.begun + 1
        if spec in OVERWRITTEN:
            apart = client.folder / "state" / "overwriting"
            apart.mkdir(exist_ok=True)
            write_version(apart, spec, version)
            sums = f"{spec.name}.{version}.npy"
            (apart / "sums" / sums).rename(client.folder / "sums" / sums)
            content = (apart / spec.name).read_bytes()
            versions.numbers[0] = version
            with (client.folder / spec.name).open("r+b") as out:
                for start in range(0, len(content), 1 << 16):
                    out.seek(start)
                    out.write(content[start : start + (1 << 16)])
                    out.flush()
                    if client.chance.random() < 0.1:
                        time.sleep(0.02)
        else:
            versions.numbers[0] = version
            write_version(client.folder, spec, version)
        versions.numbers[1] = version
        if version > KEPT_VERSIONS:
            forget_version(client.folder, spec, version - KEPT_VERSIONS)
        time.sleep(2 * client.chance.random())


def changing(client: Client) -> None:
    """Files that are replaced: a reader has the samples of one version, the current one."""
    _replaced(client, CHANGING, str(client.folder))


def _replaced(client: Client, specs: Sequence[Spec], place: str) -> None:
    while client.going():
        spec = client.chance.choice(specs)
        versions, path = Versions(client.folder, spec), f"{place}/{spec.name}"
        lowest = versions.done
        try:
            with client.open(path) as reader:
                # A name that is replaced between two steps of opening: the newer one, or an error.
                highest = versions.begun
                version, _, index = key_of(reader[0])
                if not lowest <= version <= highest or index:
                    raise WrongSampleError(
                        f"{path}: version {version}, index {index}, not {lowest} to {highest}"
                    )
                truth = Truth(client.folder, [spec], [version])
                assert len(reader) == len(truth)
                for _ in range(client.chance.randrange(1, 5)):
                    if client.chance.random() < 0.5:
                        _by_iteration(client, reader, truth)
                    else:
                        _by_batch(client, reader, truth)
                    time.sleep(0.3 * client.chance.random())
        except (ReadError, FormatError) as error:
            # The daemon ended and its successor has the new file; or the name was given to another
            # file just when this one was opened.
            if type(error) is FormatError and "replaced or rewritten" not in str(error):
                raise
            if isinstance(error, ReadError) and "changed" not in str(error):
                raise
            client.count(errors=1)
        time.sleep(0.5 * client.chance.random())


def overwritten(client: Client) -> None:
    """A file that is overwritten in place: errors, but never bytes that were not written."""
    [spec] = OVERWRITTEN
    versions, path = Versions(client.folder, spec), client.folder / spec.name
    while client.going():
        lowest = versions.done
        with contextlib.suppress(FFServeError), client.open(path) as reader:
            for _ in range(client.chance.randrange(1, 5)):
                indices = client.rng.integers(0, spec.count, 300)
                got = reader.read(indices, errors="return")
                highest = versions.begun
                truths = [Truth(client.folder, [spec], [v]) for v in range(lowest, highest + 1)]
                good = [k for k, each in enumerate(got) if not isinstance(each, FFServeError)]
                _of_any(truths, indices[good], [got[k] for k in good])
                client.count(
                    samples=len(good),
                    size=sum(len(got[k]) for k in good),
                    errors=len(got) - len(good),
                )
                time.sleep(0.3 * client.chance.random())
        time.sleep(0.5 * client.chance.random())


def _of_any(truths: Sequence[Truth], indices: Int64s, arrays: Sequence[Any]) -> None:
    """Check that each sample is that of one of these versions."""
    sums = np.array([zlib.crc32(each) for each in arrays], np.uint32)
    right = np.zeros(len(arrays), bool)
    for truth in truths:
        right |= sums == truth.sums[indices]
    if not right.all():
        k = int(np.flatnonzero(~right)[0])
        raise WrongSampleError(
            f"index {indices[k]}: {len(arrays[k])} bytes that no version has, "
            f"key {key_of(arrays[k])}, {len(truths)} versions"
        )


def damaged(client: Client) -> None:
    """Damaged samples give their error, always and only they."""
    truth = client.truth(DAMAGED)
    bad = set(truth.damaged.tolist())
    intact = np.setdiff1d(np.arange(len(truth)), truth.damaged)

    def apart(indices: Int64s, got: Sequence[Any]) -> None:
        good = []
        for k, (index, each) in enumerate(zip(indices.tolist(), got, strict=True)):
            if isinstance(each, FFServeError):
                assert isinstance(each, ChecksumError) and index in bad, (index, each)
                assert each.index == index, (index, each)
                client.count(errors=1)
            else:
                assert index not in bad, index
                good.append(k)
        client.checked(truth, indices[good], [got[k] for k in good])

    while client.going():
        with client.open(truth.paths) as reader:
            indices = np.concatenate((client.some(truth, 300), truth.damaged))
            apart(indices, reader.read(indices, errors="return"))
            for first, batch, failed in reader.scan(count=256):
                part = np.arange(first, first + len(batch))
                apart(part, [failed.get(k, each) for k, each in enumerate(batch)])
            index = int(client.chance.choice(truth.damaged))
            try:
                reader.read_batch([index - 1 if index else 1, index])
            except ChecksumError as error:
                assert error.index == index
                client.count(errors=1)
            else:
                raise WrongSampleError(f"the damaged sample {index} was delivered")
        if client.chance.random() < 0.2:
            with client.open(truth.paths, on_error="skip") as reader:
                assert len(reader) == len(intact) and len(reader.damaged) == len(bad)
                indices = client.rng.integers(0, len(intact), 500)
                client.checked(truth, intact[indices], reader.read_batch(indices))
        time.sleep(client.chance.random())


# ---- remote files -------------------------------------------------------------------------------


def remote(client: Client) -> None:
    """Files of an origin that fails for seconds, by a cache that fails and lies: no error comes of
    that. Those of an odd number ask the cache when they read by themselves, and every second pair
    always does that."""
    truth, place = client.truth(REMOTE), _origin(client)
    urls = [f"{place}/{spec.name}" for spec in REMOTE]
    options = {"server": "off"} if client.number // 2 % 2 else {}
    steps = (_by_batch, _by_read, _by_scan, _by_iteration, _by_one)
    while client.going():
        with client.open(urls, **options) as reader:
            until = time.monotonic() + 20 * client.chance.random()
            while client.going() and time.monotonic() < until:
                client.chance.choice(steps)(client, reader, truth)


def replaced(client: Client) -> None:
    """An object that is replaced at the origin: a reader has the samples of one version."""
    _replaced(client, REPLACED, _origin(client))


def _origin(client: Client) -> str:
    """Return the address of the origin."""
    address, cache = (client.folder / "origin").read_text().split()
    if client.number % 2:
        os.environ["FFSERVE_STORE_CACHE"] = cache
    return address


KINDS: dict[str, Callable[[Client], None]] = {
    each.__name__: each
    for each in (
        reading, alone, awaiting, arbitrary, ordered, windowed, loaded, threaded, mixture, prepared,
        dropin, command, writing, changing, overwritten, damaged, remote, replaced,
    )
}  # fmt: skip


def _canary(folder: Path) -> None:
    """A deliberate fault must be found, or the checks of this run mean nothing."""
    truth = Truth(folder, SMALL[:1])
    with ffserve.open(truth.paths, server="off") as reader:
        batch = reader.read_batch(range(3))
    truth.check(range(3), batch.buffer, batch.offsets)
    for faulty in (150, None):
        indices = [0, 1, 2] if faulty else [0, 2, 1]
        if faulty:
            batch.buffer[faulty] ^= 1
        try:
            truth.check(indices, batch.buffer, batch.offsets)
        except WrongSampleError:
            if faulty:
                batch.buffer[faulty] ^= 1
            continue
        raise AssertionError("a wrong sample was not found")


def main() -> None:
    """Run one client."""
    kind, number, seed, folder, seconds = sys.argv[1:]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    client = Client(kind, int(number), int(seed), Path(folder), float(seconds))
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    allocator.report(str(client.folder / "used"))
    _canary(client.folder)
    print("begun", flush=True)
    KINDS[kind](client)


if __name__ == "__main__":
    main()
