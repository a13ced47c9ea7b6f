"""Watching a run: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from typing import Self

import msgspec
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from ridgeline import units
from ridgeline.cli.command import Output
from ridgeline.history import metric_text
from ridgeline.recording.progress import Progress
from ridgeline.reporting.terminal.text import console

LINE_EVERY_S = 5.0
"""Least seconds between two plain lines within an epoch."""


class Watch:
    """Shows readings until the `with` block ends.

    Args:
        output: Of the command; quiet shows nothing.
        limit_samples_per_s: Samples per second if nothing but physics slowed the step; None unknown.
    """

    def __init__(self, output: Output, *, limit_samples_per_s: float | None) -> None:
        self._output = output
        self._limit = limit_samples_per_s
        self._num_metrics = 0
        self._next_line_s = 0.0
        self._bar: Bar | None = None
        terminal = console(sys.stderr)
        if terminal.is_terminal and not output.is_quiet:
            # Only where somebody looks: in a file each redraw would be a line.
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TextColumn("{task.fields[line]}"),
                TimeRemainingColumn(),
                console=terminal,
                transient=True,
            )
            self._task = self._bar.add_task("training", total=None, line="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def line(self, data: bytes) -> None:
        """A reading as JSON, as workers write it."""
        self.show(msgspec.json.decode(data, type=Progress))

    def show(self, reading: Progress) -> None:
        """Show a reading; without a terminal, only now and then and at the end of an epoch."""
        text = describe(reading, self._limit)
        if self._bar is not None:
            self._bar.update(
                self._task,
                total=reading.total_steps,
                completed=reading.step,
                line=text,
                description=f"epoch {reading.epoch + 1}/{reading.epochs}",
            )
            return
        is_new_metric = len(reading.metrics) > self._num_metrics
        # The reading after an epoch's evaluation says the same, and what it found.
        is_evaluating = reading.step * reading.epochs == reading.total_steps * (reading.epoch + 1)
        if is_new_metric or (not is_evaluating and time.monotonic() >= self._next_line_s):
            self._num_metrics = len(reading.metrics)
            self._next_line_s = time.monotonic() + LINE_EVERY_S
            self._output.progress(f"step {reading.step}/{reading.total_steps}: {text}")


def describe(reading: Progress, limit_samples_per_s: float | None) -> str:
    """A reading in a line: loss, speed, share of the ceiling, exposed communication, metric."""
    parts = [
        f"loss {units.digits3(reading.loss)}",
        units.quantity(reading.samples_per_s, "samples/s"),
    ]
    if limit_samples_per_s:
        parts.append(f"{units.percent(reading.samples_per_s / limit_samples_per_s)} of the ceiling")
    if reading.exposed_s is not None:
        parts.append(f"{units.seconds(reading.exposed_s)} of communication exposed")
    if reading.metrics:
        parts.append(f"test {metric_text(reading.metrics[-1], reading.metrics)}")
    return ", ".join(parts)
