"""``deltactl run``: an unmodified training script under `delta.evict`, as ``python script.py`` would run it.

Not covered: launching several processes. ``torchrun ... -m delta run script.py`` does, one block of eviction in each.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import torch

import delta
from delta.errors import DeltaError, StorageModifiedError
from delta.files import marked
from delta.report import Report
from delta.trace import Recording, read, summary

_STOPPED = 128 + signal.SIGINT  # what a shell tells of a process that Ctrl-C has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The arguments of `delta.evict`, and where the report goes besides stderr (a JSON file).

    With `trace` given, what was recorded is summed up on stderr too.
    """

    policy: str = "delta"
    device: str | None = None
    budget: str | None = None
    activations: str | None = None
    timeline: str | None = None
    trace: Recording | None = None
    report: str | None = None


def run_script(script: str, arguments: Sequence[str], options: RunOptions) -> None:
    """Run the script as ``__main__``. At the end the report and what was recorded are printed on stderr, also when the
    script failed.

    Of several processes (torchrun) each writes files of its own, with ``-rank0`` and so on in their names. SystemExit
    with a code passes through, so the exit code is the script's. Another exception of the script is printed
    without Delta's own frames and exits with 1, as the interpreter would, and after Ctrl-C with 130; so is a
    StorageModifiedError, which plain PyTorch would have raised as well. A script that ended well where a trace was
    asked for and none written exits with 2. Raises DeltaError for options that make no sense.
    """
    path = Path(script).absolute()
    if not path.is_file():
        raise DeltaError(f"script={script!r}: there is no such file")
    options = _of_this_rank(options)
    if options.report is not None:
        _check_place(options.report)
    run = delta.evict(
        budget=options.budget,
        activations=options.activations,
        policy=options.policy,
        device=options.device or _card_of_rank(),
        timeline=options.timeline,
        trace=options.trace,
    )
    ending = ExitStack()
    ending.enter_context(run)  # on its own: options that are refused here end without a report
    try:
        with ending, _interpreter_for(path, [script, *arguments]):
            _run_main(path)
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, DeltaError) and not isinstance(error, StorageModifiedError):
            raise
        _print_like_interpreter(error, path)
        raise SystemExit(_STOPPED if isinstance(error, KeyboardInterrupt) else 1) from error
    finally:
        _publish(run.report(), options.report)
        if options.trace is not None:
            _sum_up(run.traces, options.trace)
    if options.trace is not None and not run.traces:
        raise SystemExit(2)


def _of_this_rank(options: RunOptions) -> RunOptions:
    """The same with files of this process's own, where torchrun says that there are several."""
    size, rank = os.environ.get("WORLD_SIZE", ""), os.environ.get("RANK", "")
    if not (size.isdecimal() and int(size) > 1 and rank.isdecimal()):
        return options

    def own(file: str | None) -> str | None:
        return None if file is None else str(marked(Path(file), f"rank{rank}"))

    trace = options.trace and replace(options.trace, path=marked(options.trace.path, f"rank{rank}"))
    return replace(options, timeline=own(options.timeline), report=own(options.report), trace=trace)


def _card_of_rank() -> str | None:
    """The card that a process started by torchrun trains on, as a rule: it says so only after the block has begun."""
    rank = os.environ.get("LOCAL_RANK", "")
    return f"cuda:{rank}" if rank.isdecimal() and int(rank) < torch.cuda.device_count() else None


@contextmanager
def _interpreter_for(path: Path, argv: list[str]) -> Iterator[None]:
    """``sys.argv`` and ``sys.path`` as the interpreter sets them for a script, put back at the end."""
    before, search = sys.argv, sys.path
    sys.argv = argv
    if not sys.flags.safe_path:  # else neither the folder of Delta's command nor that of the script is among them
        sys.path = [str(path.resolve().parent), *search[1:]]
    try:
        yield
    finally:
        sys.argv, sys.path = before, search


def _run_main(path: Path) -> None:
    """Run a script as the module ``__main__``, which is there for as long as it runs. `runpy` would put the absolute
    path that ``__file__`` has into ``sys.argv``, too."""
    main = ModuleType("__main__")
    main.__file__ = str(path)
    before, sys.modules["__main__"] = sys.modules["__main__"], main
    try:
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(main))
    finally:
        sys.modules["__main__"] = before


def _print_like_interpreter(error: BaseException, path: Path) -> None:
    """The traceback from the script's own first frame on. A SyntaxError of the script has none, only its text."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename != str(path):
        frame = frame.tb_next
    traceback.print_exception(type(error), error, frame)


def _check_place(file: str) -> None:
    """DeltaError where no report could be written, before the script runs."""
    path = Path(file)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise DeltaError(f"report={file!r}: cannot be written: give a file in a directory that exists and is writable")


def _publish(report: Report, file: str | None) -> None:
    print(report, file=sys.stderr)
    if file is None:
        return
    try:
        Path(file).write_text(json.dumps(report.as_dict(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise DeltaError(f"report={file!r}: cannot be written: {error.strerror or error}") from error


def _sum_up(traces: Sequence[Path], asked: Recording) -> None:
    for file in traces:
        print(f"{file}: {summary(read(file))}", file=sys.stderr)
    if not traces:
        older = "; the file that is there is an older one" if asked.path.exists() else ""
        print(f"{asked.path}: no trace was written, the warning above says why{older}", file=sys.stderr)
