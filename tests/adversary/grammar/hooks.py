"""Hooks: those that a model comes with, and what they read."""

from adversary.grammar.feature import Feature

HOOKS = (
    Feature(
        name="forward hook",
        init="by$n = self.by$n = [2.0]\nself.handles$n = []\nself.hooked$n = nn.Linear(4, 4)\n"
        "self.hooked$n.register_forward_hook(lambda module, args, out: out * by$n[0])",
        forward="y = self.hooked$n(y)",
        changes={
            "what it reads": "$owner.by$n[0] = 3.0",
            "another": "$owner.handles$n.append($owner.hooked$n.register_forward_hook(\n"
            "    lambda module, args, out: out + 1.0))",
            "removed": "while $owner.handles$n:\n    $owner.handles$n.pop().remove()",
            "before the first": "$owner.hooked$n.register_forward_hook(\n"
            "    lambda module, args, out: out - 1.0, prepend=True)",
        },
    ),
    Feature(
        name="forward pre-hook",
        init="self.early$n = nn.Linear(4, 4)\nself.add$n = 1.0\n"
        "self.early$n.register_forward_pre_hook(lambda module, args: (args[0] + self.add$n,))",
        forward="y = self.early$n(y)",
        changes={
            "what it reads": "$owner.add$n = 2.0",
            "all removed": "$owner.early$n._forward_pre_hooks.clear()",
        },
    ),
    Feature(
        name="hook that counts",
        top="SEEN$n = []",
        init="self.counted$n = nn.Identity()\n"
        "self.counted$n.register_forward_hook(lambda module, args, out: SEEN$n.append(1))",
        forward="y = self.counted$n(y)",
        changes={"forgotten": "SEEN$n.clear()"},
    ),
    Feature(
        name="backward hook",
        init="self.back$n, self.halves$n = nn.Linear(4, 4), [0.5]\n"
        "self.back$n.register_full_backward_hook(\n"
        "    lambda module, inputs, outputs: tuple(g * self.halves$n[0] for g in inputs))",
        forward="y = self.back$n(y)",
        changes={
            "what it reads": "$owner.halves$n[0] = 2.0",
            "removed": "$owner.back$n._backward_hooks.clear()",
        },
        purposes=("step",),
    ),
    Feature(
        name="gradient hook",
        init="self.graded$n, self.times$n = nn.Linear(4, 4), [2.0]\n"
        "self.graded$n.weight.register_hook(lambda grad: grad * self.times$n[0])",
        forward="y = self.graded$n(y)",
        changes={"what it reads": "$owner.times$n[0] = 5.0"},
        purposes=("step",),
    ),
    Feature(
        name="tensor hook",
        init="self.slope$n = 2.0",
        forward="if y.requires_grad:\n    y.register_hook(lambda grad: grad * self.slope$n)",
        changes={"what it reads": "$owner.slope$n = 3.0"},
        purposes=("step",),
    ),
)
