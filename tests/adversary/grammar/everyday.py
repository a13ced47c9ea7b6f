"""What models of libraries do: states in records, writes by index, loops over time, parts that stay frozen."""

from adversary.grammar.feature import Feature

EVERYDAY = (
    Feature(
        name="record of tensors",
        top="class Parts$n(typing.NamedTuple):\n    low: torch.Tensor\n    high: torch.Tensor\n    by: float = 2.0\n\n\n"
        "@dataclasses.dataclass\nclass Mixed$n:\n    y: torch.Tensor\n    aux: typing.Any = None\n\n"
        "    def total(self):\n        return self.y if self.aux is None else self.y + self.aux",
        init="self.mixes$n = True",
        forward="parts$n = Parts$n(y * 0.5, y.abs())\n"
        "mixed$n = Mixed$n(parts$n.low * parts$n.by, parts$n.high if self.mixes$n else None)\n"
        "y = dataclasses.replace(mixed$n, y=mixed$n.y + 1.0).total()",
        changes={"none": "$owner.mixes$n = False", "method": "Mixed$n.total = lambda self: self.y"},
    ),
    Feature(
        name="state in a dictionary",
        init="self.adds$n = ['skip']",
        forward="state$n = {'y': y, 'skip': y * 0.5}\nstate$n |= {'late': state$n['y'].tanh()}\n"
        "state$n['y'] = state$n['y'] + sum(state$n[name] for name in self.adds$n)\ny = state$n.pop('y')",
        changes={"another": "$owner.adds$n.append('late')", "none": "$owner.adds$n.clear()"},
    ),
    Feature(
        name="skips on a stack",
        init="self.downs$n = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))\n"
        "for i in range(2):\n    setattr(self, f'up${n}_{i}', nn.Linear(4, 4))\nself.levels$n = 2",
        forward="stack$n = []\nfor down in self.downs$n[:self.levels$n]:\n    stack$n.append(y)\n    y = down(y)\n"
        "for i in reversed(range(self.levels$n)):\n    y = getattr(self, f'up${n}_{i}')(y) + stack$n.pop()",
        changes={"fewer": "$owner.levels$n = 1", "replaced": "$owner.up${n}_0 = nn.Tanh()"},
    ),
    Feature(
        name="writes by index",
        init="self.columns$n, self.value$n = [0, 2], 0.5",
        forward="y = y.clone()\ny[..., self.columns$n] = self.value$n\ny[..., 1::2] *= 2.0\n"
        "y[y > 1.5] = 0.0\ny.index_add_(-1, torch.tensor([3]), y.detach()[..., :1])",
        changes={"columns": "$owner.columns$n[0] = 3", "number": "$owner.value$n = 1.5"},
    ),
    Feature(
        name="contraction by text",
        init="self.sum$n, self.core$n = '...i,ij->...j', nn.Parameter(torch.eye(4) * 0.5)",
        forward="y = torch.einsum(self.sum$n, y, self.core$n)",
        changes={"transposed": "$owner.sum$n = '...i,ji->...j'"},
    ),
    Feature(
        name="complex numbers",
        init="angles$n = torch.linspace(0, 1, 2)\n"
        "self.register_buffer('turn$n', torch.polar(torch.ones(2), angles$n), persistent=False)",
        forward="pairs$n = torch.view_as_complex(y.float().reshape(*y.shape[:-1], 2, 2).contiguous())\n"
        "y = torch.view_as_real(pairs$n * self.turn$n).flatten(-2).to(y.dtype)\n"
        "y = y + torch.fft.irfft(torch.fft.rfft(y.float(), dim=-1) * 0.5, n=4, dim=-1)",
        changes={
            "in place": "$owner.turn$n.conj_physical_()",
            "replaced": "$owner.turn$n = $owner.turn$n.conj()",
        },
    ),
    Feature(
        name="loop over time",
        init="self.cell$n, self.times$n, self.stop$n = nn.GRUCell(4, 4), 3, None",
        forward="hidden$n, outs$n = torch.zeros_like(y), []\nfor t in range(self.times$n):\n    if t == self.stop$n:\n"
        "        break\n    hidden$n = self.cell$n(y, hidden$n)\n    outs$n.append(hidden$n)\nelse:\n    y = y * 0.5\n"
        "y = y + torch.stack(outs$n, dim=-1).mean(-1) if outs$n else y",
        changes={
            "longer": "$owner.times$n = 4",
            "stopped": "$owner.stop$n = 1",
            "at once": "$owner.stop$n = 0",
        },
    ),
    Feature(
        name="part that stays evaluated",
        init="self.fixed$n = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)).requires_grad_(False).eval()",
        methods="def train(self, mode=True):\n    super().train(mode)\n"
        "    for name, part in self.named_children():\n        if name.startswith('fixed'):\n            part.eval()\n"
        "    return self",
        forward="with torch.no_grad():\n    fixed$n = self.fixed$n(y)\ny = y + fixed$n",
        changes={
            "trained": "$owner.fixed$n.train()",
            "statistics": "$owner.fixed$n[0].running_mean.fill_(1.0)",
        },
    ),
    Feature(
        name="weight held in bounds",
        init="self.bounded$n, self.most$n = nn.Linear(4, 4), 0.25",
        forward="with torch.no_grad():\n    self.bounded$n.weight.clamp_(-self.most$n, self.most$n)\n"
        "    self.bounded$n.bias.data.div_(1.0 + self.bounded$n.bias.data.norm())\ny = self.bounded$n(y)",
        changes={
            "number": "$owner.most$n = 0.1",
            "weight": "$owner.bounded$n.weight.data.mul_(4.0)",
        },
    ),
    Feature(
        name="frozen by a flag",
        init="self.adapter$n, self.learns$n = nn.Linear(4, 4), True",
        forward="self.adapter$n.requires_grad_(self.learns$n)\ny = y + self.adapter$n(y)",
        changes={"frozen": "$owner.learns$n = False", "thawed": "$owner.learns$n = True"},
    ),
    Feature(
        name="part evaluated by forward",
        init="self.noise$n, self.noisy$n = nn.Dropout(0.5), True",
        forward="self.noise$n.train(self.training and self.noisy$n)\ny = self.noise$n(y)",
        changes={"quiet": "$owner.noisy$n = False"},
    ),
    Feature(
        name="table that grows",
        init="self.register_buffer('places$n', torch.linspace(0, 1, 3), persistent=False)",
        forward="if y.shape[0] > self.places$n.shape[0]:\n    self.places$n = torch.linspace(0, 1, y.shape[0])\n"
        "y = y + self.places$n[:y.shape[0], None].to(y.dtype) if y.dim() == 2 else y",
        changes={
            "shrunk": "$owner.places$n = torch.ones(1)",
            "in place": "$owner.places$n.add_(1.0)",
        },
    ),
    Feature(
        name="checked numbers",
        init="self.checks$n = True",
        forward="assert y.shape[-1] == 4\nif self.checks$n and torch.isnan(y).any():\n    raise ValueError('no numbers')\n"
        "assert not self.checks$n or bool(torch.isfinite(y.detach()).all()), y.shape",
        changes={"unchecked": "$owner.checks$n = False"},
    ),
    Feature(
        name="error of torch's caught",
        init="self.wide$n = torch.ones(4)",
        forward="try:\n    y = y + self.wide$n\nexcept RuntimeError:\n    y = y - 1.0\nfinally:\n    y = y * 0.5",
        changes={"too wide": "$owner.wide$n = torch.ones(5)"},
    ),
    Feature(
        name="experts",
        init="self.experts$n = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))\n"
        "self.gate$n, self.top$n = nn.Linear(4, 3), 2",
        forward="rows$n = y.reshape(-1, 4)\nbest$n, which$n = self.gate$n(rows$n).softmax(-1).topk(self.top$n)\n"
        "out$n = torch.zeros_like(rows$n)\nfor i, expert in enumerate(self.experts$n):\n"
        "    row$n, place$n = torch.where(which$n == i)\n"
        "    out$n = out$n.index_add(0, row$n, expert(rows$n[row$n]) * best$n[row$n, place$n, None])\n"
        "y = out$n.reshape(y.shape)",
        changes={"one": "$owner.top$n = 1", "replaced": "$owner.experts$n[0] = nn.Tanh()"},
    ),
    Feature(
        name="tensor of a number",
        init="self.rate$n = 2.0",
        forward="y = y * torch.tensor(self.rate$n) + y.new_full((4,), self.rate$n) / math.sqrt(y.shape[-1])\n"
        "y = y + torch.as_tensor([self.rate$n, 1.0, 0.0, 2.0]).to(y)",
        changes={"set": "$owner.rate$n = 3.0"},
    ),
    Feature(
        name="through NumPy",
        init="self.power$n = 0.5",
        forward="y = y + torch.from_numpy(np.abs(y.detach().cpu().numpy()) ** self.power$n).to(y)",
        changes={"number": "$owner.power$n = 2.0"},
    ),
    Feature(
        name="branch on compiling",
        forward="y = y * 2.0 if torch.compiler.is_compiling() or torch.jit.is_tracing() else y + 1.0",
    ),
    Feature(
        name="layer of another kind",
        init="self.kind$n = nn.ReLU()",
        forward="y = y * 2.0 if isinstance(self.kind$n, nn.ReLU) else y + 1.0\n"
        "y = y * 0.5 if type(self.kind$n).__name__ == 'ReLU' else self.kind$n(y)",
        changes={
            "another": "$owner.kind$n = nn.ReLU6()",
            "class": "$owner.kind$n.__class__ = nn.Tanh",
        },
    ),
    Feature(
        name="hook with names",
        init="self.named$n, self.shift$n = nn.Linear(4, 4), {'by': 1.0}\n"
        "self.named$n.register_forward_pre_hook(\n"
        "    lambda module, args, kwargs: ((), {'input': kwargs['input'] + self.shift$n['by']}), with_kwargs=True)\n"
        "self.named$n.register_forward_hook(\n"
        "    lambda module, args, kwargs, out: out + kwargs['input'] * 0.5, with_kwargs=True)",
        forward="y = self.named$n(input=y)",
        changes={"what it reads": "$owner.shift$n['by'] = 2.0"},
    ),
    Feature(
        name="method without gradients",
        init="self.register_buffer('rows$n', torch.zeros(6, 4))\n"
        "self.register_buffer('at$n', torch.zeros((), dtype=torch.long))",
        methods="@torch.no_grad()\ndef remember$n(self, y):\n    rows = y.detach().reshape(-1, 4)[:2].to(self.rows$n.dtype)\n"
        "    self.rows$n[int(self.at$n):int(self.at$n) + rows.shape[0]] = rows\n"
        "    self.at$n.copy_((self.at$n + rows.shape[0]) % 5)",
        forward="self.remember$n(y)\ny = y + self.rows$n.mean(0).to(y.dtype)",
        changes={"place": "$owner.at$n.fill_(2)", "emptied": "$owner.rows$n.zero_()"},
    ),
    Feature(
        name="layer of a transformer",
        init="self.encoder$n = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)\nself.causal$n = False",
        forward="rows$n = y.reshape(1, -1, 4)\nmask$n = nn.Transformer.generate_square_subsequent_mask(rows$n.shape[1])\n"
        "y = self.encoder$n(rows$n, src_mask=mask$n if self.causal$n else None).reshape(y.shape)",
        changes={
            "causal": "$owner.causal$n = True",
            "norm first": "$owner.encoder$n.norm_first = True",
            "evaluated": "$owner.encoder$n.eval()",
        },
    ),
    Feature(
        name="compiled inside",
        init="self.compiled$n, self.by$n = torch.compile(nn.Linear(4, 4), backend='eager'), 2.0",
        forward="y = self.compiled$n(y) * self.by$n",
        changes={
            "number": "$owner.by$n = 3.0",
            "weight": "$owner.compiled$n.weight.data.mul_(2.0)",
        },
    ),
    Feature(
        name="ensemble by one call",
        init="self.members$n = [nn.Linear(4, 4) for _ in range(2)]\n"
        "self.ensemble$n = nn.ModuleList(self.members$n)",
        forward="params$n, buffers$n = torch.func.stack_module_state(self.members$n)\n"
        "y = y + torch.func.vmap(\n    lambda p, b: torch.func.functional_call(self.members$n[0], (p, b), (y,)))(\n"
        "    {k: v.detach() for k, v in params$n.items()}, buffers$n).mean(0)",
        changes={"weight": "$owner.members$n[1].weight.data.mul_(2.0)"},
    ),
)
