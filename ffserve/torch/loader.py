"""torch's DataLoader with one dataset call per batch, whole errors and a position to resume from.

``DataLoader`` is a torch DataLoader and takes its arguments. Each iteration runs over an inner,
plain torch DataLoader whose sampler (``BatchPlan``) yields requests and whose dataset
(``BatchDataset``) answers a request with finished batches:

- A request has the indices of its batches, so the dataset is called once per batch.
- Each batch comes back with the position behind it. So the loader knows what the training loop was
  given, however far the workers are ahead.
- Where batches are small a request is for several of them, since a message costs more than copying
  a small batch; the message lies in shared memory (transfer.py).
- The answer may be a ``Failure`` in place of a batch, which is raised in the training process.

The public interface of torch is enough for all of this. Two private names of torch are used beside
it, both in transfer.py, which says for what; without them the loader works, but more slowly.
"""

from __future__ import annotations

import multiprocessing.connection
import operator
import os
import pickle
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from itertools import islice
from typing import Any, NamedTuple

import torch.utils.data
from torch.utils.data import BatchSampler

from ffserve import FileReader
from ffserve.client.public import lead_job
from ffserve.dtypes import Int64s
from ffserve.errors import UsageError
from ffserve.torch.announce import (
    SETTLE_TIMEOUT_S,
    AnnouncedIteration,
    Announcement,
    Announcer,
)
from ffserve.torch.dataset import Dataset, fetch_batch, has_batch_method, is_raw, readers_below
from ffserve.torch.messages.segments import Receiver, WorkerChannels, memory_limit
from ffserve.torch.messages.transfer import BatchFailure, MessageWriter, RawBatches, keep_queues
from ffserve.torch.samplers import (
    EpochSampler,
    SamplerOrder,
    array_of,
    integers_of,
    order_of,
    order_of_batches,
)
from ffserve.torch.thread_workers import ThreadedRequests

MESSAGE_SIZE = 8 << 20
"""Small batches share a message up to this many bytes of samples."""
MESSAGE_BATCHES = 32
"""A message has at most this many batches."""
MIN_MESSAGES = 4
"""Every worker makes at least this many messages per epoch; otherwise some workers would have
nothing to do."""

_REFUSES_ONE_INDEX = (TypeError, AssertionError, AttributeError, UsageError)
_POSITION = ("batches", "epoch", "generator")
"""Two states of one loader may differ in these entries."""


class StepError(UsageError, AssertionError):
    """A step that a loader cannot begin at."""


class DataLoader(torch.utils.data.DataLoader[Any]):
    """Load batches like torch's DataLoader, with one dataset call per batch.

    ``collate_fn`` gets the list of samples that the dataset returned; ``collate_fn=list`` leaves
    it as it is. A dataset is asked for a whole batch if it is an ``ffserve.torch.Dataset``, if it
    has torch's ``__getitems__`` or is torch's ``ConcatDataset`` of such datasets, or if it refuses
    a single index and accepts a list; any other is asked sample by sample, as torch does. With
    ``batch_size=None`` an ``ffserve.torch.Dataset`` is asked for a list of one and ``collate_fn``
    gets that list, as in ffrecord. An IterableDataset goes through torch unchanged.

    Errors of ffserve reach the loop as they were raised in the worker, with class, text,
    path, index and offset.

    Args:
        skippable: False makes ``set_step`` an error.
        by_list: True if the dataset is indexed by a list only, False if by single indices only;
            None finds out.
        bundle: how many consecutive batches a worker makes for one message. None: one, and more if
            a batch of an ``ffserve.torch.Dataset`` is small. The more, the cheaper small batches
            cross, and the longer the first one takes.
        threads: how many threads of this process make batches ahead of the loop, two each,
            instead of worker processes; 0: none. ``process`` and ``collate_fn`` run in all of them.
        others: torch's, in ffrecord's order, so ``multiprocessing_context`` is keyword-only; None
            for it means the system's start method, and any one works.
    Raises: UsageError for a dataset that cannot be asked in the way that ``by_list`` says;
        whatever torch's DataLoader raises.
    Cost:   one dataset call per batch; one small tuple per batch more than torch's loader.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        generator: torch.Generator | None = None,
        *,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        skippable: bool = True,
        by_list: bool | None = None,
        bundle: int | None = None,
        threads: int = 0,
    ) -> None:
        if threads < 0 or (threads and num_workers):
            raise UsageError(
                f"invalid threads={threads} with num_workers={num_workers}",
                hint="give a number of threads from 0; if there are any, leave num_workers at 0",
            )
        super().__init__(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            drop_last=drop_last,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            generator=generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            **_newer_options(pin_memory_device, in_order),
        )
        self.in_order = in_order
        self.skippable = skippable
        self.by_list = by_list
        order = self.sampler if self.batch_sampler is None else self.batch_sampler
        order = order.sampler if type(order) is BatchSampler else order
        self._plan = BatchPlan(
            self.batch_sampler,
            self.sampler,
            Announcer(dataset),
            shares_generator=generator is not None
            and getattr(order, "generator", None) is generator
            and not (persistent_workers and num_workers > 0),
            in_order=in_order or num_workers == 0,
        )
        if bundle is not None and (bundle := operator.index(bundle)) < 1:
            raise UsageError(f"bundle is {bundle}, but a message has at least one batch")
        self.bundle = bundle
        self.threads = threads
        self._inner: torch.utils.data.DataLoader[Any] | None = None
        self._receiver: Receiver | None = None

    def __len__(self) -> int:
        """Return the number of batches of an iteration, without those that set_step skips.

        The length does not shrink for the rest of an epoch that ``load_state_dict`` restored.
        """
        return super().__len__() - self._plan.step

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if isinstance(self.dataset, torch.utils.data.IterableDataset):
            return super().__iter__()
        iteration = self._plan.begin()
        if torch.utils.data.get_worker_info() is None:
            lead_job()
        fresh = self._inner is None or not (self.persistent_workers and self.num_workers > 0)
        if fresh or self._inner is None:
            self._inner, self._receiver = self._build_inner()
        messages = self._start(self._inner)
        if self._receiver is not None:
            self._receiver.started()
            if fresh:
                keep_queues(messages)
        return _BatchIterator(messages, self._receiver, self._plan, iteration)

    def _start(self, inner: torch.utils.data.DataLoader[Any]) -> Iterator[Any]:
        """Start torch's iterator and its workers."""
        try:
            return iter(inner)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            if "pickle" not in str(error):
                raise
            raise UsageError(
                f"the workers cannot be started: something they need cannot be pickled: {error}",
                hint="spawn and forkserver pickle the dataset and all functions: define collate_fn "
                "and worker_init_fn at the top level of a module, not as a lambda or in a function",
            ) from error

    def set_step(self, step: int) -> None:
        """Leave out the first batches of every iteration, until ``set_step(0)``.

        Args:   step: 0 <= step < the number of batches of a whole epoch. Their samples are not
            read; the order remains that of a whole epoch.
        Raises: StepError (also an AssertionError) if it is outside, if the loader was made with
            ``skippable=False``, or for an IterableDataset.
        """
        if not self.skippable:
            raise StepError("this loader was made with skippable=False")
        if isinstance(self.dataset, torch.utils.data.IterableDataset):
            raise StepError("an IterableDataset cannot skip batches unread")
        step = operator.index(step)
        count = super().__len__()
        if step != 0 and not 0 <= step < count:
            raise StepError(f"step {step} is outside an epoch of {count} batches")
        self._plan.step = step

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch: the batches that the training loop has got.

        Batches that workers have prefetched do not count, nor does a batch whose error was raised
        last.

        Returns: a dict for ``load_state_dict``; of plain numbers with an EpochSampler.
        Raises:  UsageError where the position does not say exactly what was used: an order that
            cannot be computed again, ``in_order=False``, an IterableDataset.
        """
        self._check_exact()
        return self._plan.state_dict(self._shape())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was called: the next iteration hands out the rest.

        The number of workers may differ. With an EpochSampler the batch size may differ too. Later
        iterations are whole again.

        Args:   state: of a loader over the same samples in the same order.
        Raises: UsageError for the state of another kind of loader; the message names the
            difference.
        """
        self._check_exact()
        self._plan.load_state_dict(state, self._shape())

    def _check_exact(self) -> None:
        if isinstance(self.dataset, torch.utils.data.IterableDataset):
            raise UsageError("an IterableDataset has no position that can be restored")
        if self.num_workers > 0 and not self.in_order:
            raise UsageError(
                "with in_order=False the batches of the loop are not the order's first"
            )

    def _shape(self) -> dict[str, Any]:
        return {"batch_count": super().__len__(), "batch_size": self.batch_size}

    def _build_inner(self) -> tuple[torch.utils.data.DataLoader[Any], Receiver | None]:
        workers: dict[str, Any] = {}
        receiver = channels = None
        self._plan.message_batches = 1
        if self.num_workers > 0:
            self._plan.message_batches = self.bundle or _batches_per_message(
                self.dataset, self.batch_sampler, self.num_workers
            )
            receiver = Receiver(self.num_workers, memory_limit() // self.num_workers)
            channels = receiver.channels((self.prefetch_factor or 2) + 3)
            workers = {
                "prefetch_factor": self.prefetch_factor,
                "persistent_workers": self.persistent_workers,
                "multiprocessing_context": self.multiprocessing_context,
                "worker_init_fn": WorkerStart(self.worker_init_fn),
            }
        answering = BatchDataset(
            self.dataset, self.collate_fn, self.batch_sampler is not None, self.by_list, channels
        )
        requests: Any = self._plan
        if self.threads:
            requests = ThreadedRequests(requests, answering.__getitem__, self.threads)
        inner: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
            answering,
            batch_size=None,
            sampler=requests,
            num_workers=self.num_workers,
            collate_fn=_unchanged,
            pin_memory=self.pin_memory,
            timeout=self.timeout * self._plan.message_batches,
            generator=self.generator,
            **workers,
            **_newer_options(self.pin_memory_device, self.in_order),
        )
        return inner, receiver


class WorkerStart:
    """The start of a worker: it begins to watch the training process, then calls the user's
    ``worker_init_fn``.

    torch's workers look whether their parent has changed. Under forkserver that is the server,
    which lives as long as they do: the workers of a killed job would stay for good. Python gives
    each process a descriptor that ends with the process that started it, whatever the method.
    """

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self._worker_init_fn = worker_init_fn

    def __call__(self, worker: int) -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            threading.Thread(
                target=_end_with, args=(parent.sentinel,), name="ffserve-parent", daemon=True
            ).start()
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker)


def _end_with(sentinel: int) -> None:
    """End this process when the other one is gone."""
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


class BatchRequest(NamedTuple):
    """Consecutive batches that are made together and cross in one message.

    batches, samples: how many of the epoch come before.
    items: the indices of all batches, int64[n]; or for each batch the number of samples of the
        epoch up to its end, and what the sampler handed out.
    batch_size: of the indices; 0 for a list of items.
    """

    batches: int
    samples: int
    items: Any
    batch_size: int = 0

    @property
    def batch_count(self) -> int:
        """Number of batches."""
        return -(-len(self.items) // max(1, self.batch_size))

    def each(self) -> Iterator[tuple[int, int, Any]]:
        """Yield for each batch the position behind it, in batches and samples, and its indices."""
        if not self.batch_size:
            for batches, (samples, item) in enumerate(self.items, self.batches + 1):
                yield batches, samples, item
            return
        starts = range(0, len(self.items), self.batch_size)
        for batches, start in enumerate(starts, self.batches + 1):
            indices = self.items[start : start + self.batch_size].tolist()
            yield batches, self.samples + start + len(indices), indices


class BatchDataset(torch.utils.data.Dataset[Any]):
    """A dataset of messages: ``[request]`` reads, processes and collates batches.

    In a worker this is what torch's ``get_worker_info().dataset`` returns. Everything but requests
    goes to the user's dataset, attributes that are read and set included, so that a
    ``worker_init_fn`` finds what it expects.
    """

    _OWN = frozenset(("_dataset", "_collate", "_batched", "_by_list", "_channels", "_writer"))

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Any], Any],
        batched: bool,
        by_list: bool | None,
        channels: WorkerChannels | None,
    ) -> None:
        if by_list is None and (
            isinstance(dataset, Dataset) or (batched and has_batch_method(dataset))
        ):
            by_list = True
        self._dataset = dataset
        self._collate = collate
        self._batched = batched
        self._by_list = by_list
        self._channels = channels
        self._writer: MessageWriter | None = None

    def __getitem__(self, request: Any) -> Any:
        if isinstance(request, Future):  # a thread makes it
            return request.result()
        if not isinstance(request, BatchRequest):
            return self._dataset[request]
        worker = torch.utils.data.get_worker_info()
        if worker is None:
            return [
                (batches, samples, self._batch(wanted))
                for batches, samples, wanted in request.each()
            ]
        if self._writer is None and self._channels is not None:
            self._writer = MessageWriter(self._channels.sender(worker.id))
        if self._writer is None:
            return self._answers(request, worker.id, lambda: None)
        if request.batch_size and self._collate is list and is_raw(self._dataset):
            batches, samples, indices, batch_size = request
            reader = self._dataset.reader
            message = self._writer.raw(reader, indices, batches, samples, batch_size)
            if message is not None:
                return message
        with self._writer.message(request.batch_count):
            answers = self._answers(request, worker.id, self._writer.batch_made)
        return self._writer.finish(answers)

    def _answers(
        self, request: BatchRequest, worker: int, batch_made: Callable[[], None]
    ) -> list[Any]:
        """Make the batches of a request; one that fails is answered by its error."""
        answers: list[Any] = []
        for batches, samples, wanted in request.each():
            try:
                answers.append((batches, samples, self._batch(wanted)))
            except Exception as error:
                answers.append(BatchFailure(error, worker))
            batch_made()
        return answers

    def _batch(self, wanted: Any) -> Any:
        return self._collate(self._samples(wanted))

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in self._OWN:
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._dataset, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def _samples(self, wanted: Any) -> Any:
        if not self._batched:
            if not self._by_list:
                return self._dataset[wanted]
            wanted = wanted if isinstance(wanted, (list, tuple)) else [wanted]
        indices = wanted if isinstance(wanted, list) else list(wanted)
        if self._by_list:
            return fetch_batch(self._dataset, indices)
        if self._by_list is None and indices:
            return self._find_out(indices)
        return [self._dataset[index] for index in indices]

    def _find_out(self, indices: list[Any]) -> Any:
        """Fetch the first batch of a dataset that may be indexed by a list, or by one index.

        A single index is tried first, since many datasets for single indices also accept a list
        and return something else for it (a TensorDataset returns columns, not samples).
        """
        try:
            first = self._dataset[indices[0]]
        except _REFUSES_ONE_INDEX as refusal:
            try:
                samples = self._dataset[indices]
                matches = len(samples) == len(indices)
            except _REFUSES_ONE_INDEX as second_refusal:
                raise refusal from second_refusal
            if not matches:
                raise
            self._by_list = True
            return samples
        self._by_list = False
        return [first, *(self._dataset[index] for index in indices[1:])]


class _BatchIterator(Iterator[Any]):
    """One iteration: takes messages from torch's iterator, hands out batch by batch."""

    def __init__(
        self,
        messages: Iterator[Any],
        receiver: Receiver | None,
        plan: BatchPlan,
        iteration: Iteration,
    ) -> None:
        self._messages = messages
        self._receiver = receiver  # kept alive
        self._plan = plan
        self._iteration = iteration
        self._answers: deque[Any] | RawBatches = deque()

    def __next__(self) -> Any:
        if not self._answers:
            try:
                message = next(self._messages)
            except StopIteration:
                self._plan.exhausted(self._iteration)
                raise
            except Exception as error:
                if self._receiver is not None:
                    # An error of the worker itself: a frame of torch's has a name for it, and the
                    # circle would keep the iterator and its workers; see BatchFailure.reraise.
                    traceback.clear_frames(error.__traceback__)
                raise
            self._answers = message if isinstance(message, RawBatches) else deque(message)
            del message
        answer: Any = self._answers.popleft()
        if isinstance(answer, BatchFailure):
            answer.reraise()
        batches, samples, batch = answer
        self._plan.handed_out(self._iteration, batches, samples)
        return batch


class Iteration:
    """One iteration of a loader. Its iterator holds it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.batches = 0
        self.announced: AnnouncedIteration | None = None


class BatchPlan(torch.utils.data.Sampler[BatchRequest]):
    """The requests of an iteration, and the position of the training loop in the epoch.

    The position counts from the epoch's start: ``batches``, and with an EpochSampler the
    sampler's own count of samples. Iterations are numbered, so that an iterator left over from an
    earlier one cannot change the position.

    Args:
        batch_sampler, sampler: the loader's; batch_sampler None: it makes no batches.
        announcer: gets the order of each iteration that is known beforehand.
        shares_generator: whether torch draws its workers' seed from this sampler's generator at the
            beginning of each iteration.
        in_order: whether batches are handed out in the order of the requests.
    """

    def __init__(
        self,
        batch_sampler: Iterable[Any] | None,
        sampler: Iterable[Any],
        announcer: Announcer,
        *,
        shares_generator: bool = False,
        in_order: bool = True,
    ) -> None:
        self.step = 0
        self.message_batches = 1
        """Batches per request."""
        self._announcer = announcer
        self._shares_generator = shares_generator
        self._in_order = in_order
        self._batched = batch_sampler is not None
        self._source: Iterable[Any] = sampler if batch_sampler is None else batch_sampler
        # Batches of torch's own BatchSampler are consecutive parts of the order; nothing is known
        # about other batch samplers.
        self._slicing = batch_sampler if type(batch_sampler) is BatchSampler else None
        self._sampler: Any = sampler if batch_sampler is None else None
        if self._slicing is not None:
            self._sampler = self._slicing.sampler
        self._order: SamplerOrder | None = (
            order_of(sampler) if batch_sampler is None else order_of_batches(batch_sampler)
        )
        self._epoch_sampler = self._sampler if isinstance(self._sampler, EpochSampler) else None
        self._batches = 0
        self._resume: int | None = None
        self._number = 0
        self._newest: weakref.ref[Iteration] | None = None
        self._resumed = False
        self._finished = False
        self._sampler_iteration = 0
        self._skipped_batches = 0
        self._start_sample = 0
        self._sampler_epoch: int | None = None
        self._epoch = -1

    def begin(self) -> Iteration:
        """Begin an iteration at the position that was restored, else at ``step``; return it."""
        # A thread that is still announcing would be forked along with the workers.
        self._announcer.settle(SETTLE_TIMEOUT_S)
        self._number += 1
        self._start_sample = 0
        self._resumed = self._resume is not None
        if self._epoch_sampler is not None:
            self._resumed = self._epoch_sampler.restored
            self._sampler_iteration = self._epoch_sampler.follow()
            self._start_sample = self._epoch_sampler.position
        if self._resumed:
            self._skipped_batches = self._resume or 0
        else:
            self._skipped_batches = self.step
            if self._order is not None:
                self._order.begin()
        self._resume = None
        self._batches = self._skipped_batches
        iteration = Iteration(self._number)
        self._newest = weakref.ref(iteration)
        return iteration

    def handed_out(self, iteration: Iteration, batches: int, samples: int) -> None:
        """Record that the training loop has everything up to here."""
        iteration.batches += 1
        if iteration.number != self._number:
            return
        self._batches = batches
        if self._epoch_sampler is not None:
            self._epoch_sampler.handed_out(self._sampler_iteration, samples)
        if iteration.announced is not None:
            if not self._in_order and self._slicing is not None:
                # Only the number of these samples is known.
                samples = (self._skipped_batches + iteration.batches) * self._slicing.batch_size
                samples += self._start_sample
            self._announcer.reached(iteration.announced, samples)

    def exhausted(self, iteration: Iteration) -> None:
        """Note that the training loop has asked for more than there is."""
        if iteration.number == self._number:
            self._finished = True
        if iteration.announced is not None:
            end = len(iteration.announced.current.order)
            self._announcer.reached(iteration.announced, end, end=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_newest": None}

    def __iter__(self) -> Iterator[BatchRequest]:
        # All of it runs at the first next(): torch's multi-process iterator calls iter() twice.
        order = indices = None
        if self._order is not None:
            if self._order.needed_to_iterate or self._announcer.has_readers():
                order = self._order.compute()
            indices = self._order.remaining(order)
        if self._order is None or indices is None:
            yield from self._requests_of_items(iter(self._source), order)
        elif self._slicing is None:
            yield from self._requests_of_items(integers_of(self._order, indices), order)
        else:
            yield from self._requests_of_order(self._order, indices, order)

    def _requests_of_order(
        self, sampler_order: SamplerOrder, indices: Int64s | range, order: Int64s | None
    ) -> Iterator[BatchRequest]:
        """Yield parts of the indices, in the batches that torch's BatchSampler would make."""
        assert self._slicing is not None
        size = self._slicing.batch_size
        end = len(indices)
        if self._slicing.drop_last:
            end -= end % size
        first = min(self._skipped_batches * size, end)
        self._announce(order, self._start_sample + first)
        step = size * self.message_batches
        for start in range(first, end, step):
            if start + step > end:
                # BatchSampler also exhausts the sampler before it yields an incomplete batch.
                sampler_order.exhausted()
            part = array_of(indices[start : min(start + step, end)])
            yield BatchRequest(start // size, self._start_sample + start, part, size)
        if (end - first) % step == 0:
            sampler_order.exhausted()

    def _requests_of_items(
        self, items: Iterator[Any], order: Int64s | None
    ) -> Iterator[BatchRequest]:
        """Yield the items that the sampler hands out."""
        batches, samples = self._skipped_batches, self._start_sample
        for item in islice(items, batches):
            samples += self._sample_count(item)
        self._announce(order, samples)
        while some := list(islice(items, self.message_batches)):
            ends = []
            before = samples
            for item in some:
                samples += self._sample_count(item)
                ends.append((samples, item))
            yield BatchRequest(batches, before, ends)
            batches += len(some)

    def _sample_count(self, item: Any) -> int:
        return len(item) if self._batched else 1

    def _announce(self, order: Int64s | None, position: int) -> None:
        """Announce the iteration that begins at a position of this order, and predict the next."""
        known = self._order
        iteration = None if self._newest is None else self._newest()
        if known is None:
            return
        self._count_epoch(known.epoch)
        if order is None or not len(order) or iteration is None:
            return
        following = self._epoch
        if known.epoch is not None:
            # If this iteration repeats the sampler's epoch, nobody sets epochs here.
            following = known.epoch + (self._epoch == known.epoch)
        compute_next = known.predict(following, self._shares_generator)
        epoch, name, replacement = self._epoch, known.name, known.replacement
        whole_batches = self._whole_batches

        def predict_next() -> Announcement | None:
            order = compute_next()
            if order is None:
                return None
            return Announcement(epoch + 1, whole_batches(order), name, replacement)

        current = Announcement(epoch, whole_batches(order), name, replacement)
        iteration.announced = self._announcer.begin(current, position, predict_next)

    def _count_epoch(self, sampler_epoch: int | None) -> None:
        """Number the epoch that begins, for its announcement.

        It is the sampler's own number if it has one, plus one with each further iteration in the
        same; otherwise the number of iterations.
        """
        finished, self._finished = self._finished, False
        if sampler_epoch is None:
            self._epoch += 1
        elif sampler_epoch != self._sampler_epoch:
            self._epoch = sampler_epoch
        elif finished and not self._resumed:
            self._epoch += 1
        self._sampler_epoch = sampler_epoch

    def _whole_batches(self, order: Int64s) -> Int64s:
        """Return the part of an order that batches are made of."""
        if self._slicing is None or not self._slicing.drop_last:
            return order
        return order[: len(order) // self._slicing.batch_size * self._slicing.batch_size]

    def state_dict(self, shape: dict[str, Any]) -> dict[str, Any]:
        """Return the position. Args: shape: the entries that must be equal to restore it."""
        if self._epoch_sampler is not None:
            return {"kind": "samples", "sampler": self._epoch_sampler.state_dict()}
        if self._order is None:
            raise UsageError(
                f"the order of {type(self._sampler or self._source).__name__} cannot be computed "
                "again",
                hint="use ffserve.torch.EpochSampler; or, if the order is the same every time, "
                "count batches yourself and use set_step",
            )
        return {"kind": "batches", "batches": self._batches, **shape, **self._order.state()}

    def load_state_dict(self, state: dict[str, Any], shape: dict[str, Any]) -> None:
        """Restore a position. Args: shape: as for ``state_dict``."""
        kind = "batches" if self._epoch_sampler is None else "samples"
        if state.get("kind") != kind:
            raise UsageError(
                f"the state counts {state.get('kind')}, but this loader counts {kind}",
                hint="a state fits a loader with the same kind of sampler",
            )
        if self._epoch_sampler is not None:
            self._epoch_sampler.load_state_dict(state["sampler"])
            self._number += 1
            return
        here = self.state_dict(shape)
        if set(state) != set(here):
            raise UsageError("the state was saved with another sampler")
        for name in sorted(here, key=lambda name: name in shape):
            if name not in _POSITION and state[name] != here[name]:
                raise UsageError(
                    f"the state was saved with {name} {state[name]}, here it is {here[name]}",
                    hint="ffserve.torch.EpochSampler can go on with another world size"
                    if name == "num_replicas"
                    else None,
                )
        assert self._order is not None
        self._order.restore(state)
        self._batches = self._resume = state["batches"]
        self._number += 1


def _newer_options(pin_memory_device: str, in_order: bool) -> dict[str, Any]:
    """Return options that not every torch since 2.0 takes, unless they have their default."""
    options: dict[str, Any] = {}
    if pin_memory_device:
        options["pin_memory_device"] = pin_memory_device
    if not in_order:
        options["in_order"] = in_order
    return options


def _unchanged(message: Any) -> Any:
    return message


def _batches_per_message(dataset: Any, batch_sampler: Any, workers: int) -> int:
    """Return how many batches a worker makes for one message.

    torch's queues cost 60 to 90 µs per message, more than copying a batch of 256 KiB. The number
    depends on the files and the loader's arguments only: which worker makes which batch is the
    same in every run.
    """
    size = getattr(batch_sampler, "batch_size", None)
    try:
        readers = [reader for reader in readers_below(dataset) if isinstance(reader, FileReader)]
        messages = len(batch_sampler) // (MIN_MESSAGES * workers)
    except Exception:  # no length; or a dataset of the user's, which may fail in any way
        return 1
    count = sum(reader.n for reader in readers)
    if not size or not count:
        return 1
    batch_bytes = int(size * sum(reader.size for reader in readers) // count)
    return max(1, min(MESSAGE_SIZE // max(1, batch_bytes), MESSAGE_BATCHES, messages))
