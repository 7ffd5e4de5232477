"""Failures: answers to requests with failed samples. Their failures are explained beside the loop
(`files/explaining.py`), so these answers come later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ffserve import protocol
from ffserve.errors import Failure
from ffserve.limits import MOST_ERRORS
from ffserve.server.files.explaining import FailedSample
from ffserve.server.reading.requests import SampleRequest
from ffserve.server.sessions.context import READY, SessionContext
from ffserve.server.sessions.datasets import FEW, STEP_COUNT, OpenDataset, Steps


class FailedRequests:
    """See the module's text.

    Args: answer: sends READY with these errors, at this time.
    """

    def __init__(
        self, context: SessionContext, answer: Callable[[SampleRequest, list[Any], float], None]
    ) -> None:
        self._context = context
        self._answer = answer
        self.explaining = 0
        """Answers that wait until it is known why samples failed."""

    def explain(self, request: SampleRequest) -> Steps:
        """Find out why samples failed, and answer."""
        failed: list[FailedSample] = []
        yield from self._list_failed(request, failed)

        def explained() -> None:
            self.explaining -= 1
            if self._context.phase == READY:
                self._context.later(self._answer_failures(request, failed))

        self.explaining += 1
        self._context.state.files.explainer.explain(self._context.user, failed, explained)

    def _answer_failures(self, request: SampleRequest, failed: list[FailedSample]) -> Steps:
        errors: list[Any] = []
        now = yield None
        for each in failed:
            error = each.explained()
            if each.shard is not None:
                self._context.state.faults.failed(
                    each.shard, each.number, error, now, self._context.peer.uid
                )
            errors.append([each.position, *protocol.error_to_wire(error)])
            if len(errors) % FEW == 0:
                now = yield None
        assert self._context.job is not None
        self._context.job.errors += len(errors)
        if self._context.phase == READY:
            self._answer(request, errors, now)

    def _list_failed(self, request: SampleRequest, failed: list[FailedSample]) -> Steps:
        """List the failed samples of an answer."""
        failures = request.failures
        for first in range(0, request.count, STEP_COUNT):
            part = request.numbers[first : min(first + STEP_COUNT, request.count)]
            for position, number in enumerate(part.tolist(), first):
                failure = failures.get(number)
                if failure is None:
                    continue
                if len(failed) == MOST_ERRORS:
                    request.count = position
                    return
                failed.append(self._failed(request, failure, position, number))
                if len(failed) % FEW == 0:
                    yield None
            yield None

    def _failed(
        self, request: SampleRequest, failure: Failure, position: int, number: int
    ) -> FailedSample:
        dataset: OpenDataset = request.dataset
        state, index = self._context.state, int(request.indices[position])
        shard = int(dataset.layout.shards(request.indices[position : position + 1])[0])
        one = request.numbers[position : position + 1]
        path = dataset.paths[shard]
        offset, length = (
            int(state.memory.directory.offsets[number]),
            int(state.memory.directory.lengths(one)[0]),
        )
        error = failure.named(path, index, offset, length, arena_size=state.memory.cache.arena.size)
        opened = dataset.shards[shard] if dataset.preparation is None else None
        return FailedSample(position, number, opened, error, (offset, length, failure.expected))
