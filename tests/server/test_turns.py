"""Turns: which connection the loop works for, and when."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from ffserve.server.sessions.turns import Turns
from ffserve.server.users.shares import User


@dataclass
class Waiting:
    """A connection with some work left, which it does one piece at a time."""

    user: User
    name: str
    done: list[str]
    pieces: int = 1

    def work(self, until: float) -> bool:
        self.done.append(self.name)
        self.pieces -= 1
        return self.pieces > 0


def test_a_message_that_comes_alone_waited_for_another_turn_of_the_loop() -> None:
    """What comes with it is chosen from: an attacker's messages may be the first that are
    reported."""
    done: list[str] = []

    async def go() -> None:
        many = Turns(asyncio.get_running_loop(), lambda: None, calm_s=0.5)
        many.add(Waiting(User(1), "alone", done), at_once=True)
        assert done == ["alone"]
        hostile = User(1)
        for name in "ab":
            many.add(Waiting(hostile, name, done, pieces=2), at_once=True)
        assert done == ["alone"]
        while len(done) < 5:
            await asyncio.sleep(0)
        assert sorted(done[1:]) == ["a", "a", "b", "b"]

    asyncio.run(go())


def test_a_user_who_asked_for_little_waited_for_the_turns_of_one_who_asked_for_much() -> None:
    """A turn of the loop that has other things to do as well comes late."""
    done: list[str] = []

    async def go() -> None:
        # One piece in a turn.
        loop = asyncio.get_running_loop()
        many = Turns(loop, lambda: None, turn_s=1e-9, calm_s=60.0)
        hostile, honest = User(1), User(2)
        for name in "abcd":
            many.add(Waiting(hostile, name, done, pieces=100), at_once=True)
        for _ in range(3):
            await asyncio.sleep(0)
        before = len(done)
        many.add(Waiting(honest, "honest", done), at_once=True)
        assert done[before:] == ["honest"]
        # What it has had counts: until the other has had as much, it waits.
        many.add(Waiting(honest, "again", done), at_once=True)
        assert done[before:] == ["honest"]
        # The other one is never served at once.
        many.add(Waiting(hostile, "e", done), at_once=True)
        assert done[before:] == ["honest"]
        while "again" not in done:
            await asyncio.sleep(0)

    asyncio.run(go())


def test_work_that_was_not_asked_for_by_a_message_begins_in_the_next_turn() -> None:
    """It is added in the middle of something else."""
    done: list[str] = []

    async def go() -> None:
        many = Turns(asyncio.get_running_loop(), lambda: None)
        many.add(Waiting(User(1), "later", done))
        assert not done
        await asyncio.sleep(0)
        assert done == ["later"]

    asyncio.run(go())
