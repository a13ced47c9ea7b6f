"""Workloads with data flow: chains of blocks, each a matrix product and operators that can be fused.

Every tensor has the same number of float32 elements, so bytes can be counted by hand in tensors.
"""

from collections.abc import Sequence

import msgspec
from hypothesis import strategies as st

from ridgeline.workload import MemoryPoint, Op, Parameter, TensorSpec, Workload

ELEMENT_BYTES = 4


def tensor(elements: int, role: str = "activation") -> TensorSpec:
    """A flat float32 tensor."""
    return TensorSpec(shape=(elements,), stride=(1,), dtype="float32", role=role)


class Builder:
    """Adds operators one by one; `op` returns the index of the new one."""

    def __init__(self, elements: int = 1 << 20) -> None:
        self.elements = elements
        self.ops: list[Op] = []

    def op(
        self,
        phase: str,
        family: str,
        before: Sequence[int] = (),
        *,
        more: Sequence[TensorSpec] = (),
        output: TensorSpec | None = None,
        module: str = "",
        name: str | None = None,
        flops: int = 0,
        waits: Sequence[int] = (),
    ) -> int:
        """An operator over the first outputs of `before` and over `more`; `waits` only order it."""
        output = tensor(self.elements) if output is None else output
        inputs = (*(self.ops[i].outputs[0] for i in before), *more)
        # The number of operators so far tells equal ones apart in their keys.
        self.ops.append(
            Op(
                name=name or f"aten.{family}.default",
                phase=phase,
                module=module,
                family=family,
                dtype="float32",
                inputs=inputs,
                outputs=(output,),
                arguments="[]",
                flops=flops,
                bytes_read=0 if family == "view" else sum(map(_bytes, inputs)),
                bytes_written=0 if family == "view" else _bytes(output),
                dependencies=tuple(sorted({*before, *waits})),
            )
        )
        return len(self.ops) - 1

    def workload(
        self, *, device: str = "cpu", ready: Sequence[int] = (), name: str = "chain"
    ) -> Workload:
        """The step so far; a gradient is ready after each op of `ready`."""
        size = self.elements * ELEMENT_BYTES
        parameters = tuple(
            Parameter(
                name=f"p{n}",
                shape=(self.elements,),
                dtype="float32",
                num_bytes=size,
                is_trainable=True,
                ready_op=op,
            )
            for n, op in enumerate(ready)
        )
        return Workload(
            name=name,
            device=device,
            samples=8,
            batch=(tensor(self.elements, "batch"),),
            ops=tuple(self.ops),
            parameters=parameters,
            ready_order=tuple(p.name for p in parameters),
            buffer_bytes=0,
            memory=tuple(
                MemoryPoint(
                    op=n,
                    parameter_bytes=size * len(parameters),
                    gradient_bytes=0,
                    state_bytes=0,
                    activation_bytes=size,
                )
                for n in range(len(self.ops))
            ),
        )


def make_chain(
    runs: Sequence[int] = (3, 3),
    *,
    elements: int = 1 << 20,
    flops: int = 1_000_000,
    device: str = "cpu",
    is_numbered: bool = True,
) -> Workload:
    """A chain of blocks: a matrix product, then `runs[k]` elementwise operators; SGD with momentum.

    Backward goes through the elementwise operators the other way round, then has a product for the
    weight's gradient and one for the input's.
    """
    b = Builder(elements)
    parameter = tensor(elements, "parameter")
    gradient = tensor(elements, "gradient")
    state = tensor(elements, "state")
    words = ("layers.{}" if is_numbered else "layer{}").format
    last: tuple[int, ...] = ()
    for number, run in enumerate(runs):
        path = words(number)
        more = (parameter,) if last else (tensor(elements, "batch"), parameter)
        at = b.op("forward", "matmul", last, more=more, module=f"{path}.linear", flops=flops)
        for _ in range(run):
            at = b.op("forward", "elementwise", (at,), module=f"{path}.act")
        last = (at,)
    ready = []
    for number, run in reversed(list(enumerate(runs))):
        path = words(number)
        for _ in range(run):
            last = (b.op("backward", "elementwise", last, module=f"{path}.act"),)
        ready.append(
            b.op("backward", "matmul", last, output=gradient, module=f"{path}.linear", flops=flops)
        )
        at = b.op(
            "backward", "matmul", last, more=(parameter,), module=f"{path}.linear", flops=flops
        )
        last = (at,)
    for op in ready:
        decayed = b.op("optimizer", "elementwise", (op,), more=(parameter,))
        moved = b.op("optimizer", "elementwise", (decayed,), more=(state,), output=state)
        b.op(
            "optimizer", "elementwise", (moved,), more=(parameter,), output=parameter,
            waits=(decayed,),
        )  # fmt: skip
    return b.workload(device=device, ready=ready)


def on_gpu(workload: Workload) -> Workload:
    """The same step on a GPU."""
    return msgspec.structs.replace(workload, device="cuda")


def _bytes(spec: TensorSpec) -> int:
    return spec.shape[0] * ELEMENT_BYTES


chains = st.builds(
    make_chain,
    st.lists(st.integers(0, 4), min_size=1, max_size=5),
    elements=st.integers(1, 1 << 22),
    flops=st.integers(0, 10_000_000),
    device=st.just("cuda"),
)
"""Steps of a GPU whose operators feed each other."""


@st.composite
def flows(draw: st.DrawFn) -> Workload:
    """Any acyclic data flow over operators of several families, phases and modules."""
    b = Builder(elements=8)
    for index in range(draw(st.integers(1, 25))):
        family = draw(
            st.sampled_from(("elementwise", "elementwise", "matmul", "reduction", "view", "copy"))
        )
        before = draw(st.lists(st.integers(0, index - 1), max_size=3, unique=True)) if index else []
        output = tensor(1 if family == "reduction" else 8, draw(st.sampled_from(_ROLES)))
        third = index // 9
        phase = ("forward", "backward", "optimizer")[min(third, 2)]
        module = draw(st.sampled_from(("layers.0.a", "layers.1.a", "head")))
        b.op(phase, family, sorted(before), output=output, module=module)
    return b.workload()


_ROLES = ("activation", "activation", "gradient")
