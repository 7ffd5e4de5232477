"""What stays in memory: the policy alone, and over a virtual clock beside Belady's rule."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ffserve.cache.arena import Arena
from ffserve.cache.jobs import LOOKED_AT, JobProgress
from ffserve.cache.next_use import NextUse
from ffserve.cache.next_use_buckets import NONE
from ffserve.cache.orders import Arriving
from ffserve.cache.policy import Policy
from ffserve.cache.simulation import (
    SimulatedJob,
    Simulation,
    SimulationResult,
    belady,
    shuffled,
)

Int64s = NDArray[np.int64]
MIB = 1 << 20
NOBODY: Int64s = np.zeros(0, np.int64)
CLASS = int(Arena(MIB).classes(np.array([4096]))[0])
"""Of slots of 4 KiB."""


class Slots:
    """A policy over 4 KiB slots; slot k holds sample k, or what `fill` is told."""

    def __init__(self, count: int = 256, samples: int = 1000) -> None:
        self.next_use = NextUse()
        self.arena = Arena(count * 4096)
        self.first = np.zeros(self.arena.slot_count, np.int64)
        self.count = np.ones(self.arena.slot_count, np.int32)
        self.pins = np.zeros(self.arena.slot_count, np.int32)
        self.policy = Policy(self.arena, self.next_use, self.first, self.count, self.pins)
        self.free = self.arena.take(CLASS, count).tolist()
        self.samples = samples

    def progress(self, job: str, orders: list[Any] | None = None, base: int = 0) -> JobProgress:
        progress = self.next_use.join(job, np.array([base]), np.array([self.samples]))
        for epoch, order in enumerate(orders or ()):
            arriving = Arriving(
                len(order), sample_count=self.samples, low=base, span=self.samples,
                replacement=False,
            )  # fmt: skip
            arriving.add(np.asarray(order) + base)
            now = self.next_use.turn_at
            self.next_use.announced(progress, epoch, arriving.finish(), None, job, now)
        return progress

    def fill(self, numbers: Any, how: str = "admit") -> list[int]:
        """Put samples into free slots."""
        numbers = np.asarray(numbers, np.int64)
        slots = np.array([self.free.pop() for _ in numbers], np.int64)
        self.first[slots] = numbers
        group = self.next_use.group_of(int(numbers[0])) if len(numbers) else 0
        self.policy.enter(slots, group, 4096 * len(slots))
        getattr(self.policy, how)(slots, CLASS)
        return slots.tolist()

    def out(
        self, count: int, usable: Any = None, taker: int = 0, latest: float | None = None
    ) -> list[int]:
        """Evict; return the samples that went."""
        found, _ = self.policy.victims(CLASS, count, usable or everything, taker, latest)
        self.policy.leave(found)
        self.free += found.tolist()
        return self.first[found].tolist()


def everything(slots: Int64s) -> NDArray[np.bool_]:
    return np.ones(len(slots), np.bool_)


# ---- a sole job ----------------------------------------------------------------------------------


def test_expendable_residents_go_first_and_then_the_newest() -> None:
    slots = Slots()
    slots.fill([1, 2, 3])
    slots.fill([4, 5], "admit_expendable")
    assert slots.policy.victims(CLASS + 1, 3, everything, 0, None)[0].tolist() == []
    assert slots.out(3) == [4, 5, 3]
    assert sorted(slots.out(9)) == [1, 2]
    assert not slots.policy.used


def test_pinned_residents_stay_in_their_buckets() -> None:
    slots = Slots()
    slots.fill([1, 2, 3, 4])
    assert sorted(slots.out(2, lambda s: slots.first[s] < 3)) == [1, 2]
    assert sorted(slots.out(2)) == [3, 4]


def test_an_idle_slot_that_is_wanted_again_is_not_lost() -> None:
    slots = Slots()
    taken = slots.fill([1, 2])
    slots.policy.abandon(np.array(taken), CLASS)
    assert slots.policy.idle_victims(CLASS, 2, lambda s: s > 1 << 30).tolist() == []
    assert sorted(slots.out(2)) == [1, 2]


def test_a_hundred_thousand_that_left_by_another_way_are_not_remembered() -> None:
    slots = Slots(65_536, 65_536)
    start = time.perf_counter()
    for _ in range(20):
        taken = np.array(slots.fill(np.arange(60_000)))
        slots.policy.leave(taken)
        slots.free += taken.tolist()
    assert time.perf_counter() - start < 20
    (bucket_set,) = slots.policy.buckets.of_class[CLASS].values()
    assert bucket_set.entries < 4 * 65_536
    assert slots.out(5) == []


@given(
    steps=st.lists(
        st.tuples(st.sampled_from("kpifv"), st.sets(st.integers(0, 30), max_size=8)), max_size=30
    )
)
def test_no_slot_is_ever_offered_twice(steps: list[tuple[str, set[int]]]) -> None:
    slots, policy = SHARED, SHARED.policy
    inside = set[int]()
    for step, some in steps:
        fresh = np.array(sorted(some - inside), np.int64)
        match step:
            case "k" | "p" if len(fresh):
                policy.enter(fresh, 0, 4096 * len(fresh))
                (policy.admit if step == "k" else policy.admit_expendable)(fresh, CLASS)
                inside |= some
            case "i":
                policy.abandon(np.array(sorted(inside & some), np.int64), CLASS)
            case "f":
                gone = np.array(sorted(inside & some), np.int64)
                policy.leave(gone)
                inside -= some
            case "v":
                found = policy.idle_victims(CLASS, len(some), everything).tolist()
                found += policy.victims(CLASS, len(some) - len(found), everything, 0, None)[
                    0
                ].tolist()
                assert len(found) == len(set(found)) == min(len(some), len(inside))
                assert set(found) <= inside
                policy.leave(np.array(found, np.int64))
                inside -= set(found)
    policy.leave(np.array(sorted(inside), np.int64))
    assert not policy.used and (policy.buckets.key[:31] == NONE).all()
    assert slots.out(1) == []


SHARED = Slots()
SHARED.policy.buckets.enter(np.arange(31), 0)


# ---- several jobs --------------------------------------------------------------------------------


def two_jobs(slots: Slots) -> tuple[JobProgress, JobProgress]:
    """One goes up, the other down; both have used a hundred samples, in a second."""
    up, down = np.arange(1000), np.arange(1000)[::-1]
    jobs = slots.progress("up", [up, up]), slots.progress("down", [down, down])
    for progress in jobs:
        progress.advance_to(0, 0, 0.0)
        progress.pace.add(0, 0.0)
    slots.next_use.turn_at = 1.0
    for progress in jobs:
        progress.advance_to(0, 100, 1.0)
    return jobs


def test_the_farthest_next_use_goes_first() -> None:
    slots = Slots()
    two_jobs(slots)
    slots.fill([120, 500, 880, 300, 700, 50])
    # In parts of the epoch from now: 0.02, 0.4, 0.02, 0.2, 0.2, 0.85 (by the one that goes down).
    assert slots.out(2) == [50, 500]
    assert sorted(slots.out(2)) == [300, 700]
    assert sorted(slots.out(2)) == [120, 880]


def test_a_slot_that_left_and_came_back_is_not_offered_twice_in_one_search() -> None:
    slots = Slots()
    for job in "ab":
        slots.progress(job, [range(1000)])
    gone = slots.fill([1])
    assert slots.out(0) == [], "but all are looked at, and put on a bucket"
    slots.policy.leave(np.array(gone))
    slots.free += gone
    assert slots.fill([1]) == gone
    slots.fill([2])
    assert slots.out(0) == []
    assert slots.out(2, lambda s: slots.first[s] != 2) == [1]


def test_a_prefetch_evicts_no_sample_that_is_wanted_sooner() -> None:
    slots = Slots()
    two_jobs(slots)
    slots.fill([120, 500])
    assert slots.out(2, latest=1.0 + 5.0) == []
    assert slots.out(2, latest=1.0 + 3.0) == [500]


def test_among_equals_the_newest_goes() -> None:
    slots = Slots()
    two_jobs(slots)
    for k in range(40):
        slots.fill([500 + k % 10])
        assert slots.out(0) == []
    assert slots.out(1) == [500 + 39 % 10]


def test_a_used_sample_is_wanted_an_epoch_later() -> None:
    slots = Slots()
    up, _ = two_jobs(slots)
    taken = slots.fill([101, 600])
    assert slots.out(1) == [600]
    passed = up.advance_to(0, 110, 1.1)
    assert 101 in passed.tolist()
    slots.policy.invalidate(np.array(taken[:1]))
    slots.fill([600])
    assert slots.out(1) == [101]


@pytest.mark.parametrize("seed", range(5))
def test_no_slot_is_given_to_two(seed: int) -> None:
    """Slots that left by another way (their slab was taken) and came back lie on buckets twice."""
    slots, chance = Slots(256), np.random.default_rng(seed)
    two_jobs(slots)
    held = dict.fromkeys(slots.fill(range(256)))
    for _ in range(400):
        slots.next_use.turn_at += 0.01
        pinned = chance.random(slots.arena.slot_count) < 0.6
        found, _ = slots.policy.victims(CLASS, 8, lambda s, pinned=pinned: ~pinned[s], 0, None)
        assert len(set(found.tolist())) == len(found)
        assert all(slot in held for slot in found.tolist())
        stolen = chance.choice(list(held), 8, replace=False)
        gone = np.union1d(found, stolen)
        slots.policy.leave(gone)
        for slot in gone.tolist():
            del held[slot]
        slots.free += gone.tolist()
        held.update(dict.fromkeys(slots.fill(chance.choice(1000, len(gone), replace=False))))


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_search_looked_at_all_pinned_slots_again(jobs: int) -> None:
    slots = Slots(256)
    if jobs == 2:
        two_jobs(slots)
    held = np.array(slots.fill(range(256)))
    group = slots.next_use.group_of(0)
    slots.pins[held[:240]] = 1
    looked: list[int] = []

    def usable(chosen: Int64s) -> NDArray[np.bool_]:
        looked.append(len(chosen))
        return slots.pins[chosen] == 0

    assert sorted(slots.out(256, usable, group)) == list(range(240, 256))
    looked.clear()
    assert slots.out(8, usable, group) == [] and sum(looked) == 0
    # Used while they are pinned, which gives them an estimate of their own; then released.
    slots.policy.invalidate(held[:50])
    slots.pins[held[:100]] = 0
    slots.policy.unpark(held[:100])
    assert sorted(slots.out(256, usable, group)) == list(range(100))
    slots.pins[:] = 0
    slots.policy.unpark(held[100:240])
    assert sorted(slots.out(256, usable, group)) == list(range(100, 240))


def test_pinned_slots_of_groups_that_become_one_are_found_after_their_release() -> None:
    slots = Slots()
    next_use = slots.next_use
    one = next_use.join("a", np.array([0]), np.array([1000]))
    other = next_use.join("b", np.array([5000]), np.array([1000]))
    held = np.array(slots.fill([1, 2, 3]))
    slots.pins[held] = 1
    assert slots.out(3, lambda chosen: slots.pins[chosen] == 0, taker=one.group) == []
    next_use.join("c", np.array([0, 5000]), np.array([1000, 1000]))
    assert one.group == other.group
    assert slots.out(1, taker=one.group) == []
    assert slots.policy.buckets.bucket_set(one.group, CLASS).parked == 3
    slots.policy.unpark(held)
    assert slots.policy.buckets.bucket_set(one.group, CLASS).parked == 0
    assert sorted(slots.out(3, taker=one.group)) == [1, 2, 3]


def test_a_job_that_stops_holds_no_memory() -> None:
    slots = Slots()
    up, down = two_jobs(slots)
    for step in range(2, 41):
        slots.next_use.turn_at = float(step)
        down.advance_to(0, 100 + step * 20, float(step))
    # `up` has not moved for 39 s: at 100 + its pace, which falls, everything is far away.
    group = slots.next_use.groups[up.group]
    assert group.active(40.0) == [down]
    assert group.static(40.0)
    assert up.epoch_s(40.0) > 100 > down.epoch_s(40.0)


def test_a_blocks_next_use_is_that_of_its_soonest_sample() -> None:
    slots = Slots()
    two_jobs(slots)
    taken = np.array(slots.fill([480, 500]))
    slots.count[taken[0]] = 8
    slots.first[taken[0]] = 121
    assert slots.out(1) == [500]


def test_a_job_that_lies_counts_as_silent() -> None:
    next_use = NextUse()
    progress = next_use.join("liar", np.array([0]), np.array([100_000]))
    arriving = next_use.arriving(progress, 100_000, replacement=False)
    for start in range(0, 100_000, 50_000):
        arriving.add(np.arange(start, start + 50_000))
    next_use.announced(progress, 0, arriving.finish(), None, "session", 0.0)
    honest = np.arange(LOOKED_AT * 4)
    for start in range(0, len(honest), 64):
        progress.asked(honest[start : start + 64], 1.0)
    assert progress.order is not None and not progress.departed
    chance = np.random.default_rng(0)
    for _ in range(40):
        progress.asked(chance.integers(50_000, 100_000, 64), 2.0)
    assert progress.departed and progress.order is None and progress.size == 0
    progress.asked(np.arange(64), 3.0)
    assert progress.seen is not None and progress.seen_count >= 64


def test_a_silent_job_that_repeats_itself_draws_with_replacement() -> None:
    order = np.random.default_rng(0)
    once, drawn = JobProgress("a", 5000, 0, 5000), JobProgress("b", 5000, 0, 5000)
    for epoch in range(3):
        for part in np.split(order.permutation(5000), 100):
            once.visited(part, float(epoch))
            drawn.visited(order.integers(0, 5000, 50), float(epoch))
            assert not once.replacement
        assert once.seen_count == 5000
        assert drawn.replacement
    assert drawn.same_set() is False and once.same_set()


def test_two_data_sets_have_their_floors() -> None:
    slots = Slots(256)
    slow = slots.progress("slow", base=0)
    fast = slots.progress("fast", base=5000)
    slots.fill(np.arange(256))
    for second in range(20):
        slots.next_use.turn_at = float(second)
        slow.visited(np.arange(second, second + 2), float(second))
        fast.visited(5000 + np.arange(400), float(second))
    assert slots.policy.floors() == {slow.group: 64 * 4096, fast.group: 64 * 4096}
    # The fast one's are wanted sooner: it takes, but not below the floor of the other.
    for _ in range(60):
        gone = slots.out(4, taker=fast.group)
        assert len(gone) == 4
        slots.fill(5000 + np.arange(4), "admit")
    assert slots.policy.used[slow.group] == 64 * 4096
    # The slow one gets no more than its floor back.
    for _ in range(20):
        gone = slots.out(4, taker=slow.group)
        assert all(number < 5000 for number in gone)
        slots.fill(np.arange(4), "admit_expendable")
    assert slots.policy.used[slow.group] == 64 * 4096
    assert slots.out(300, taker=fast.group)


def test_a_request_took_a_whole_batch_from_a_data_set_that_had_one_sample_above_its_floor() -> None:
    slots = Slots(count=256)
    slots.progress("slow", [np.arange(1000)]).advance_to(0, 0, 0.0)
    slots.progress("fast", [np.arange(1000)], base=1000).advance_to(0, 0, 0.0)
    slow, fast = slots.next_use.group_of(0), slots.next_use.group_of(1000)
    floor = slots.policy.floors()[slow]
    assert floor == 256 * 4096 // 4
    slots.fill(np.arange(65))
    slots.fill(1000 + np.arange(20))
    gone = slots.out(32, taker=fast)
    assert sum(number < 1000 for number in gone) == 1
    assert slots.policy.used[slow] == floor
    assert len(gone) == 21, "the rest are the taker's own"


def test_a_user_with_many_jobs_took_the_floor_of_another() -> None:
    slots = Slots(256)
    honest = slots.progress("job\n1", base=0)
    hostile = [slots.progress(f"job {k}\n2", base=5000 * k) for k in range(1, 33)]
    for each in (honest, *hostile):
        each.visited(np.arange(each.low, each.low + 100), 0.0)
    floors, size = slots.policy.floors(), slots.arena.size
    assert floors[honest.group] == size // 4
    assert [floors[each.group] for each in hostile] == [size // 4 // 32] * 32


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("user", [1, 2])
def test_prepared_samples_displace_raw_ones_that_save_less(weighed: bool, user: int) -> None:
    """But not those of another user: a client said that preparing took 285 years."""
    slots = Slots(256)
    raw, prepared = slots.progress("raw\n1"), slots.progress(f"prepared\n{user}", base=5000)
    if weighed:
        group = slots.next_use.groups[prepared.group]
        group.saved_s, group.owner = (lambda miss_s: 4 * miss_s), prepared.owner
        weighed = user == 1
    slots.fill(np.arange(156))
    slots.fill(5000 + np.arange(100))
    for second in range(20):
        slots.next_use.turn_at = float(second)
        for each, base in ((raw, 0), (prepared, 5000)):
            each.visited(base + np.arange(50 * second, 50 * second + 50), float(second))
    for _ in range(40):
        assert len(slots.out(4, taker=prepared.group)) == 4
        slots.fill(5000 + np.arange(4), "admit_expendable")
    floor = slots.policy.floors()[raw.group]
    assert slots.policy.used[raw.group] == (floor if weighed else 156 * 4096)
    for _ in range(20):
        assert len(slots.out(4, taker=raw.group)) == 4
        slots.fill(np.arange(4), "admit_expendable")
    assert slots.policy.used[raw.group] == (floor if weighed else 156 * 4096)


def test_samples_that_are_read_only_to_be_prepared_have_no_floor() -> None:
    slots = Slots(256)
    raw, prepared = slots.progress("job"), slots.progress("job", base=5000)
    slots.fill(np.arange(100))
    slots.fill(5000 + np.arange(156))
    raw.visited(np.arange(100), 0.0)
    prepared.visited(5000 + np.arange(156), 0.0)
    size = slots.arena.size
    assert slots.policy.floors() == {raw.group: size // 4, prepared.group: size // 4}
    raw.feeds = 1
    assert slots.policy.floors() == {prepared.group: size // 2}


@pytest.mark.parametrize("known", [False, True])
def test_samples_that_workers_had_ahead_of_the_report_displaced_all_others(known: bool) -> None:
    slots = Slots(256)
    forwards = np.arange(1000)
    one, _ = slots.progress("one", [forwards]), slots.progress("two", [forwards[::-1]])
    slots.fill(np.concatenate((np.arange(100), np.arange(400, 556))))
    if known:
        one.passed(np.arange(100))
    first = sorted(slots.out(100))
    assert (first == list(range(100))) is known
    # A late report of the epoch before: these come at the end of this one.
    one.passed(np.arange(900, 1000))
    order = one.order
    assert order is not None and (order.parts(np.arange(900, 1000)) > 0).all()


def test_data_sets_that_share_a_shard_are_one_group() -> None:
    slots = Slots()
    next_use = slots.next_use
    one = next_use.join("a", np.array([0, 2000]), np.array([1000, 1000]))
    other = next_use.join("b", np.array([5000]), np.array([1000]))
    assert one.group != other.group
    slots.fill([1, 2])
    slots.fill([5001])
    both = next_use.join("c", np.array([2000, 5000]), np.array([1000, 1000]))
    assert one.group == other.group == both.group
    assert sorted(slots.out(3, taker=one.group)) == [1, 2, 5001]
    for progress in (one, other, both):
        next_use.leave(progress, None)
    for base in (0, 2000, 5000):
        next_use.drop(base)
    assert not next_use.groups and not slots.policy.used


# ---- over a virtual clock ------------------------------------------------------------------------


def ranks_of(samples: int, rank: int, world_size: int, seed: int) -> Callable[[int], Int64s]:
    """Visit one rank's part of every epoch, reshuffled."""
    every = shuffled(samples, seed)
    return lambda epoch: every(epoch)[rank::world_size]


def weighted(samples: int, seed: int) -> Callable[[int], Int64s]:
    """Draw with replacement, some samples eight times as often as others."""

    def order(epoch: int) -> Int64s:
        weights = np.exp2(np.arange(samples) * 3.0 / samples)
        chance = np.random.default_rng([seed, epoch])
        return chance.choice(samples, samples, p=weights / weights.sum())

    return order


def jobs_of(kind: str, samples: int, batch: int, announces: bool = True) -> list[SimulatedJob]:
    """The scenarios of the table."""

    def job(seed: int, **options: Any) -> SimulatedJob:
        return SimulatedJob(shuffled(samples, seed), batch=batch, announces=announces, **options)

    draws = SimulatedJob(weighted(samples, 5), batch=batch, announces=announces, replacement=True)
    rank = SimulatedJob(ranks_of(samples, 0, 4, 7), batch=batch, announces=announces)
    return {
        "one": lambda: [job(1)],
        "two": lambda: [job(1), job(2)],
        "two, 1:0.6": lambda: [job(1), job(2, pace=600.0)],
        "two, mid-epoch": lambda: [job(1), job(2, start_s=samples / 2000)],
        "four": lambda: [job(k) for k in range(4)],
        "four of a seed": lambda: [job(1) for _ in range(4)],
        "a quarter of the ranks": lambda: [rank],
        "scan + weighted": lambda: [job(1), draws],
    }[kind]()


def simulated(
    kind: str, samples: int, share: float, *, batch: int, announces: bool = True,
    epochs: tuple[int, int] = (3, 2), check: Any = None,
) -> tuple[SimulationResult, float]:  # fmt: skip
    """Run a scenario; return what came out, and Belady's hit rate."""
    jobs = jobs_of(kind, samples, batch, announces)
    longest = max(len(job.orders(0)) / job.pace for job in jobs)
    simulation = Simulation(samples, share, jobs, check=check)
    try:
        result = simulation.run(warm_s=epochs[0] * longest, seconds=epochs[1] * longest)
    finally:
        simulation.close()
    return result, belady(result.trace, result.slots, result.measured_from)


TABLE = {
    "one": (10, 25, 50, 75),
    "two": (32, 50, 73, 88),
    "two, 1:0.6": (31, 50, 69, 84),
    "two, mid-epoch": (32, 50, 73, 88),
    "four": (37, 57, 77, 91),
    "a quarter of the ranks": (28, 40, 60, 80),
}
"""Hit rates in per cent at a cache of 10, 25, 50, 75 per cent, announced: from the literature's
policies simulated on 60,000 equal samples."""
SILENT = {
    "one": (10, 25, 50, 75),
    "two": (17, 37, 64, 85),
    "two, 1:0.6": (20, 39, 64, 83),
    "two, mid-epoch": (23, 41, 65, 83),
    "four": (18, 38, 64, 85),
}
SHARES = (0.1, 0.25, 0.5, 0.75)
EPOCHS = {"a quarter of the ranks": (12, 12), "two, 1:0.6": (3, 3)}
"""Epochs of the slowest job before and while hits are counted, (3, 2) of all others: two jobs of
unequal pace meet again after three epochs of the slower and five of the faster."""


@pytest.mark.check
@pytest.mark.parametrize(
    ("kind", "share"),
    [
        ("one", 0.5),
        ("two", 0.25),
        ("two, 1:0.6", 0.5),
        ("two, mid-epoch", 0.25),
        ("four", 0.25),
        ("scan + weighted", 0.5),
    ],
)
def test_a_few_cells_beside_belady(kind: str, share: float) -> None:
    result, best = simulated(kind, 2048, share, batch=16)
    assert best - 0.015 <= result.hit_rate <= best + 0.001


@pytest.mark.check
@pytest.mark.parametrize("job_count", (1, 2))
def test_samples_of_64_kib_hit_three_points_less_than_the_bytes_of_the_arena_allow(
    job_count: int,
) -> None:
    """Fifteen slots in a slab of 1 MiB, and half a batch more prefetched than is used at once."""
    count, pace = 8192, 3000.0
    jobs = [SimulatedJob(shuffled(count, seed), pace=pace) for seed in range(job_count)]
    simulation = Simulation(count, 0.25, jobs, sample_size=64 << 10, alignment=512)
    try:
        result = simulation.run(warm_s=2 * count / pace, seconds=2 * count / pace)
    finally:
        simulation.close()
    assert result.slots == count // 4
    best = belady(result.trace, result.slots, result.measured_from)
    assert best - 0.015 < result.hit_rate < best + 0.001


@pytest.mark.check
def test_a_rank_whose_part_changes_gains_from_the_next_epochs_order() -> None:
    result, _ = simulated("a quarter of the ranks", 16_384, 0.25, batch=16, epochs=(8, 8))
    assert 0.39 <= result.hit_rate <= 0.41


def test_silent_jobs_get_what_the_fewest_have_seen() -> None:
    result, _ = simulated("two", 4096, 0.25, batch=16, announces=False)
    assert 0.36 <= result.hit_rate <= 0.38


@pytest.mark.check
def test_a_shared_seed_is_the_cheapest_win() -> None:
    result, _ = simulated("four of a seed", 4096, 0.1, batch=16)
    assert result.hit_rate >= 0.76


def test_the_misses_of_a_sole_job_are_spread_evenly() -> None:
    samples, hits = 4096, []
    jobs = [SimulatedJob(shuffled(samples, 1), batch=64)]
    simulation = Simulation(
        samples, 0.5, jobs, check=lambda _: hits.append(jobs[0].used - jobs[0].reads)
    )
    simulation.run(warm_s=0.0, seconds=5 * samples / jobs[0].pace)
    simulation.close()
    quarters = np.diff(np.array(hits)[-4 * 16 :: 16])
    assert quarters.min() > 0.4 * 1024 and quarters.max() < 0.6 * 1024


def test_a_short_delay_took_memory_from_a_sole_job_for_good() -> None:
    """While a job is delayed, more of what was prefetched is pinned at once."""
    samples, pace = 4096, 1000.0
    epoch_s = samples / pace

    def hit_rate(delayed: bool) -> float:
        def lead(simulation: Simulation) -> None:
            now = simulation.next_use.turn_at
            if delayed and 2 * epoch_s < now < 2.2 * epoch_s:
                simulation._progress[0].lead = 512.0

        simulation = Simulation(
            samples, 0.25, [SimulatedJob(shuffled(samples, 1), pace)], check=lead
        )
        result = simulation.run(warm_s=5 * epoch_s, seconds=2 * epoch_s)
        simulation.close()
        return result.hit_rate

    assert hit_rate(delayed=True) >= hit_rate(delayed=False) - 0.005


def test_slots_are_conserved_and_the_best_is_never_beaten_at_any_tick() -> None:
    """With every batch: each resident is known to the policy once, and no slot is lost."""

    def check(simulation: Simulation) -> None:
        policy, cache = simulation.cache.policy, simulation.cache
        resident = np.flatnonzero(cache.state == 2)
        assert (policy.buckets.key[resident] != NONE).all()
        assert sum(policy.used.values()) == simulation.arena.used_size == 4096 * len(resident)
        if simulation.next_use.turn_at % 1 < 0.05:
            held = np.concatenate(
                [
                    bucket._items[bucket._start : bucket._end]
                    for bucket_set in policy.buckets.of_class[CLASS].values()
                    for key, bucket in bucket_set.buckets.items()
                ]
            )
            assert set(resident.tolist()) <= set(held.tolist())

    result, best = simulated("two", 1024, 0.3, batch=16, check=check)
    assert result.hit_rate <= best + 0.001


@pytest.mark.check
def test_a_job_that_joins_leaves_or_slows_down_costs_little() -> None:
    samples = 4096
    jobs = [SimulatedJob(shuffled(samples, k), batch=16) for k in range(3)]
    simulation = Simulation(samples, 0.25, jobs)

    def disturb(now: Simulation) -> None:
        if now.next_use.turn_at > 14:
            jobs[0].pace = 250.0
        if now.next_use.turn_at > 16:
            jobs[1].pace = 1e-6

    jobs[2].start_s = 9.0
    simulation._check = disturb
    result = simulation.run(warm_s=40.0, seconds=16.0)
    simulation.close()
    best = belady(result.trace, result.slots, result.measured_from)
    assert best - 0.03 <= result.hit_rate <= best + 0.001


@pytest.mark.soak
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("kind", [*TABLE, "scan + weighted"])
def test_the_whole_table(kind: str, share: float) -> None:
    result, best = simulated(kind, 60_000, share, batch=64, epochs=EPOCHS.get(kind, (3, 2)))
    wanted = 100 * best
    if kind in TABLE:
        wanted = TABLE[kind][SHARES.index(share)]
    more = 0.5 + 1 if kind in TABLE else 1  # the table is rounded
    assert wanted - more <= 100 * result.hit_rate
    assert result.hit_rate <= best + 0.001


@pytest.mark.soak
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("kind", SILENT)
def test_the_whole_table_of_silent_jobs(kind: str, share: float) -> None:
    epochs = EPOCHS.get(kind, (3, 2))
    result, _ = simulated(kind, 60_000, share, batch=64, announces=False, epochs=epochs)
    assert SILENT[kind][SHARES.index(share)] - 1.5 <= 100 * result.hit_rate


@pytest.mark.check
@pytest.mark.parametrize("cost_s", [0.002, 1e-7])
def test_memory_goes_to_prepared_samples_if_preparing_is_what_takes_time(cost_s: float) -> None:
    samples = 1000
    jobs = [SimulatedJob(shuffled(samples, seed), pace=5000) for seed in range(4)]
    simulation = Simulation(
        samples,
        0.5,
        jobs,
        sample_size=30 << 10,
        disk_rate=4000.0,
        prepared_size=150 << 10,
        prepare_s=cost_s,
    )
    try:
        result = simulation.run(warm_s=3 * samples * 0.0022, seconds=2 * samples * 0.0022)
        used = simulation.cache.policy.used
        raw, prepared = (used.get(simulation.next_use.group_of(n), 0) for n in (0, samples))
    finally:
        simulation.close()
    if cost_s > 0.001:
        assert result.shared_rate > 0.4 and prepared > 2 * raw
        assert result.used > 2 * 4 * samples, "faster than preparing alone"
    else:
        assert raw > 0.9 * samples * (30 << 10), "reading is what takes time"
