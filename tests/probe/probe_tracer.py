"""A small eager tracer that makes the ops of one step, so that probe tests need no other part."""

import json

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from ridgeline.workload import Op, Parameter, TensorSpec, Workload


class Tracer(TorchDispatchMode):
    """Records every aten call with its inputs, outputs and the ops it depends on."""

    def __init__(self, roles):
        super().__init__()
        self.roles = dict(roles)  # storage pointer -> role
        self.phase = "forward"
        self.ops = []
        self._made = {}  # storage pointer -> indices of the ops that wrote it, latest view last
        self._keep = []  # keeps storages alive, so that pointers stay unique

    def _spec(self, tensor, role):
        return TensorSpec(
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            dtype=str(tensor.dtype).removeprefix("torch."),
            role=role,
        )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace != "aten":
            return func(*args, **kwargs)
        inputs = []

        def encode(value):
            if isinstance(value, torch.Tensor):
                inputs.append(value)
                return {"tensor": len(inputs) - 1}
            if isinstance(value, list | tuple):
                return [encode(inner) for inner in value]
            if isinstance(value, torch.dtype):
                return {"dtype": str(value).removeprefix("torch.")}
            if isinstance(value, torch.device):
                return {"device": value.type}
            if isinstance(value, torch.layout):
                return {"layout": str(value).removeprefix("torch.")}
            if isinstance(value, torch.memory_format):
                return {"memory_format": str(value).removeprefix("torch.")}
            return value

        arguments = json.dumps(
            {"args": encode(list(args)), "kwargs": {k: encode(v) for k, v in kwargs.items()}}
        )
        before = [self._spec(t, self._role(t)) for t in inputs]
        deps = sorted({d for t in inputs for d in self._made.get(self._key(t), ())})
        result = func(*args, **kwargs)
        outputs = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)]
        # Storages only: autograd clones gradients that somebody else holds.
        self._keep += [t.untyped_storage() for t in outputs]
        index = len(self.ops)
        for tensor in outputs:
            self._made.setdefault(self._key(tensor), []).append(index)
        name = str(func)
        self.ops.append(
            Op(
                name=name,
                phase=self.phase,
                module="",
                family="view" if func.is_view else "other",
                dtype=before[0].dtype if before else "float32",
                inputs=tuple(before),
                outputs=tuple(self._spec(t, self._role(t)) for t in outputs),
                arguments=arguments,
                flops=0,
                bytes_read=0,
                bytes_written=0,
                dependencies=tuple(deps),
            )
        )
        return result

    def _key(self, tensor):
        return tensor.untyped_storage().data_ptr() or id(tensor)

    def _role(self, tensor):
        return self.roles.get(self._key(tensor), "activation")


def trace(model, loss_fn, optimizer, batch):
    """The workload of one real step; the optimizer must have its state already."""
    roles = {p.untyped_storage().data_ptr(): "parameter" for p in model.parameters()}
    roles |= {b.untyped_storage().data_ptr(): "buffer" for b in model.buffers()}
    roles |= {t.untyped_storage().data_ptr(): "batch" for t in batch}
    for state in optimizer.state.values():
        roles |= {
            v.untyped_storage().data_ptr(): "state"
            for v in state.values()
            if isinstance(v, torch.Tensor)
        }
    optimizer.zero_grad()
    tracer = Tracer(roles)
    with tracer:
        loss = loss_fn(model, batch)
        tracer.phase = "backward"
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                tracer.roles[p.grad.untyped_storage().data_ptr()] = "gradient"
        tracer.phase = "optimizer"
        optimizer.step()
    parameters = tuple(
        Parameter(
            name=name,
            shape=tuple(p.shape),
            dtype="float32",
            num_bytes=p.numel() * 4,
            is_trainable=True,
        )
        for name, p in model.named_parameters()
    )
    return Workload(
        name="test",
        device="cpu",
        samples=batch[0].shape[0],
        batch=(),
        ops=tuple(tracer.ops),
        parameters=parameters,
        ready_order=(),
        buffer_bytes=0,
        memory=(),
    )
