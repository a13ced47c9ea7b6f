"""Modules and parameters in torch's containers, pruned and shared ones, and buffers that are views."""

from adversary.grammar.feature import Feature

CONTAINERS = (
    Feature(
        name="module dictionary",
        init="self.named$n = nn.ModuleDict({'a': nn.Linear(4, 4), 'b': nn.Tanh()})",
        forward="for name, part in self.named$n.items():\n    y = part(y) * (2.0 if name == 'a' else 1.0)",
        changes={
            "replaced": "$owner.named$n['b'] = nn.Sigmoid()",
            "added": "$owner.named$n['c'] = nn.ReLU()",
            "removed": "$owner.named$n._modules.pop('a', None)",
            "in another order": "$owner.named$n._modules['b'] = $owner.named$n._modules.pop('b')",
        },
    ),
    Feature(
        name="layers in a row",
        init="self.row$n = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU())",
        forward="y = self.row$n(y)",
        changes={
            "inserted": "$owner.row$n.insert(1, nn.Tanh())",
            "appended": "$owner.row$n.append(nn.Linear(4, 4))",
            "removed": "del $owner.row$n[-1]",
            "replaced": "$owner.row$n[0] = nn.Identity()",
            "epsilon": "for module in $owner.row$n:\n    if isinstance(module, nn.LayerNorm):\n        module.eps = 0.5",
        },
    ),
    Feature(
        name="parameter list",
        init="self.gains$n = nn.ParameterList([torch.ones(4), torch.full((4,), 2.0)])",
        forward="for gain in self.gains$n:\n    y = y * gain",
        changes={
            "appended": "$owner.gains$n.append(nn.Parameter(torch.full((4,), 0.5)))",
            "replaced": "$owner.gains$n[0] = nn.Parameter(torch.full((4,), 3.0))",
            "frozen": "$owner.gains$n[0].requires_grad_(False)",
        },
    ),
    Feature(
        name="parameter dictionary",
        init="self.table$n = nn.ParameterDict({'gain': torch.ones(4), 'shift': torch.zeros(4)})",
        forward="y = y * self.table$n['gain'] + self.table$n['shift'] + len(self.table$n)",
        changes={
            "added": "$owner.table$n['more'] = nn.Parameter(torch.ones(4))",
            "replaced": "$owner.table$n['gain'] = nn.Parameter(torch.full((4,), 3.0))",
        },
    ),
    Feature(
        name="pruned weight",
        top="import torch.nn.utils.prune as prune",
        init="self.pruned$n = nn.Linear(4, 4)\nprune.l1_unstructured(self.pruned$n, 'weight', 0.5)",
        forward="y = self.pruned$n(y)",
        changes={
            "again": "prune.random_unstructured($owner.pruned$n, 'weight', 0.25)",
            "mask": "if hasattr($owner.pruned$n, 'weight_mask'):\n    $owner.pruned$n.weight_mask[0] = 0.0",
            "for good": "if hasattr($owner.pruned$n, 'weight_mask'):\n    prune.remove($owner.pruned$n, 'weight')",
        },
    ),
    Feature(
        name="pruned later",
        top="import torch.nn.utils.prune as prune",
        init="self.whole$n = nn.Linear(4, 4)",
        forward="y = self.whole$n(y)",
        changes={
            "weight": "prune.l1_unstructured($owner.whole$n, 'weight', 0.5)",
            "rows": "prune.ln_structured($owner.whole$n, 'weight', 0.5, n=2, dim=0)",
        },
    ),
    Feature(
        name="module that stands twice",
        init="self.left$n = nn.Linear(4, 4)\nself.right$n = self.left$n",
        forward="y = self.right$n(torch.tanh(self.left$n(y)))",
        changes={
            "weight": "$owner.left$n.weight = nn.Parameter(torch.eye(4))",
            "apart": "$owner.right$n = copy.deepcopy($owner.left$n)\n$owner.right$n.bias.data.add_(1.0)",
        },
    ),
    Feature(
        name="buffers that are views",
        init="whole$n = torch.arange(8.0)\nself.register_buffer('low$n', whole$n[:4])\n"
        "self.register_buffer('high$n', whole$n[4:], persistent=False)\nself.register_buffer('all$n', whole$n)",
        forward="y = y + self.low$n * 0.5 - self.high$n * 0.25",
        changes={
            "through the whole": "$owner.all$n.mul_(2.0)",
            "one in place": "$owner.low$n.zero_()",
            "parted": "$owner.low$n = $owner.low$n.clone() + 1.0",
        },
    ),
    Feature(
        name="buffer that views a weight",
        init="self.viewed$n = nn.Linear(4, 4)\nself.register_buffer('view$n', self.viewed$n.weight.detach()[0])",
        forward="y = self.viewed$n(y) + self.view$n",
        changes={
            "weight in place": "$owner.viewed$n.weight.data.mul_(2.0)",
            "in place": "$owner.view$n.add_(1.0)",
            "persistence": "$owner.register_buffer('view$n', $owner.view$n, persistent=False)",
        },
    ),
    Feature(
        name="recurrent layer",
        init="self.recurrent$n = nn.GRU(4, 4, batch_first=True)\nself.hidden$n = None",
        forward="out$n, self.hidden$n = self.recurrent$n(y.reshape(1, -1, 4), self.hidden$n)\n"
        "self.hidden$n = self.hidden$n.detach()\ny = out$n.reshape(y.shape)",
        changes={
            "forgotten": "$owner.hidden$n = None",
            "set": "$owner.hidden$n = torch.ones(1, 1, 4)",
        },
    ),
    Feature(
        name="attention",
        init="self.attention$n = nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True)\nself.scores$n = False",
        forward="rows$n = y.reshape(1, -1, 4)\nmixed$n, scores$n = self.attention$n(\n"
        "    rows$n, rows$n, rows$n, need_weights=self.scores$n)\n"
        "y = mixed$n.reshape(y.shape) + (0.0 if scores$n is None else scores$n.mean())",
        changes={
            "scores": "$owner.scores$n = True",
            "dropout": "$owner.attention$n.dropout = 0.5",
            "evaluated": "$owner.attention$n.eval()",
        },
    ),
    Feature(
        name="embedding",
        init="self.embedded$n = nn.Embedding(8, 4, padding_idx=0)",
        forward="y = y + self.embedded$n((y.detach().sum(-1).abs() * 3).long().clamp(max=7))",
        changes={
            "norm": "$owner.embedded$n.max_norm = 0.5",
            "weight": "$owner.embedded$n.weight.data.mul_(2.0)",
        },
    ),
)
