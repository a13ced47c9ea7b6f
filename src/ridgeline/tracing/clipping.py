"""Clipping of gradients, as it runs before the optimizer of a recorded step."""

import dataclasses

from torch import nn

from ridgeline.tracing.recorder import TracingMode
from ridgeline.tracing.subject import Subject, trained_parameters
from ridgeline.workload import CLIPPING


def record_clipping(subject: Subject, recorder: TracingMode, max_norm: float) -> None:
    """Record what scales the gradients down to a total norm, with `CLIPPING` for its module.

    Args:
        subject: The step, after its backward pass.
        recorder: Active, in the phase of the optimizer.
        max_norm: Above 0.
    """
    first = len(recorder.records)
    # Of stand-ins torch would take another form than of the tensors that they stand for.
    parameters = [*trained_parameters(subject.optimizer)]
    nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)
    recorder.records[first:] = [
        dataclasses.replace(record, module=CLIPPING) for record in recorder.records[first:]
    ]
