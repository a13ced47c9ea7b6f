"""What a CUDA graph cannot hold: the rules, and which operators and functions break them, as data.

A capture records what the device is asked to do. So nothing in it may wait for the device, copy from
memory that the driver must first pin, or depend on a value that only the host sees.

Source: CUDA Programming Guide, "CUDA Graphs" (prohibited and unhandled operations); PyTorch notes, "CUDA
semantics", section on graphs; kernels that read from the device: ATen/native (IndexKernel, LinearAlgebra,
LossCTC, EmbeddingBag, SVD through cuSOLVER).
"""

from typing import NamedTuple


class Rule(NamedTuple):
    """One thing that a capture asks for: what is wanted, why, and what to do instead."""

    wanted: str
    reason: str
    remedy: str


RULES: dict[str, Rule] = {
    "host-sync": Rule(
        "values that stay on the device",
        "the host waits for the device to read it, and a replay would keep using what was read at capture",
        "keep it a tensor (torch.where, a mask as a factor), or read it from the result of the step",
    ),
    "host-copy": Rule(
        "results that stay on the device",
        "the copy to the host is waited for, and would hold the values seen at capture",
        "copy what the step returns, after the step",
    ),
    "unpinned-copy": Rule(
        "data that is on the device already",
        "a copy from host memory that is not pinned, or not requested with non_blocking=True, makes the host "
        "wait",
        "put it in the batch or a buffer of the model, or make it on the device (torch.full, torch.arange)",
    ),
    "pinning": Rule(
        "memory pinned before the step",
        "pinning allocates host memory through the driver, which a capture does not allow",
        "pin the tensor once, before the step; rl.feed does it for batches",
    ),
    "host-tensor": Rule(
        "every tensor of the step on the device",
        "a tensor on the host is read once, at capture, and every replay repeats what it held then",
        "move it to the device before: register_buffer in the model, or a leaf of the batch",
    ),
    "dynamic-shape": Rule(
        "shapes that do not depend on values",
        "the host waits to learn how many elements there are, and a replay would keep that number",
        "use a form of fixed shape: torch.where, masked_fill, a weight of zero, output_size=",
    ),
    "host-randomness": Rule(
        "random numbers drawn on the device",
        "it is drawn on the host, once, at capture, and every replay repeats it",
        "draw with device= on the device of the step, or pass it in the batch",
    ),
    "own-generator": Rule(
        "the default generator of the device",
        "a graph advances the default generator only; another one would repeat its numbers or fail",
        "leave out generator=, and seed with torch.manual_seed before the step",
    ),
    "random-state": Rule(
        "random state that the step leaves alone",
        "seeding and reading the state are host work: refused in a capture, or done once and never again",
        "seed before the step",
    ),
    "checkpoint": Rule(
        "activation checkpoints that keep no random state",
        "reading and putting back the state is host work, refused in a capture",
        "give them preserve_rng_state=False if they hold no dropout, or use execution='compiled+graph': "
        "there the compiler may keep what was drawn",
    ),
    "sparse": Rule(
        "dense tensors",
        "the number of non-zero entries depends on the data, so the host waits for it",
        "make the gradient dense, for example nn.Embedding(sparse=False)",
    ),
    "gradient-none": Rule(
        "gradients that stay where they are",
        "what is set to None gives its memory to other operators, while every replay writes it again",
        "leave zeroing to the step, or clear the gradient in place with grad.zero_()",
    ),
    "moved-state": Rule(
        "parameters and buffers changed in place",
        "the name gets another tensor, while every replay reads the one of the capture",
        "write into it: copy_, add_, lerp_",
    ),
    "python-state": Rule(
        "a step that changes tensors in place only",
        "Python runs once, at capture: a hidden state or a count stays what it was then in every replay",
        "keep it in a buffer of the model and write into it (copy_, add_), or do it after each training step",
    ),
    "not-capturable": Rule(
        "operators that a CUDA graph can hold",
        "torch marks it as unsafe in a graph",
        "use another operator, or an execution mode without a graph",
    ),
    "optimizer": Rule(
        "an optimizer whose step runs on the device alone",
        "it has neither a capturable nor a fused form for these settings, so every step needs the host",
        "use one that has (SGD, Adam, AdamW, RMSprop, ...), or an execution mode without a graph",
    ),
    "own-step": Rule(
        "an optimizer with a step of torch's own",
        "what another one reads or counts in Python would be baked in",
        "let it step outside of the graph, as plans that capture do, or use one of torch",
    ),
    "learning-rate": Rule(
        "a learning rate that lives in a tensor",
        "a Python number is baked in at capture, and schedulers no longer have an effect",
        "keep group['lr'] a 0-d tensor on the device, and never read it on the host",
    ),
    "rate-read": Rule(
        "an update that leaves the learning rate on the device",
        "its form for one tensor at a time reads the learning rate on the host",
        "leave foreach at None or True, and differentiable off",
    ),
}  # fmt: skip


class Finding(NamedTuple):
    """Something in a program that a CUDA graph cannot hold; `str()` gives the whole message.

    Attributes:
        rule: Name in `RULES`, which say why it cannot be captured, and what to write instead.
        op: The operator or Python call, e.g. `tensor.item()` or `aten.nonzero`.
        line: Where the user's code does it: `net.py:12 in forward`.
    """

    rule: str
    op: str
    line: str

    def __str__(self) -> str:
        wanted, reason, remedy = RULES[self.rule]
        return f"wanted {wanted}, got {self.op} at {self.line}: {reason}; {remedy}"


HOST_READS: dict[str, str] = {
    "torch.Tensor.item": "tensor.item()",
    "torch.Tensor.__float__": "float(tensor)",
    "torch.Tensor.__int__": "int(tensor)",
    "torch.Tensor.__bool__": "bool(tensor)",
    "torch.Tensor.__complex__": "complex(tensor)",
    "torch.Tensor.__index__": "tensor as an index",
    "torch.Tensor.__contains__": "value in tensor",
    "torch.Tensor.__format__": "tensor in a format string",
    "torch.Tensor.__repr__": "printing a tensor",
    "torch.Tensor.tolist": "tensor.tolist()",
    "torch.Tensor.numpy": "tensor.numpy()",
    "torch.Tensor.__array__": "tensor as a numpy array",
    "torch.is_nonzero": "torch.is_nonzero()",
    "torch.equal": "torch.equal()",
    "torch.allclose": "torch.allclose()",
}
"""Functions that hand a tensor's value to Python, as torch names them, and as users write them."""

COPIES_FROM_HOST = ("torch.tensor", "torch.as_tensor", "torch.asarray", "torch.Tensor.new_tensor")
"""Functions that turn Python data into a tensor; with a device they copy, and no operator shows it."""

FROM_HOST = frozenset(("unpinned-copy", "host-tensor"))
"""Rules that a program breaks by what lies on the host; the compiler may make that on the device."""

_BY_RULE = {
    "host-sync": (
        "_local_scalar_dense item is_nonzero equal allclose _linalg_check_errors _linalg_eigvals linalg_eig "
        "linalg_eigvals _linalg_svd linalg_lstsq linalg_matrix_exp _ctc_loss _pack_padded_sequence "
        "embedding_renorm_"
    ),
    "pinning": "_pin_memory pin_memory",
    "dynamic-shape": (
        "nonzero argwhere masked_select _unique _unique2 unique_dim unique_consecutive bincount "
        "unique_dim_consecutive repeat_interleave index index_put index_put_ _index_put_impl_"
    ),
    "sparse": "_sparse_coo_tensor_with_dims_and_tensors sparse_coo_tensor _coalesce _to_sparse",
}
OPERATORS: dict[str, str] = {
    **{f"aten.{name}": rule for rule, names in _BY_RULE.items() for name in names.split()},
    "torchvision.nms": "dynamic-shape",
}
"""Operator to rule. Some break their rule only in one form: see `CONDITIONS` of `lint_judge`."""
