"""What a refresh does to the thread that it runs in alone, and what torch only lets it do to all of them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import Lock, _DummyThread, current_thread
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook


@contextmanager
def before_forward_passes(call: Callable[[nn.Module], object]) -> Iterator[None]:
    """Call a function with every module that this thread, or a thread of autograd's own, is about to run.

    torch's hook is the process's, so modules that other threads run are passed over. Checkpointed layers run again in
    threads of autograd's own, on GPUs; Python did not start those and knows them as dummies.
    """
    owner = current_thread()

    def meet(module: nn.Module, _inputs: Any) -> None:
        here = current_thread()
        if here is owner or isinstance(here, _DummyThread):
            call(module)

    handle = register_module_forward_pre_hook(meet)
    try:
        yield
    finally:
        handle.remove()


def process_wide(change: Callable[[], AbstractContextManager[Any]]) -> Callable[[], AbstractContextManager[None]]:
    """Let a change to the whole process be made by the first of its users and taken back by the last.

    If each took back its own, the one that came second would put back what the first had set.
    """
    lock, stack, users = Lock(), ExitStack(), 0

    @contextmanager
    def shared() -> Iterator[None]:
        nonlocal users
        with lock:
            if not users:
                stack.enter_context(change())
            users += 1
        try:
            yield
        finally:
            with lock:
                users -= 1
                if not users:
                    stack.close()

    shared.__doc__ = change.__doc__
    return shared
