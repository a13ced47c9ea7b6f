"""Torch's own machinery inside of a forward: regions, functions of autograd, transforms, recomputing, types."""

from adversary.grammar.feature import Feature

REGIONS = (
    Feature(
        name="without gradients inside",
        init="self.keeps$n = False",
        forward="with torch.set_grad_enabled(self.keeps$n and torch.is_grad_enabled()):\n    mean$n = y.mean(0)\n"
        "with torch.no_grad():\n    most$n = y.abs().max() + 1.0\ny = (y - mean$n) / most$n",
        changes={"kept": "$owner.keeps$n = True"},
    ),
    Feature(
        name="gradients inside",
        init="self.step$n = 0.1",
        forward="with torch.enable_grad():\n    at$n = y.detach().requires_grad_()\n"
        "    slope$n, = torch.autograd.grad(at$n.square().sum(), at$n)\ny = y - self.step$n * slope$n",
        changes={"number": "$owner.step$n = 0.5"},
    ),
    Feature(
        name="autocast inside",
        init="self.narrow$n = nn.Linear(4, 4)\nself.casts$n = True",
        forward="with torch.autocast('cpu', torch.bfloat16, enabled=self.casts$n):\n"
        "    half$n = self.narrow$n(y)\ny = y + (half$n.dtype == torch.bfloat16) + 0.01 * half$n.float()",
        changes={"off": "$owner.casts$n = False"},
    ),
    Feature(
        name="autocast left inside",
        init="self.exact$n = nn.Linear(4, 4)",
        forward="with torch.autocast('cpu', enabled=False):\n    y = self.exact$n(y.float())",
    ),
    Feature(
        name="function of autograd",
        top="class Doubled$n(torch.autograd.Function):\n    slope = 3.0\n\n    @staticmethod\n"
        "    def forward(ctx, y, by):\n        ctx.save_for_backward(y)\n        ctx.by = by\n        return y * by\n\n"
        "    @staticmethod\n    def backward(ctx, grad):\n        y, = ctx.saved_tensors\n"
        "        return grad * Doubled$n.slope * ctx.by + 0 * y, None",
        init="self.by$n = 2.0",
        forward="y = Doubled$n.apply(y, self.by$n)",
        changes={
            "number": "$owner.by$n = 3.0",
            "slope": "Doubled$n.slope = 0.5",
            "forward": "Doubled$n.forward = staticmethod(lambda ctx, y, by:\n"
            "    (ctx.save_for_backward(y), setattr(ctx, 'by', by), y + by)[-1])",
        },
    ),
    Feature(
        name="straight through",
        init="self.levels$n = 4.0",
        forward="y = y + (torch.round(y * self.levels$n) / self.levels$n - y).detach()",
        changes={"number": "$owner.levels$n = 2.0"},
    ),
    Feature(
        name="mapped over rows",
        init="self.by$n = 2.0",
        forward="y = torch.func.vmap(lambda row: row * self.by$n + row.sum())(y)",
        changes={"number": "$owner.by$n = 3.0"},
    ),
    Feature(
        name="gradient of a function",
        init="self.by$n = 2.0",
        forward="y = y + torch.func.grad(lambda at: (at * self.by$n).square().sum())(y)",
        changes={"number": "$owner.by$n = 3.0"},
    ),
    Feature(
        name="called with other weights",
        init="self.called$n = nn.Linear(4, 4)\nself.by$n = 2.0",
        forward="weights$n = {k: v * self.by$n for k, v in self.called$n.named_parameters()}\n"
        "y = torch.func.functional_call(self.called$n, weights$n, (y,))",
        changes={
            "number": "$owner.by$n = 0.5",
            "weight": "$owner.called$n.weight.data.mul_(2.0)",
        },
    ),
    Feature(
        name="recomputed",
        top="import torch.utils.checkpoint",
        init="self.inner$n, self.drop$n = nn.Linear(4, 4), nn.Dropout(0.25)",
        forward="y = torch.utils.checkpoint.checkpoint(\n"
        "    lambda y: self.drop$n(torch.tanh(self.inner$n(y))), y, use_reentrant=False)",
        changes={
            "probability": "self = $owner\nself.drop$n.p = 0.5",
            "weight": "$owner.inner$n.weight.data.mul_(2.0)",
        },
    ),
    Feature(
        name="scripted function",
        top="def scripted$n(y, by: float):\n    return torch.relu(y) * by\n\n\n"
        "SCRIPTED$n = torch.jit.script(scripted$n)",
        init="self.by$n = 2.0",
        forward="y = SCRIPTED$n(y, self.by$n)",
        changes={"number": "$owner.by$n = 3.0"},
    ),
    Feature(
        name="double inside",
        forward="y = (y.double() * (1.0 + 1e-9)).cumsum(-1).to(y.dtype) + y.to(torch.bfloat16).to(y.dtype)",
    ),
    Feature(
        name="whole numbers inside",
        init="self.register_buffer('places$n', torch.tensor([2, 0, 3, 1]))",
        forward="y = y[:, self.places$n] if y.dim() == 2 else y\n"
        "y = y + (y > 0).to(torch.int64).sum(-1, keepdim=True) // 2",
        changes={"in place": "$owner.places$n.copy_(torch.tensor([0, 1, 2, 3]))"},
    ),
    Feature(
        name="masks inside",
        init="self.register_buffer('mask$n', torch.tensor([True, False, True, True]))",
        forward="y = y.masked_fill(~self.mask$n, 0.0)\ny = torch.where(self.mask$n & (y > 0), y * 2.0, y)",
        changes={"in place": "$owner.mask$n.logical_not_()", "all": "$owner.mask$n.fill_(True)"},
    ),
    Feature(
        name="tensors without dimensions",
        init="self.register_buffer('gain$n', torch.tensor(2.0))\nself.zero$n = torch.tensor(1)",
        forward="y = y * self.gain$n + self.zero$n + y.mean() * 0.5",
        changes={
            "in place": "$owner.gain$n.fill_(3.0)",
            "to one element": "$owner.gain$n = torch.ones(1)",
            "to a number": "$owner.zero$n = 2",
        },
    ),
    Feature(
        name="tensors without elements",
        init="self.register_buffer('none$n', torch.zeros(0, 4))",
        forward="y = y + torch.cat([self.none$n, y.detach().reshape(-1, 4)]).mean(0) + self.none$n.sum()",
        changes={"grown": "$owner.none$n = torch.ones(2, 4)"},
    ),
    Feature(
        name="as many as the data says",
        forward="kept$n = y.detach()[y.detach() > 0]\ny = y + kept$n.sum() / max(1, kept$n.numel())",
    ),
    Feature(
        name="images inside",
        init="self.image$n = nn.Conv2d(4, 4, 1).to(memory_format=torch.channels_last)",
        forward="y = self.image$n(y.reshape(-1, 4, 1, 1).expand(-1, 4, 2, 2).contiguous(\n"
        "    memory_format=torch.channels_last)).mean((2, 3)).view(y.shape)",
        changes={"contiguous": "$owner.image$n.to(memory_format=torch.contiguous_format)"},
    ),
)
