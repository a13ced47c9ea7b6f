"""The mesh of a world: which workers train together, along which axis.

The axes are those of `plan.Layout`. What trains on the data axis alone needs a mesh of one axis, which is a
view of a process group that is there already: no communicator is made for it.
"""

from typing import Literal, NoReturn, get_args

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ridgeline.errors import PlanError
from ridgeline.workers import leaving

Axis = Literal["data", "shard", "tensor", "pipeline"]
AXES: tuple[Axis, ...] = get_args(Axis)
"""By the names of the fields of `plan.Layout`."""


def mesh_over(group: ProcessGroup, device: Literal["cpu", "cuda"]) -> DeviceMesh:
    """The workers of a group along the data axis, each where the group has it.

    Cost: Some milliseconds the first time, then one; no communicator and no collective.
    """
    return DeviceMesh.from_group(group, device, mesh_dim_names=("data",))


def given_group(mesh: DeviceMesh | None, process_group: ProcessGroup | None) -> ProcessGroup | None:
    """The group that a script's own mesh or process group names to train over; None where it gave neither.

    Args:
        mesh: Of one axis, or with an axis named `data`, whose group is taken.
        process_group: Of some or all workers of the job.

    Raises:
        PlanError: both are given, one is of another type or was destroyed, the mesh has several axes and none
            is named `data`, or this worker is in no group of it.
    """
    if mesh is not None and process_group is not None:
        raise PlanError(
            "wanted a mesh or a process group, got both; give the one that this step trains over"
        )
    if mesh is not None:
        return _group_of(mesh)
    if process_group is None:
        return None
    # What torch gives to a worker that is outside of a group is a number.
    if process_group == dist.GroupMember.NON_GROUP_MEMBER:
        _refuse_outsider("process group")
    if not isinstance(process_group, ProcessGroup):
        raise PlanError(
            "wanted process_group as a torch.distributed.ProcessGroup, got "
            f"{type(process_group).__name__}; give what torch.distributed.new_group() returned"
        )
    if not leaving.is_open(process_group):
        raise PlanError(
            "wanted an open process group, got one that was destroyed; make the step before "
            "destroy_process_group(), or give another group"
        )
    return process_group


def timeout_of(group: ProcessGroup, device: torch.device) -> float:
    """Seconds that a collective of a group on a device may take."""
    backend = group._get_backend(device)  # noqa: SLF001 - there is no public name
    return backend.options._timeout.total_seconds()  # noqa: SLF001 - nor for this


def _group_of(mesh: DeviceMesh) -> ProcessGroup:
    if not isinstance(mesh, DeviceMesh):
        raise PlanError(
            f"wanted mesh as a torch.distributed.device_mesh.DeviceMesh, got {type(mesh).__name__}; make one "
            "with init_device_mesh(), or give a process_group"
        )
    names = mesh.mesh_dim_names or ()
    if mesh.ndim != 1 and "data" not in names:
        sizes = " x ".join(str(size) for size in mesh.shape)
        called = f"the axes {', '.join(map(repr, names))}" if names else "axes without names"
        advice = f"mesh[{names[0]!r}]" if names else "mesh_dim_names=('data', ...)"
        raise PlanError(
            f"wanted a mesh of one axis, or with an axis named 'data', got {called} of {sizes} workers; give "
            f"the axis along which batches differ, for example {advice}"
        )
    if mesh.get_coordinate() is None:
        _refuse_outsider("mesh")
    return mesh.get_group("data" if "data" in names else 0)


def _refuse_outsider(what: str) -> NoReturn:
    rank = dist.get_rank(group=dist.group.WORLD)
    raise PlanError(
        f"wanted a worker of the {what} that the step trains over, got rank {rank}, which is not in it; make "
        "the step on the ranks that are"
    )
