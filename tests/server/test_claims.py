"""Claims: one holder per sample, nobody waits for nothing, everything ends."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ffserve.cache.tables import Directory
from ffserve.protocol import ELSEWHERE, READABLE, UNSHARED, YOURS
from ffserve.server.files.preparations import Preparation, Preparations
from ffserve.server.prepared.claims import CLAIM_S, Claims, WaitingClaim

COUNT = 12
TABLES = ["_claims", "_awaited", "_held", "_waiting", "_amounts"]


class World:
    """A directory whose samples become readable, and claims over it."""

    def __init__(self, **limits: int) -> None:
        self.directory = Directory(1 << 22)
        self.claims = Claims(self.directory, **limits)
        self.answers: list[tuple[object, list[int], list[int]]] = []
        self.shared = True
        self.now = 0.0

    def wait(self, holder: object, numbers: list[int]) -> None:
        packed = np.array(numbers, np.int64)

        def answer(states: np.ndarray) -> None:
            self.answers.append((holder, numbers, states.tolist()))

        self.claims.wait(
            WaitingClaim(holder, packed, lambda: self.shared, answer, self.settle), self.now
        )

    def settle(self, waiting: WaitingClaim) -> None:
        self.claims.settle(waiting, self.now)

    def leave(self, holder: object) -> None:
        for _ in self.claims.leave(holder):
            pass

    def claim(self, holder: object, *numbers: int) -> list[int]:
        states: list[int] = self.claims.claim(
            holder, np.array(numbers, np.int64), self.now
        ).tolist()
        return states

    def hand_over(self, holder: object, *numbers: int) -> list[bool]:
        taken: list[bool] = self.claims.hand_over(holder, np.array(numbers, np.int64)).tolist()
        return taken

    def publish(self, holder: object, number: int) -> None:
        self.directory.entries["seq"][number] |= 1
        self.claims.end(holder, [number])

    def evict(self, number: int) -> None:
        self.directory.entries["seq"][number] = 0


def test_one_holder_per_sample() -> None:
    world = World()
    assert world.claim("a", 1, 2, 2) == [YOURS, YOURS, YOURS]
    assert world.claim("b", 1, 3) == [ELSEWHERE, YOURS]
    assert world.hand_over("b", 1) == [False] and world.hand_over("a", 1, 1) == [True, False]
    assert world.claim("a", 1) == [ELSEWHERE], "it is being copied"
    world.publish("a", 1)
    assert world.claim("b", 1, 2) == [READABLE, ELSEWHERE]
    world.evict(1)
    assert world.claim("b", 1) == [YOURS]


def test_what_was_handed_over_outlives_its_holder() -> None:
    world = World()
    world.claim("a", 1, 2)
    world.hand_over("a", 1)
    world.leave("a")
    assert world.claim("b", 1, 2) == [ELSEWHERE, YOURS]
    world.wait("c", [1])
    world.publish("a", 1)
    assert world.answers == [("c", [1], [READABLE])]


def test_old_claims_end_when_others_wait() -> None:
    world = World()
    world.claim("a", 1, 2, 3)
    world.hand_over("a", 3)
    world.wait("b", [1, 4])
    world.wait("c", [3])
    world.claims.expire(CLAIM_S - 1)
    assert not world.answers
    world.now = CLAIM_S + 1
    world.claims.expire(world.now)
    assert world.answers == [("b", [1, 4], [YOURS, YOURS])]
    assert world.claim("c", 2) == [ELSEWHERE], "nobody waited for it"
    assert world.hand_over("a", 1, 2) == [False, True]


def test_all_old_claims_that_one_waits_for_end_together() -> None:
    world = World()
    world.claim("a", 1, 2, 3)
    world.wait("b", [1, 2, 3])
    world.now = CLAIM_S + 1
    world.claims.expire(world.now)
    assert world.answers == [("b", [1, 2, 3], [YOURS] * 3)]


def test_two_who_wait_waited_for_one_another() -> None:
    world = World()
    world.claim("a", 1)
    world.claim("b", 2)
    world.wait("c", [1, 3])
    world.wait("d", [3, 2])
    assert world.claim("e", 3) == [YOURS], "nobody claims while it waits"
    world.publish("a", 1)
    world.publish("b", 2)
    assert not world.answers
    world.publish("e", 3)
    assert world.answers == [("c", [1, 3], [READABLE] * 2), ("d", [3, 2], [READABLE] * 2)]


def test_nothing_is_shared_of_what_is_not_trusted() -> None:
    world = World()
    world.claim("a", 1)
    world.wait("b", [1])
    world.shared = False
    world.claims.end("a", [1])
    assert world.answers == [("b", [1], [UNSHARED])]


@pytest.mark.parametrize("seed", range(20))
def test_everybody_who_waits_is_answered(seed: int) -> None:
    chance, world = random.Random(seed), World()
    holders, mine = "abcd", {holder: set[int]() for holder in "abcd"}
    waiting = dict.fromkeys(holders, 0)

    def took() -> None:
        for holder, numbers, states in world.answers:
            waiting[str(holder)] -= 1
            for number, state in zip(numbers, states, strict=True):
                assert state != ELSEWHERE
                if state == YOURS:
                    mine[str(holder)].add(number)
        world.answers.clear()
        held = [number for numbers in mine.values() for number in numbers]
        assert len(held) == len(set(held)), "a sample has one holder"
        for holder in holders:
            others = [c for c in world.claims._claims.values() if c.holder != holder]
            assert others or not waiting[holder], "nobody waits for nothing"
            assert not (waiting[holder] and world.claims._held.get(holder)), "and holds claims"

    for _ in range(300):
        holder = chance.choice(holders)
        some = [chance.randrange(COUNT) for _ in range(chance.randrange(1, 5))]
        what = chance.random()
        if what < 0.3 and not waiting[holder]:
            states = world.claim(holder, *some)
            mine[holder].update(n for n, s in zip(some, states, strict=True) if s == YOURS)
        elif what < 0.5 and not mine[holder] and not waiting[holder]:
            waiting[holder] += 1
            world.wait(holder, some)
        elif what < 0.8:
            for number in sorted(mine[holder]):
                assert world.hand_over(holder, number) == [True]
                mine[holder].discard(number)
                if chance.random() < 0.8:
                    world.publish(holder, number)
                else:
                    world.claims.end(holder, [number])
        elif what < 0.85:
            handed = sorted(mine[holder])[:1]
            world.hand_over(holder, *handed)
            mine[holder].clear()
            world.leave(holder)
            waiting[holder] = 0
            world.answers = [each for each in world.answers if each[0] != holder]
            for number in handed:
                assert all(number not in numbers for numbers in mine.values())
                world.publish(holder, number)
        else:
            for number in some:
                if not any(number in numbers for numbers in mine.values()):
                    world.evict(number)
        took()
    for holder in holders:
        mine[holder].clear()
        world.leave(holder)
    assert not any(vars(world.claims)[name] for name in TABLES)


def test_what_is_not_deterministic_is_remembered() -> None:
    known, owner = Preparations(), (1, 2)
    one = known.obtain(owner, b"k", "n")
    assert known.obtain(owner, b"k", "other") is one and one.trusted
    assert known.obtain(owner, b"l", "n") is not one
    assert known.obtain((2, 2), b"k", "n") is not one
    known.distrust(one)
    del one
    assert not known.obtain(owner, b"k", "n").trusted
    assert known.obtain(owner, b"l", "n").trusted


def test_samples_that_cost_nothing_ended_the_daemon() -> None:
    """Times are divided by what a byte saves; a client says that preparing took no time."""
    preparation = Preparation((0, 0), b"k" * 32, "p", count=3, size=30, raw_size=0.0)
    assert 0 < preparation.saved_per_byte_s(1e-9) < 1e-9


def test_a_user_has_claimed_as_much_as_there_is_memory() -> None:
    world = World(most_user_claimed=100)
    assert world.claim("a", *range(200)) == [YOURS] * 100 + [UNSHARED] * 100
    assert world.claim("b", 0, 150) == [ELSEWHERE, YOURS], "another user"
    for number in range(50):
        world.publish("a", number)
    assert world.claim("a", *range(100, 200)) == [YOURS] * 50 + [ELSEWHERE] + [UNSHARED] * 49


def test_a_user_who_waits_for_too_much_prepares_for_itself() -> None:
    world = World(most_user_claimed=2 * 64 + 3)
    world.claim("a", 1, 2)
    for _ in range(3):
        world.wait("b", [1, 2, 5])
    assert world.answers == [("b", [1, 2, 5], [UNSHARED, UNSHARED, YOURS])]
    world.leave("a")
    assert world.answers[1:] == [("b", [1, 2, 5], [YOURS] * 3)] * 2
    world.leave("b")
    assert not any(vars(world.claims)[name] for name in TABLES)


def test_the_end_of_a_claim_settled_everything_that_waited_at_once() -> None:
    """A message that ended a thousand claims, for which hundreds waited, took a second."""
    world, woken, answers = World(), list[WaitingClaim](), list[np.ndarray]()
    numbers = np.arange(COUNT, dtype=np.int64)
    world.claim("a", *range(COUNT))
    for _ in range(50):
        one = WaitingClaim("b", numbers, lambda: True, answers.append, woken.append)
        world.claims.wait(one, 0.0)
    world.claims.end("a", list(range(COUNT)))
    assert len(woken) == len(set(woken)) == 50 and not answers
    world.claims.settle(woken[0], 0.0)
    assert [states.tolist() for states in answers] == [[YOURS] * COUNT]
