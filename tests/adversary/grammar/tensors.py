"""Tensors besides plain weights: buffers, views, shared parameters, tensors in containers; and results."""

from adversary.grammar.feature import Feature

BUFFERS = (
    Feature(
        name="counting buffer",
        init="self.register_buffer('count$n', torch.zeros(()))",
        forward="self.count$n.add_(1.0)\ny = y + self.count$n",
        changes={
            "in place": "$owner.count$n.fill_(5.0)",
            "replaced": "$owner.count$n = torch.full((), 7.0)",
        },
    ),
    Feature(
        name="reassigned buffer",
        init="self.register_buffer('mean$n', torch.zeros(4))",
        forward="self.mean$n = 0.9 * self.mean$n + 0.1 * y.detach().mean(0)\ny = y - self.mean$n",
        changes={"replaced": "$owner.mean$n = torch.ones(4)"},
    ),
    Feature(
        name="integer buffer",
        init="self.register_buffer('steps$n', torch.zeros((), dtype=torch.int64), persistent=False)",
        forward="self.steps$n += 1\ny = y / self.steps$n",
        changes={"in place": "$owner.steps$n.fill_(3)"},
    ),
    Feature(
        name="buffer or none",
        init="self.register_buffer('mask$n', None)",
        forward="if self.mask$n is not None:\n    y = y * self.mask$n",
        changes={
            "set": "$owner.mask$n = torch.tensor([1.0, 0.0, 1.0, 0.0])",
            "none": "$owner.mask$n = None",
        },
    ),
    Feature(
        name="table",
        init="self.register_buffer('table$n', torch.tensor([1.0, 2.0, 3.0, 4.0]))",
        forward="y = y * self.table$n.to(y.dtype)",
        changes={
            "dtype at its address": "$owner.table$n = $owner.table$n.view(torch.int32)",
            "strides at its address": "$owner.table$n = $owner.table$n.as_strided((4,), (0,))",
            "dimensions at its address": "$owner.table$n = $owner.table$n.view(1, 4)",
            "to double": "$owner.table$n = $owner.table$n.double()",
            "negative view": "$owner.table$n = torch._neg_view($owner.table$n)",
            "of another shape": "$owner.table$n = torch.tensor([[2.0], [3.0], [4.0]])",
            "length in place": "$owner.table$n.data = $owner.table$n.data[:1]",
            "resized": "$owner.table$n.resize_(1)",
            "dtype in place": "$owner.table$n.data = torch.tensor([4, 3, 2, 1])",
            "not persistent": "$owner._non_persistent_buffers_set.add('table$n')",
            "length at its address": "$owner.table$n = $owner.table$n[:1]",
        },
    ),
    Feature(
        name="expanded buffer",
        init="self.register_buffer('wide$n', torch.ones(1).expand(4))",
        forward="y = y * self.wide$n",
        changes={
            "replaced": "$owner.wide$n = torch.arange(4.0)",
            "contiguous": "$owner.wide$n = $owner.wide$n.contiguous() * 2",
        },
    ),
    Feature(
        name="batch norm",
        init="self.norm$n = nn.BatchNorm1d(4)",
        forward="y = self.norm$n(y)",
        changes={
            "momentum": "$owner.norm$n.momentum = 0.5",
            "epsilon": "$owner.norm$n.eps = 0.1",
            "evaluated": "$owner.norm$n.eval()",
            "statistics": "$owner.norm$n.running_mean.fill_(1.0)",
            "reset": "$owner.norm$n.reset_running_stats()",
            "without statistics": "$owner.norm$n.track_running_stats = False",
        },
    ),
)

SHARED = (
    Feature(
        name="tied weights",
        init="self.first$n, self.second$n = nn.Linear(4, 4), nn.Linear(4, 4)\n"
        "self.second$n.weight = self.first$n.weight",
        forward="y = self.second$n(torch.tanh(self.first$n(y)))",
        changes={
            "untied": "$owner.second$n.weight = nn.Parameter($owner.first$n.weight.detach() * 2)",
            "in place": "$owner.first$n.weight.data.mul_(0.5)",
            "tied anew": "$owner.first$n.weight = $owner.second$n.weight = nn.Parameter(torch.eye(4))",
        },
    ),
    Feature(
        name="kept view",
        init="self.under$n = nn.Linear(4, 4)\nself.view$n = self.under$n.weight.detach().t()",
        forward="y = self.under$n(y) @ self.view$n",
        changes={
            "in place": "$owner.under$n.weight.data.add_(0.5)",
            "replaced": "$owner.view$n = torch.eye(4)",
            "data replaced": "$owner.under$n.weight.data = torch.eye(4)",
        },
    ),
    Feature(
        name="tensors in containers",
        init="self.parts$n = [torch.ones(4), {'t': torch.zeros(4)}]",
        forward="y = y * self.parts$n[0] + self.parts$n[1]['t']",
        changes={
            "in place": "$owner.parts$n[0].mul_(2.0)",
            "element": "$owner.parts$n[1]['t'] = torch.ones(4)",
        },
    ),
    Feature(
        name="proxy parameter",
        init="self.proxy$n = [nn.Parameter(torch.ones(4))]",
        forward="y = y * self.proxy$n[0]",
        params="[part for module in model.modules() for part in getattr(module, 'proxy$n', ())]",
        changes={
            "in place": "$owner.proxy$n[0].data.mul_(2.0)",
            "frozen": "$owner.proxy$n[0].requires_grad_(False)",
            "replaced": "$owner.proxy$n[0] = nn.Parameter(torch.full((4,), 3.0))",
        },
    ),
    Feature(
        name="in-place arithmetic",
        forward="y = y.clone()\ny[:, 0] += 1.0\ny.mul_(2.0)",
    ),
    Feature(
        name="writes a view of a buffer",
        init="self.register_buffer('rows$n', torch.zeros(2, 4))",
        forward="self.rows$n[0].copy_(y.detach().mean(0))\ny = y + self.rows$n.sum(0)",
        changes={"in place": "self = $owner\nself.rows$n[1].fill_(1.0)"},
    ),
)

RESULTS = tuple(
    Feature(name=name, result=result, purposes=("call",))
    for name, result in (
        ("dictionary result", "{'y': y, 'k': 3, 'more': [y + 1.0]}"),
        ("pair result", "(y, y)"),
        ("view result", "y.t()"),
        ("part result", "y[:, 1:3]"),
        ("expanded result", "y.mean(0, keepdim=True).expand(3, 4)"),
        ("weight result", "(y, self.head.weight)"),
        ("input result", "(y, x)"),
        ("view of the input", "(y, x[:1])"),
        ("scalar result", "y.sum()"),
        ("named result", "Named(y, {'k': [y + 1.0, 3]})"),
        ("dataclass result", "Held(y, y * 2.0)"),
        (
            "input written",
            "(y, x.mul_(2.0) if x.is_floating_point() and not x.requires_grad else x)",
        ),
        ("part of the input written", "(y, x[..., :1].detach().fill_(0.5))"),
        (
            "result of other types",
            "(y > 0, y.argmax(-1), y.double(), y[:0], y.sum().item() > 0, None, 'text')",
        ),
        ("result without gradients", "(y.detach(), y)"),
        ("generated result", "tuple(part for part in y.unbind(-1))"),
    )
)
