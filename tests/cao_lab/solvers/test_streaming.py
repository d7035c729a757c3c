"""Work that calls back, as an iterator: turns, ends, errors and early closing."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

import pytest

from cao_lab.solvers.streaming import Emitter, streamed


def count_to(end: int, done: list[int]) -> Callable[[Callable[[int], None]], None]:
    def work(emit: Callable[[int], None]) -> None:
        for number in range(end):
            emit(number)
            done.append(number)

    return work


def test_items_come_in_order() -> None:
    assert list(streamed(count_to(5, []))) == [0, 1, 2, 3, 4]


def test_the_work_stands_still_while_an_item_is_looked_at() -> None:
    done: list[int] = []
    for item in streamed(count_to(5, done)):
        assert done == list(range(item))


def test_closing_early_ends_the_work() -> None:
    done: list[int] = []
    before = threading.active_count()
    stream = streamed(count_to(5, done))
    assert [next(stream), next(stream)] == [0, 1]
    stream.close()
    assert done == [0]
    assert threading.active_count() == before


def test_an_error_of_the_work_is_raised_to_the_listener() -> None:
    def work(emit: Callable[[int], None]) -> None:
        emit(1)
        raise KeyError("lost")

    stream = streamed(work)
    assert next(stream) == 1
    with pytest.raises(KeyError, match="lost"):
        next(stream)


def test_an_error_of_the_listener_ends_the_work() -> None:
    done: list[int] = []
    before = threading.active_count()

    def listen() -> None:
        for _ in streamed(count_to(5, done)):
            raise KeyError

    with pytest.raises(KeyError):
        listen()
    assert done == []
    assert threading.active_count() == before


class Interrupted(SimpleQueue[str]):
    """A queue whose listener is interrupted once while it waits."""

    interruptions = 1

    def get(self, block: bool = True, timeout: float | None = None) -> str:
        if self.interruptions:
            self.interruptions -= 1
            raise KeyboardInterrupt
        return super().get(block, timeout)


def test_an_interruption_is_passed_to_the_work_which_may_have_a_last_item() -> None:
    emitter: Emitter[str] = Emitter()
    emitter.items = Interrupted()
    emitter.items.put("last")
    emitter.check()
    assert emitter.next() == "last"
    with pytest.raises(KeyboardInterrupt):
        emitter.check()
    emitter.check()
