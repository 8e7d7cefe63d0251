"""A signal that comes while Delta is at work waits until that is done.

Python runs the program's handler between any two calls of the main thread. Ctrl-C's raises: in the midst of the books
it would leave an instruction given and not carried out, or a lock held for ever, and from the callback of a weak
reference it would get nowhere. One that computes something would find autograd switched off by the dispatcher, and its
ops taken for Delta's own. So a handler that finds Delta at work runs when whoever called Delta goes on, which is told
of by tracing that one frame: nothing is to be asked where no signal comes.

What the program itself does within Delta, a hook in backward for one, is not Delta's work. It may raise there anyway.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any]

# Whatever Delta may be calling. Where the program called it, that is found below it.
_LIBRARIES = sys.stdlib_module_names | {"cupy", "numpy", "psutil", "pydantic", "pynvml", "scipy", "torch", "yaml"}
_PROGRAMS = tuple(  # parts of Delta that train, or run what trains
    ["delta.cli", *(f"delta.runtime.{name}" for name in ("bench", "demo", "predict", "script", "tracing", "zoo"))]
)
_DISPATCHER = "torch._library.simple_registry"  # asked on the way to the recorder, where autograd is off already
_ENTERS = ExitStack.enter_context.__code__
_PATIENCE_NS = 1_000_000_000


@contextmanager
def signals_wait() -> Iterator[None]:
    """While entered, the handlers that there are wait for Delta. Signals are the main thread's, and so is this."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    waiting = Waiting({number: handler for number, handler in handlers.items() if callable(handler)})
    came = waiting.came
    for number in waiting.handlers:
        signal.signal(number, came)
    try:
        yield
    finally:
        # In another thread none can be put back: each goes on to stand for the program's.
        there_may = threading.current_thread() is threading.main_thread()
        for number, handler in waiting.handlers.items() if there_may else ():
            there: object = signal.getsignal(number)
            if there is came:  # else the program has another by now
                signal.signal(number, handler)


class Waiting:
    """Signals that have come, and wait."""

    def __init__(self, handlers: Mapping[int, _Handler]) -> None:
        self.handlers = handlers
        self._since_ns: dict[int, int] = {}  # by number, in the order in which they came
        self._telling = False  # handlers are being called, from a trace function: none is called beneath it

    def came(self, number: int, frame: FrameType | None) -> None:
        """Stands for the handler of each. A Ctrl-C that is repeated, since nothing seems to come of the first, waits no
        longer: what Delta does may itself be waiting for ever."""
        now_ns = time.monotonic_ns()
        since_ns = self._since_ns.get(number, now_ns)
        caller = _caller_of_delta(frame)
        if caller is None or (number == signal.SIGINT and now_ns - since_ns > _PATIENCE_NS):
            self._since_ns.pop(number, None)
            self.handlers[number](number, frame)
            return
        idle = not self._since_ns and not self._telling
        self._since_ns[number] = since_ns
        if idle:
            self._when_it_goes_on(caller)

    def _when_it_goes_on(self, caller: FrameType) -> None:
        """Call the handlers when the frame runs its next instruction, returns, or is told of an exception."""
        traced, own, opcodes = sys.gettrace(), caller.f_trace, caller.f_trace_opcodes

        def goes_on(frame: FrameType, event: str, arg: object) -> None:
            frame.f_trace, frame.f_trace_opcodes = own, opcodes
            sys.settrace(traced)
            if (caller := _caller_of_delta(frame)) is not None:  # a library that Delta has called
                self._when_it_goes_on(caller)
                return
            self._tell(frame)

        caller.f_trace, caller.f_trace_opcodes = goes_on, True
        sys.settrace(lambda *_: None)

    def _tell(self, frame: FrameType) -> None:
        """Call the handlers of all that have come, and of those that come while one of them has Delta at work."""
        raised: BaseException | None = None
        self._telling = True
        try:
            while self._since_ns:
                number = next(iter(self._since_ns))
                del self._since_ns[number]
                try:
                    self.handlers[number](number, frame)
                except BaseException as error:  # the others are to be told, too
                    if raised is not None:
                        error.__context__ = raised
                    raised = error
        finally:
            self._telling = False
        if raised is not None:
            raise raised


def _caller_of_delta(frame: FrameType | None) -> FrameType | None:
    """Whose frame goes on when Delta has done what it is at; None where the program is at work."""
    while frame is not None and not _is_delta_s(frame):
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _LIBRARIES:
            return None
        frame = frame.f_back
    # A stack that has entered a block does not know of it before this call has returned, and would not leave it.
    while frame is not None and (_is_delta_s(frame) or frame.f_code is _ENTERS):
        frame = frame.f_back
    return frame


def _is_delta_s(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__"))
    return name == _DISPATCHER or (name.startswith("delta.") and not name.startswith(_PROGRAMS))
