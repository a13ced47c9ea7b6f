"""Where a captured graph copies its inputs from: other addresses in each launch.

A graph reads fixed addresses, so arguments have to be copied there. As a node of the graph the copy takes no
launch of its own, and the address that it reads can be changed between launches. On an H200's host the change
takes 3 us, a launch 5 us, and a launch of the copy alone 5.5 us; where the address is that of the launch
before, nothing is changed.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ridgeline.errors import CaptureError

_MEMCPY_NODE = 1  # cudaGraphNodeTypeMemcpy
_DEVICE_TO_DEVICE = 3  # cudaMemcpyDeviceToDevice


class _Pitched(ctypes.Structure):
    """`cudaPitchedPtr` of CUDA's `driver_types.h`."""

    _fields_ = (
        ("ptr", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
        ("xsize", ctypes.c_size_t),
        ("ysize", ctypes.c_size_t),
    )


class _Copy(ctypes.Structure):
    """`cudaMemcpy3DParms` of CUDA's `driver_types.h`: the parameters of a copy in a graph."""

    _fields_ = (
        ("src_array", ctypes.c_void_p),
        ("src_pos", ctypes.c_size_t * 3),
        ("src", _Pitched),
        ("dst_array", ctypes.c_void_p),
        ("dst_pos", ctypes.c_size_t * 3),
        ("dst", _Pitched),
        ("extent", ctypes.c_size_t * 3),
        ("kind", ctypes.c_int),
    )


@functools.cache
def _runtime() -> ctypes.CDLL | None:
    """The CUDA runtime that torch has loaded; None where it is another one (ROCm's), or none."""
    # The symbols of this process: another copy of the runtime would not know torch's graphs.
    library = ctypes.CDLL(None)
    names = (
        "cudaGraphGetNodes", "cudaGraphNodeGetType", "cudaGraphMemcpyNodeGetParams",
        "cudaGraphExecMemcpyNodeSetParams1D", "cudaGetErrorString", "cudaGetLastError",
    )  # fmt: skip
    if not all(hasattr(library, name) for name in names):
        return None
    library.cudaGetErrorString.restype = ctypes.c_char_p
    set_source = library.cudaGraphExecMemcpyNodeSetParams1D
    # Else ctypes would pass pointers as 32-bit integers.
    set_source.argtypes = (
        *(ctypes.c_void_p,) * 4, ctypes.c_size_t, ctypes.c_int,
    )  # fmt: skip
    return library


def can_redirect(inputs: Sequence[Tensor]) -> bool:
    """Whether graphs can copy these inputs themselves: there are some, all on a GPU of CUDA's."""
    return bool(inputs) and all(x.is_cuda and x.numel() for x in inputs) and _runtime() is not None


def redirections(
    graph: torch.cuda.CUDAGraph, inputs: Sequence[Tensor]
) -> list[Callable[[int], None]]:
    """For each input a function that makes later launches copy it from another address.

    The memory there is of the same GPU, and as large as the input.

    Args:
        graph: Made with `keep_graph=True` and instantiated; begins with a copy into each of the inputs.
        inputs: The targets of the copies, dense.

    Raises:
        CaptureError: a copy is not there. The functions: CUDA refused the address.
    """
    nodes = _copies_in(graph.raw_cuda_graph())
    missing = [x for x in inputs if x.data_ptr() not in nodes]
    if missing:
        raise CaptureError(
            f"wanted {len(inputs)} inputs copied inside a captured graph, found no such copy for "
            f"{len(missing)} of them, the first of shape {list(missing[0].shape)}; use mode='compiled'"
        )
    executable = graph.raw_cuda_graph_exec()
    return [_redirection(executable, nodes[x.data_ptr()], x) for x in inputs]


def _redirection(executable: int, node: int, target: Tensor) -> Callable[[int], None]:
    runtime = _runtime()
    assert runtime is not None
    set_source = runtime.cudaGraphExecMemcpyNodeSetParams1D
    before = ctypes.c_void_p(executable), ctypes.c_void_p(node), ctypes.c_void_p(target.data_ptr())
    after = (
        ctypes.c_size_t(target.numel() * target.element_size()),
        ctypes.c_int(_DEVICE_TO_DEVICE),
    )

    def redirect(address: int) -> None:
        code = set_source(*before, address, *after)
        if code:
            raise CaptureError(
                f"wanted a captured graph to copy its input from {address:#x}, got {_text(code)}; give the "
                "argument in memory that torch allocated on the GPU of the example"
            )

    return redirect


def _copies_in(graph: int) -> dict[int, int]:
    """Nodes that copy memory, by the address that they copy to."""
    runtime = _runtime()
    assert runtime is not None
    handle, num = ctypes.c_void_p(graph), ctypes.c_size_t()
    _check(runtime.cudaGraphGetNodes(handle, None, ctypes.byref(num)))
    nodes = (ctypes.c_void_p * num.value)()
    _check(runtime.cudaGraphGetNodes(handle, nodes, ctypes.byref(num)))
    copies: dict[int, int] = {}
    for node in nodes:
        kind = ctypes.c_int()
        _check(runtime.cudaGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
        if kind.value == _MEMCPY_NODE:
            copy = _Copy()
            _check(runtime.cudaGraphMemcpyNodeGetParams(ctypes.c_void_p(node), ctypes.byref(copy)))
            copies.setdefault(copy.dst.ptr or 0, node)  # the first: a function may write its inputs
    return copies


def _check(code: int) -> None:
    if code:
        raise CaptureError(
            f"wanted the nodes of a captured graph, got {_text(code)}; use mode='compiled'"
        )


def _text(code: int) -> str:
    """What an error code of the runtime means; clears the error, which no later call should see."""
    runtime = _runtime()
    assert runtime is not None
    runtime.cudaGetLastError()
    return str(runtime.cudaGetErrorString(code).decode())
