"""Turn work that calls back into an iterator."""

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Generic, TypeVar

Item = TypeVar("Item")


class _Closed(BaseException):
    """Ends the work when nobody listens any more."""


class _Ended:
    """The last thing in the queue: the work is over, by itself or by an exception."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Emitter(Generic[Item]):
    """What the work passes its items to; it waits until each was looked at."""

    def __init__(self) -> None:
        self.items: SimpleQueue[Item | _Ended] = SimpleQueue()
        self.turn = threading.Semaphore(0)
        self.is_closed, self.is_interrupted = threading.Event(), threading.Event()

    def __call__(self, item: Item) -> None:
        """Hand an item to the listener."""
        self.items.put(item)
        self.turn.acquire()
        self.check()

    def check(self) -> None:
        """End the work from within if nobody listens any more, or if the listener was interrupted."""
        if self.is_closed.is_set():
            raise _Closed
        if self.is_interrupted.is_set():
            self.is_interrupted.clear()
            raise KeyboardInterrupt

    def next(self) -> Item | _Ended:
        """Wait for an item; an interruption is passed to the work, which may have a last item, and a second is not."""
        try:
            return self.items.get()
        except KeyboardInterrupt:
            self.is_interrupted.set()
            return self.items.get()


def streamed(work: Callable[[Emitter[Item]], None]) -> Iterator[Item]:
    """Yield what the work passes to its callback, one at a time.

    The work runs in a thread of its own, because a minimiser such as scipy's does not return before it has finished.
    The two take turns: while an item is looked at the work stands still.
    """
    emitter: Emitter[Item] = Emitter()

    def run() -> None:
        try:
            work(emitter)
        except BaseException as error:  # The listener raises it again.
            emitter.items.put(_Ended(error))
        else:
            emitter.items.put(_Ended(None))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        while not isinstance(item := emitter.next(), _Ended):
            yield item
            emitter.turn.release()
        if item.error is not None:
            raise item.error
    finally:
        emitter.is_closed.set()
        emitter.turn.release()
        thread.join()
