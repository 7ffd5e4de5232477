"""Errors of tasks, as Ray passes them to the driver.

Ray shows its own frames, several screens of them, for every error that is not a
``UserCodeException``. So tasks raise errors that are of both classes.
"""

from __future__ import annotations

from typing import Any

from ray.exceptions import UserCodeException

from ffserve.errors import FFServeError


def of_user(error: FFServeError) -> FFServeError:
    """Return an error of the same class that Ray shows without frames of its own."""
    if hasattr(error, "plain"):  # of a read that runs in the task of a write
        return error
    kind: Any = type(error)

    class TaskFailure(kind, UserCodeException):
        plain = error

        def __reduce__(self) -> tuple[Any, ...]:
            return of_user, (error,)

    TaskFailure.__name__ = TaskFailure.__qualname__ = kind.__name__
    failure: FFServeError = TaskFailure(
        error.message, path=error.path, index=error.index, offset=error.offset, hint=error.hint
    )
    return failure


def plain_error(error: BaseException) -> FFServeError | None:
    """Return the error of a task that Ray has passed on; None for any other error."""
    found = getattr(getattr(error, "cause", None), "plain", None)
    return found if isinstance(found, FFServeError) else None
