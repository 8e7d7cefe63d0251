"""The picture of the README: memory over some steps of the demo's training, with and without a limit."""

import tempfile
from dataclasses import replace
from pathlib import Path

from delta.runtime.demo import DemoOptions
from delta.runtime.demo_process import WorkerProcess
from delta.timeline import Series, read_timeline, to_svg


def draw_two_runs(options: DemoOptions) -> str:
    """The picture of the first screen: the same steps without and with the limit, one run after the other, as SVG."""
    limit = options.activations
    series = [_run(f"Delta with {limit}", options, limit), _run("plain PyTorch", options, None)]
    return to_svg(series, title=f"Saved activations of a GPT over {options.steps} training steps")


def _run(label: str, options: DemoOptions, activations: str | None) -> Series:
    """Train in a process of its own; its timeline. Without a limit Delta only watches, which is how plain gets one."""
    with tempfile.TemporaryDirectory() as directory:
        timeline = Path(directory, "run.jsonl")
        spec = replace(options.spec("delta"), activations=activations, timeline=str(timeline))
        with WorkerProcess(spec) as worker:
            worker.wait_ready()
            for index in range(options.steps):
                worker.ask({"do": "step", "index": index})
            worker.ask({"do": "finish"})
        return Series(label, *read_timeline(timeline))
