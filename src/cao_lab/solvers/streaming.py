"""Turn work that calls back into an iterator."""

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import TypeVar

Item = TypeVar("Item")


class _Closed(BaseException):
    """Ends the work when nobody listens any more."""


class _Ended:
    """The last thing in the queue: the work is over, by itself or by an exception."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def streamed(work: Callable[[Callable[[Item], None]], None]) -> Iterator[Item]:
    """Yield what the work passes to its callback, one at a time.

    The work runs in a thread of its own, because a minimiser such as scipy's does not return before it has finished.
    The two take turns: while an item is looked at the work stands still.
    """
    items: SimpleQueue[Item | _Ended] = SimpleQueue()
    turn, is_closed = threading.Semaphore(0), threading.Event()

    def emit(item: Item) -> None:
        items.put(item)
        turn.acquire()
        if is_closed.is_set():
            raise _Closed

    def run() -> None:
        try:
            work(emit)
        except BaseException as error:  # The listener raises it again.
            items.put(_Ended(error))
        else:
            items.put(_Ended(None))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        while not isinstance(item := items.get(), _Ended):
            yield item
            turn.release()
        if item.error is not None:
            raise item.error
    finally:
        is_closed.set()
        turn.release()
        thread.join()
