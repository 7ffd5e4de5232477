"""torch's DataLoader, with one dataset call a batch, whole errors and a position to resume from.

The class is a torch DataLoader and takes its arguments, but each iteration runs over an inner,
plain torch DataLoader whose "sampler" yields one ``Ticket`` a batch and whose "dataset" answers a
ticket with a finished batch. That is public torch only, and it gives what three private
hooks would be needed for otherwise:

- A ticket carries the batch's indices, so the dataset is called once a batch.
- A ticket carries the position behind its batch, and the worker sends it back with the batch. So
  the loader knows what the training loop was given, however far the workers are ahead.
- A worker answers several tickets in one message where batches are small, since a message costs
  more than copying a small batch; and the message is a ``Parcel`` (parcels.py) in shared memory.
- torch makes a worker's exception anew from its class and a text, which loses attributes. The
  answer to a ticket may be a ``Failure`` instead, which holds the pickled error; it is raised in
  the training process, with the worker's traceback as its cause.
"""

from __future__ import annotations

import operator
import pickle
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch.utils.data
from torch._utils import ExceptionWrapper
from torch.utils.data import BatchSampler

from ffserve.client.connections import lead_job
from ffserve.client.source import placing
from ffserve.errors import FFServeError, UsageError
from ffserve.torch.announcer import Announcer
from ffserve.torch.bundles import Bundle, Bundles, batches_a_message
from ffserve.torch.dataset import Dataset, fetch_batch, has_batch_method
from ffserve.torch.joint import Joint
from ffserve.torch.parcels import Packer
from ffserve.torch.parted import Given, Split, numbers_of, way_of
from ffserve.torch.plan import Plan, Run, Ticket
from ffserve.torch.raw import RawBatches, changes_nothing
from ffserve.torch.segments import Receiver, Senders, memory_limit
from ffserve.torch.threads import Begun, Threads

_REFUSES_ONE_INDEX = (TypeError, AssertionError, AttributeError, UsageError)


class Failure(NamedTuple):
    """An ffserve error on its way from a worker to the training process."""

    pickled: bytes
    traceback: str

    @classmethod
    def of(cls, error: FFServeError) -> Failure | None:
        """Pack the error; None if it would not come out of a pickle (a user's own subclass)."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except Exception:  # a user's own class may fail in any way
            return None
        return cls(pickled, text)

    def reraise(self) -> NoReturn:
        """Raise the error as it was in the worker."""
        # No name for it here: its traceback has this frame, and both would be garbage in a circle,
        # that holds the iterator and its workers until it is found.
        raise pickle.loads(self.pickled) from WorkerTraceback(self.traceback)


class WorkerTraceback(Exception):
    """The cause of an error that a worker process met: its traceback there, as text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"in a DataLoader worker\n{self.text}"


class DataLoader(torch.utils.data.DataLoader[Any]):
    """Load batches like torch's DataLoader, with one dataset call a batch.

    ``collate_fn`` gets the list of samples that the dataset returned. A dataset is asked for a
    whole batch if it is an ``ffserve.torch.Dataset``, if it has torch's ``__getitems__`` or is
    torch's ``ConcatDataset`` of such data sets, or if it refuses a single index and takes a list;
    any other is asked sample by sample, as torch does. With ``batch_size=None`` an
    ``ffserve.torch.Dataset`` is asked for a list of one and ``collate_fn`` gets that list, as in
    ffrecord. An IterableDataset goes through torch unchanged.

    Errors of ffserve reach the loop as they were raised in the worker, with class, text,
    path, index and offset.

    Args:
        skippable: False makes ``set_step`` an error.
        by_list: True if the dataset is indexed by a list only, False if by single indices only;
            None finds out.
        bundle: how many consecutive batches a worker makes and hands over together. None: one, and
            more where a batch of an ``ffserve.torch.Dataset`` has little to read. The more, the
            cheaper small batches cross, and the longer the first one takes.
        threads: how many threads of this process make batches ahead of the loop, two each,
            instead of worker processes; 0: none. ``process`` and ``collate_fn`` run in all of them.
        others: torch's. They stand in ffrecord's order, so ``multiprocessing_context`` is
            keyword-only; None for it means the system's start method, and any one works.
    Raises: UsageError for a dataset that cannot be asked in the way that ``by_list`` says;
        whatever torch's DataLoader raises.
    Cost:   one dataset call a batch; one small tuple more a batch than torch's loader.
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
                f"threads is {threads} and num_workers {num_workers}",
                hint="threads, from 0 on, take the place of workers: num_workers is 0 then",
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
        self._plan = Plan(
            self.batch_sampler,
            self.sampler,
            Announcer(dataset),
            shares_generator=generator is not None
            and getattr(order, "generator", None) is generator
            and not (persistent_workers and num_workers > 0),
            in_order=in_order or num_workers == 0,
        )
        if bundle is not None and (bundle := operator.index(bundle)) < 1:
            raise UsageError(f"bundle is {bundle}, but a message has one batch at least")
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
        run = self._plan.begin()
        if torch.utils.data.get_worker_info() is None:
            lead_job()
        fresh = self._inner is None or not (self.persistent_workers and self.num_workers > 0)
        if fresh or self._inner is None:
            self._inner, self._receiver = self._build_inner()
        answers = self._started(self._inner)
        if self._receiver is not None:
            self._receiver.started()
            if fresh:
                _keep_queues(answers)
        return _Batches(answers, self._receiver, self._plan, run)

    def _started(self, inner: torch.utils.data.DataLoader[Any]) -> Iterator[Any]:
        """Start torch's iterator and its workers."""
        try:
            return iter(inner)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            if "pickle" not in str(error):
                raise
            raise UsageError(
                f"the workers cannot be started, since something of theirs cannot be sent: {error}",
                hint="spawn and forkserver pickle the dataset and all functions: define collate_fn "
                "and worker_init_fn at the top level of a module, not as a lambda or in a function",
            ) from error

    def set_step(self, step: int) -> None:
        """Leave out the first batches of every iteration, until ``set_step(0)``.

        Args:   step: 0 <= step < the number of batches of a whole epoch. Their samples are not
            read; their indices are drawn, so the order is that of a whole epoch.
        Raises: UsageError if it is outside, if the loader was made with ``skippable=False``, or
            for an IterableDataset.
        """
        if not self.skippable:
            raise UsageError("this loader was made with skippable=False")
        if isinstance(self.dataset, torch.utils.data.IterableDataset):
            raise UsageError("an IterableDataset has no batches that could be skipped unread")
        step = operator.index(step)
        count = super().__len__()
        if step != 0 and not 0 <= step < count:
            raise UsageError(f"step {step} is outside an epoch of {count} batches")
        self._plan.step = step

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch: what was handed to the training loop, no more.

        Batches that workers have prefetched but the loop has not got do not count, nor
        does a batch whose error was raised last.

        Returns: a dict for ``load_state_dict``; of plain numbers with an EpochSampler.
        Raises:  UsageError where the position is no exact description of what was used: an order
            that cannot be drawn again, ``in_order=False``, an IterableDataset.
        """
        self._check_exact()
        return self._plan.state_dict(self._shape())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was called: the next iteration hands out the rest.

        The number of workers may differ. With an EpochSampler the batch size may differ too. Later
        iterations are whole again.

        Args:   state: of a loader over the same samples in the same order.
        Raises: UsageError if it is of another kind of loader, naming the difference.
        """
        self._check_exact()
        self._plan.load_state_dict(state, self._shape())

    def _check_exact(self) -> None:
        if isinstance(self.dataset, torch.utils.data.IterableDataset):
            raise UsageError("an IterableDataset has no position that could be restored")
        if self.num_workers > 0 and not self.in_order:
            raise UsageError("with in_order=False the batches handed out are not the first ones")

    def _shape(self) -> dict[str, Any]:
        return {"batch_count": super().__len__(), "batch_size": self.batch_size}

    def _build_inner(self) -> tuple[torch.utils.data.DataLoader[Any], Receiver | None]:
        workers: dict[str, Any] = {}
        receiver = senders = None
        bundle = 1
        if self.num_workers > 0:
            bundle = self.bundle or batches_a_message(
                self.dataset, self.batch_sampler, self.num_workers
            )
            receiver = Receiver(self.num_workers, memory_limit() // self.num_workers)
            senders = receiver.senders((self.prefetch_factor or 2) + 3)
            workers = {
                "prefetch_factor": self.prefetch_factor,
                "persistent_workers": self.persistent_workers,
                "multiprocessing_context": self.multiprocessing_context,
            }
        answering = TicketDataset(
            self.dataset, self.collate_fn, self.batch_sampler is not None, self.by_list, senders
        )
        bundles = Bundles(self._plan, bundle)
        inner: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
            answering,
            batch_size=None,
            sampler=Threads(bundles, answering.__getitem__, self.threads)
            if self.threads
            else bundles,
            num_workers=self.num_workers,
            collate_fn=_unchanged,
            pin_memory=self.pin_memory,
            timeout=self.timeout * bundle,
            worker_init_fn=self.worker_init_fn,
            generator=self.generator,
            **workers,
            **_newer_options(self.pin_memory_device, self.in_order),
        )
        return inner, receiver


class TicketDataset(torch.utils.data.Dataset[Any]):
    """A dataset of batches: ``[bundle]`` reads, processes and collates some.

    In a worker this is what torch's ``get_worker_info().dataset`` returns. Everything else than
    tickets goes to the user's dataset, attributes read and set included, so that a
    ``worker_init_fn`` meets what it expects.
    """

    _OWN = frozenset(("_dataset", "_collate", "_batched", "_by_list", "_senders", "_packer"))

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Any], Any],
        batched: bool,
        by_list: bool | None,
        senders: Senders | None,
    ) -> None:
        if by_list is None and (
            isinstance(dataset, Dataset) or (batched and has_batch_method(dataset))
        ):
            by_list = True
        self._dataset = dataset
        self._collate = collate
        self._batched = batched
        self._by_list = by_list
        self._senders = senders
        self._packer: Packer | None = None

    def __getitem__(self, bundle: Any) -> Any:
        if isinstance(bundle, Begun):
            return bundle.answers.result()
        if not isinstance(bundle, Bundle):
            return self._dataset[bundle]
        worker = torch.utils.data.get_worker_info()
        if worker is None:
            return [self._answer(ticket) for ticket in bundle.tickets]
        if self._packer is None and self._senders is not None:
            sender = self._senders.of(worker.id)
            self._packer = Packer(self._senders.key, worker.id, sender, self._collate)
        if self._packer is None:
            return self._worker_answers(bundle.tickets, worker.id)
        return self._packed(bundle, self._packer, worker.id)

    def _packed(self, bundle: Bundle, packer: Packer, worker: int) -> Any:
        """Answer in a worker, through shared memory."""
        packer.begin()
        way = way_of(self._dataset) if self._batched and self._by_list else None
        numbers = None if way is None else numbers_of(way, bundle.tickets)
        given: Given | None = None
        if way is not None and numbers is not None:
            if (
                isinstance(way, Joint)
                and not isinstance(numbers, Split)
                and changes_nothing(way.dataset, self._collate)
            ):
                parcel = packer.raw(way.reader, numbers, bundle.heads)
                if parcel is not None:
                    return parcel
                packer.begin()
            else:
                given = packer.samples(way, numbers)
        with placing(packer.place):
            answers = self._worker_answers(bundle.tickets, worker, given, packer.settle)
        return packer.pack(answers)

    def _worker_answers(
        self,
        tickets: list[Ticket],
        worker: int,
        given: Given | None = None,
        settle: Callable[[], None] = lambda: None,
    ) -> list[tuple[Any, ...]]:
        """Answer tickets. One alone may raise; of several, each has its own answer or error."""
        where = f"in DataLoader worker process {worker}"
        answers = []
        for ticket in tickets:
            try:
                answers.append(self._worker_answer(ticket, given))
            except Exception:
                if len(tickets) == 1:
                    raise
                answers.append((ExceptionWrapper(where=where),))  # type: ignore[no-untyped-call]
            settle()
        return answers

    def _worker_answer(self, ticket: Ticket, given: Given | None) -> tuple[Any, ...]:
        """Answer a ticket; an error of ffserve is an answer, too."""
        try:
            return self._answer(ticket, given)
        except FFServeError as error:
            failure = Failure.of(error)
            if failure is None:
                raise
            return tuple(failure)

    def _answer(self, ticket: Ticket, given: Given | None = None) -> tuple[Any, ...]:
        """Make a batch; of the message's next samples, if these are read for it."""
        wanted = ticket.wanted
        samples = self._samples(wanted) if given is None else given.processed(wanted)
        return ticket.batches, ticket.samples, self._collate(samples)

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
        """Fetch a first batch from a dataset of which it is unknown what may index it.

        A single index is tried first, since many datasets for single indices also accept a list
        and mean something else by it (a TensorDataset returns columns, not samples).
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


class _Batches(Iterator[Any]):
    """One iteration: takes messages from torch's iterator, notes each batch as it is handed out."""

    def __init__(
        self, messages: Iterator[Any], receiver: Receiver | None, plan: Plan, run: Run
    ) -> None:
        self._messages = messages
        self._receiver = receiver
        self._plan = plan
        self._run = run
        self._answers: deque[Any] | RawBatches = deque()

    def __next__(self) -> Any:
        if not self._answers:
            try:
                message = next(self._messages)
                self._answers = message if isinstance(message, RawBatches) else deque(message)
                del message
            except StopIteration:
                self._plan.exhausted(self._run)
                raise
            except Exception as error:
                self._forget_locals(error)
                raise
        answer: Any = self._answers.popleft()
        if len(answer) == 1:
            try:
                answer[0].reraise()
            except Exception as error:
                self._forget_locals(error)
                raise
        if len(answer) == 2:  # a tuple, or the list that torch's pinning makes of it
            Failure(*answer).reraise()
        batches, samples, batch = answer
        self._plan.handed_out(self._run, batches, samples)
        return batch

    def _forget_locals(self, error: Exception) -> None:
        """Clear the frames of torch's that an error of a worker came through, since one of them has
        a name for it: a circle, as in `Failure.reraise`."""
        if self._receiver is not None:
            traceback.clear_frames(error.__traceback__)


def _keep_queues(messages: Iterator[Any]) -> None:
    """Keep the workers' queues until torch's iterator has used them for the last time.

    It tells its workers through them, when it goes, that they may end. Where it goes in a circle of
    garbage Python would have closed them by then, and it would wait five seconds for each worker
    before it killed it.
    """
    queues = getattr(messages, "_index_queues", None)
    weakref.finalize(messages, _unchanged, queues).atexit = False


def _newer_options(pin_memory_device: str, in_order: bool) -> dict[str, Any]:
    """Return those options that not every torch since 2.0 takes, unless they have their default."""
    options: dict[str, Any] = {}
    if pin_memory_device:
        options["pin_memory_device"] = pin_memory_device
    if not in_order:
        options["in_order"] = in_order
    return options


def _unchanged(answer: Any) -> Any:
    return answer
