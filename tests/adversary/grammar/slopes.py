"""Gradients that code bends: stopped, turned, scaled, of several results; and losses that look into the model."""

from adversary.grammar.feature import Feature

SLOPES = (
    Feature(
        name="turned gradient",
        top="class Turned$n(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, y, by):\n"
        "        ctx.by = by\n        return y.view_as(y)\n\n    @staticmethod\n    def backward(ctx, grad):\n"
        "        return -ctx.by * grad, None",
        init="self.turn$n = 0.5",
        forward="y = Turned$n.apply(y, self.turn$n)",
        changes={"number": "$owner.turn$n = 2.0"},
        purposes=("step",),
    ),
    Feature(
        name="scaled gradient",
        init="self.share$n = 0.5",
        forward="y = y * self.share$n + (y * (1.0 - self.share$n)).detach()",
        changes={"number": "$owner.share$n = 0.25"},
        purposes=("step",),
    ),
    Feature(
        name="function of several results",
        top="class Several$n(torch.autograd.Function):\n    @staticmethod\n    def forward(y, weight):\n"
        "        place = y.argmax(-1)\n        return y @ weight, place, y.abs()\n\n    @staticmethod\n"
        "    def setup_context(ctx, inputs, output):\n        ctx.save_for_backward(*inputs)\n"
        "        ctx.mark_non_differentiable(output[1])\n\n    @staticmethod\n    def backward(ctx, grad, _, more):\n"
        "        y, weight = ctx.saved_tensors\n        flat, given = grad.reshape(-1, 4), y.reshape(-1, 4)\n"
        "        for_weight = given.t() @ flat if ctx.needs_input_grad[1] else None\n"
        "        return grad @ weight.t() + more * y.sign(), for_weight",
        init="self.core$n, self.frozen$n = nn.Parameter(torch.eye(4)), False",
        forward="core$n = self.core$n.detach() if self.frozen$n else self.core$n\n"
        "y, place$n, size$n = Several$n.apply(y, core$n)\ny = y + 0.1 * size$n + place$n.unsqueeze(-1)",
        changes={"frozen": "$owner.frozen$n = True"},
    ),
    Feature(
        name="function that writes",
        top="class Writing$n(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, y):\n"
        "        ctx.mark_dirty(y)\n        return y.mul_(2.0)\n\n    @staticmethod\n    def backward(ctx, grad):\n"
        "        return grad * 3.0",
        forward="y = Writing$n.apply(y + 0.0)",
    ),
    Feature(
        name="recomputed with reentry",
        top="import torch.utils.checkpoint",
        init="self.again$n = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.25), nn.Linear(4, 4))",
        forward="y = torch.utils.checkpoint.checkpoint(self.again$n, y, use_reentrant=True)\n"
        "y = torch.utils.checkpoint.checkpoint_sequential(self.again$n, 2, y, use_reentrant=False)",
        changes={
            "weight": "$owner.again$n[0].weight.data.mul_(2.0)",
            "replaced": "$owner.again$n[1] = nn.ReLU()",
        },
        purposes=("step",),
    ),
    Feature(
        name="kept gradient of an activation",
        init="self.seen$n = None",
        forward="if y.requires_grad:\n    y.retain_grad()\nself.seen$n = y",
        purposes=("step",),
    ),
    Feature(
        name="best of several",
        init="self.temperature$n = 1.0",
        forward="soft$n = torch.softmax(y / self.temperature$n, -1)\n"
        "hard$n = F.one_hot(soft$n.argmax(-1), 4).to(soft$n.dtype)\ny = y + hard$n - soft$n.detach() + soft$n",
        changes={"number": "$owner.temperature$n = 0.5"},
    ),
    Feature(
        name="code book",
        init="self.book$n = nn.Embedding(5, 4)\nself.register_buffer('uses$n', torch.zeros(5))",
        forward="flat$n = y.reshape(-1, 4)\nnear$n = torch.cdist(flat$n.detach().float(), self.book$n.weight.detach()).argmin(-1)\n"
        "code$n = self.book$n(near$n)\nif self.training:\n    with torch.no_grad():\n"
        "        self.uses$n.mul_(0.9).add_(torch.bincount(near$n, minlength=5), alpha=0.1)\n"
        "y = y + (code$n - flat$n).detach().view(y.shape) + 0.1 * (code$n - flat$n.detach()).square().mean()",
        changes={"in place": "$owner.book$n.weight.data.mul_(0.5)"},
    ),
)


def _loss(name: str, **more: object) -> Feature:
    return Feature(name=name, is_loss=True, purposes=("step",), **more)  # type: ignore[arg-type]


LOOKING = (
    _loss(
        "penalty left by a block",
        init="def leave$n(module, args, out):\n    module.penalty$n = out.square().mean()\n\n\n"
        "model.blocks[0].register_forward_hook(leave$n)",
        forward="loss = loss + 0.1 * getattr(model.blocks[0], 'penalty$n', 0.0)",
    ),
    _loss(
        "activations gathered by hooks",
        init="found$n = {}\nfor name, module in model.named_modules():\n    if isinstance(module, nn.Linear):\n"
        "        module.register_forward_hook(lambda m, a, out, name=name: found$n.__setitem__(name, out))",
        forward="loss = loss + 0.1 * sum(out.abs().mean() for out in found$n.values())\nfound$n.clear()",
    ),
    _loss(
        "penalty on a slope",
        init="weigh$n = [0.1]\nmodel.__dict__['weigh$n'] = weigh$n",
        forward="at$n = tensor_of(x).detach().to(torch.get_default_dtype()).requires_grad_()\n"
        "slope$n, = torch.autograd.grad(model(at$n).sum(), at$n, create_graph=True)\n"
        "loss = loss + weigh$n[0] * slope$n.square().mean()",
        changes={"set": "w.model.weigh$n[0] = 0.5"},
    ),
    _loss(
        "attacked input",
        init="bound$n = [0.1]\nmodel.__dict__['bound$n'] = bound$n",
        forward="at$n = tensor_of(x).detach().to(torch.get_default_dtype()).requires_grad_()\n"
        "slope$n, = torch.autograd.grad((model(at$n) - 0.5).square().mean(), at$n)\n"
        "loss = loss + model((at$n + bound$n[0] * slope$n.sign()).detach()).square().mean()",
        changes={"set": "w.model.bound$n[0] = 0.5"},
    ),
    _loss(
        "labels of classes",
        init="soft$n = {'label_smoothing': 0.1, 'reduction': 'mean'}\nmodel.__dict__['soft$n'] = soft$n",
        forward="labels$n = tensor_of(x).detach().float().argmax(-1).clamp(max=y.shape[-1] - 1)\n"
        "loss = loss + F.cross_entropy(y.reshape(-1, y.shape[-1]), labels$n.reshape(-1), **soft$n).mean()",
        changes={
            "smoothing": "w.model.soft$n['label_smoothing'] = 0.5",
            "sum": "w.model.soft$n['reduction'] = 'sum'",
        },
    ),
    _loss(
        "weights by running losses",
        init="running$n = torch.ones(2)\nmodel.__dict__['running$n'] = running$n",
        forward="terms$n = {'a': y.abs().mean(), 'b': y.square().mean()}\nwith torch.no_grad():\n"
        "    running$n.lerp_(torch.stack([*terms$n.values()]).to(running$n.dtype), 0.1)\n"
        "loss = loss + sum(term / (by + 1.0) for term, by in zip(terms$n.values(), running$n))",
        changes={"in place": "w.model.running$n.fill_(2.0)"},
    ),
    _loss(
        "loss of an object",
        top="class Criterion$n:\n    weights = {'a': 1.0, 'b': 0.5}\n\n    def __init__(self, kinds):\n"
        "        self.kinds = kinds\n\n    def term_a(self, y):\n        return y.abs().mean()\n\n"
        "    def term_b(self, y):\n        return (y - 1.0).square().mean()\n\n    def __call__(self, y):\n"
        "        return sum(self.weights[k] * getattr(self, f'term_{k}')(y) for k in self.kinds)",
        init="criterion$n = Criterion$n(['a'])\nmodel.__dict__['criterion$n'] = criterion$n",
        forward="loss = loss + criterion$n(y)",
        changes={
            "another": "w.model.criterion$n.kinds.append('b')",
            "weight": "Criterion$n.weights['a'] = 2.0",
        },
    ),
    _loss(
        "mixed inputs",
        forward="at$n = tensor_of(x)\nby$n = float(np.random.beta(0.5, 0.5))\n"
        "loss = loss + model(by$n * at$n + (1.0 - by$n) * at$n.flip(0)).square().mean()",
    ),
)
