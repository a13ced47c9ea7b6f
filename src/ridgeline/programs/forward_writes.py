"""Has torch's compiler keep what a forward pass writes into its inputs.

A value that is written into a buffer (a count, an average) and that backward needs may be computed again
there from the buffer, which by then holds the new value: gradients come out wrong. So such values are saved.
"""

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils.checkpoint import CheckpointPolicy

_COPY = torch.ops.aten.copy_.default


class SaveWrites(CustomGraphPass):
    """Marks, in the graph of forward and backward, what reads inputs that the forward pass writes."""

    def __call__(self, graph: fx.Graph) -> None:
        """Forbid to compute those again."""
        for node in graph.find_nodes(op="call_function", target=_COPY):
            target = node.args[0]
            if isinstance(target, fx.Node) and target.op == "placeholder":
                _save_readers(target)

    def uuid(self) -> str:
        """What distinguishes one version of this pass from another in the compiler's cache."""
        return "ridgeline.save_writes.1"


def _save_readers(node: fx.Node) -> None:
    """Save what is computed from a tensor; views of it are read through."""
    for user in node.users:
        # The write itself gives what is in the buffer afterwards, which backward may read as it is.
        if user.target is _COPY or user.op != "call_function":
            continue
        if getattr(user.target, "is_view", False):
            _save_readers(user)
        else:
            user.meta["recompute"] = CheckpointPolicy.MUST_SAVE
