"""A program on several streams of one CUDA device, as it is or captured in one CUDA graph."""

from collections.abc import Sequence
from typing import Any

import torch

from ridgeline.autoparallel.graphs.program import Program
from ridgeline.autoparallel.graphs.segments import Segment
from ridgeline.autoparallel.lanes.cuda_lanes import CudaLanes, Route
from ridgeline.autoparallel.lanes.issue import IssuedPiece, Lanes, carry_out, pieces
from ridgeline.autoparallel.scheduling.schedule import Schedule, check_schedule
from ridgeline.errors import ScheduleError


class StreamProgram:
    """A program whose operations are issued to the lanes of a schedule; called like the traced function.

    The first lane is the caller's current stream; the others are forked from it and joined to it,
    so that a call is ordered among the caller's other work like one operator. What one lane made
    and another uses is kept until the join: freed earlier, its memory could be handed out again on
    the first lane while the second still reads.

    Calls do not compute gradients: a backward pass is part of the program or takes place elsewhere.

    The program is on one device; without `lanes`, streams of that carry the schedule out.

    Raises:
        ScheduleError: the schedule does not keep an edge of the program, or is for another one; or the
            program is not on one CUDA device.
    """

    def __init__(self, program: Program, schedule: Schedule, *, lanes: Lanes | None = None) -> None:
        # A missing wait gives wrong results only now and then, so schedules are proved before they run.
        check_schedule(program.dag, schedule)
        self.program = program
        self.schedule = schedule
        self._lanes = lanes or CudaLanes(
            _routes(_only_device(program), schedule.num_lanes), len(schedule.lane_of)
        )
        kept = program.crosses(schedule.lane_of)
        self._work: list[tuple[IssuedPiece, Segment]] = [
            (piece, program.segment(piece.nodes, keep=kept)) for piece in pieces(schedule)
        ]

    @torch.no_grad()
    def __call__(self, *args: Any) -> Any:
        """The result, valid on the caller's current stream.

        Cost: Enqueues; never waits for the device.
        """
        environment = self.program.bind(*args)
        carry_out(self._lanes, self._work, environment)
        return self.program.results(environment)


def _routes(device: torch.device, num_lanes: int) -> Sequence[Route]:
    return [Route(device, device, is_own=lane > 0) for lane in range(max(1, num_lanes))]


def _only_device(program: Program) -> torch.device:
    found = list(dict.fromkeys(operation.device for operation in program.operations))
    if len(found) != 1 or found[0].type != "cuda":
        names = ", ".join(map(str, found)) or "no operation"
        raise ScheduleError(
            f"wanted a program on one CUDA device for streams, got {names}; move its tensors to one device, "
            "or use devices=[...] for several"
        )
    return found[0]
