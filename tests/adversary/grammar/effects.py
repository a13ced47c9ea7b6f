"""What a forward leaves in Python: counters, histories, caches, what it saw last."""

from adversary.grammar.feature import Feature

EFFECTS = (
    Feature(
        name="counter",
        init="self.calls$n = 0",
        forward="self.calls$n += 1\ny = y * (1.0 + self.calls$n / 10)",
        changes={"reset": "$owner.calls$n = 0"},
    ),
    Feature(
        name="idle counter",
        init="self.calls$n = 0",
        forward="self.calls$n += 1",
        changes={"reset": "$owner.calls$n = 0"},
    ),
    Feature(
        name="history",
        init="self.history$n = []",
        forward="self.history$n.append(tuple(y.shape))\nself.history$n = self.history$n[-3:]",
        changes={"cleared": "$owner.history$n.clear()"},
    ),
    Feature(name="global counter", top="TALLY$n = {'n': 0}", forward="TALLY$n['n'] += 1"),
    Feature(
        name="last activation",
        init="self.last$n = None",
        forward="self.last$n = y.detach()",
        changes={"forgotten": "$owner.last$n = None"},
    ),
    Feature(
        name="two copies",
        init="self.copies$n = ()",
        forward="mean$n = y.detach().mean(0)\nself.copies$n = (mean$n.clone(), mean$n.clone())",
        changes={"one in place": "for kept in $owner.copies$n[:1]:\n    kept.fill_(3.0)"},
    ),
    Feature(
        name="hidden state",
        init="self.state$n = None",
        forward="if self.state$n is not None:\n    y = y + 0.5 * self.state$n.mean()\nself.state$n = y.detach()",
        changes={"reset": "$owner.state$n = None"},
    ),
    Feature(
        name="cache by shape",
        init="self.cache$n = {}",
        forward="if y.shape[0] not in self.cache$n:\n    self.cache$n[y.shape[0]] = torch.linspace(0, 1, 4)\n"
        "y = y + self.cache$n[y.shape[0]].to(y.dtype)",
        changes={
            "emptied": "$owner.cache$n.clear()",
            "poisoned": "for value in $owner.cache$n.values():\n    value.fill_(3.0)",
            "entries replaced": "for key in $owner.cache$n:\n    $owner.cache$n[key] = torch.full((4,), 5.0)",
        },
    ),
    Feature(
        name="lazy tensor",
        forward="if not hasattr(self, 'lazy$n'):\n    self.lazy$n = torch.full((4,), 2.0)\n"
        "y = y * self.lazy$n.to(y.dtype)",
        changes={
            "in place": "if hasattr($owner, 'lazy$n'):\n    $owner.lazy$n.fill_(3.0)",
            "removed": "if hasattr($owner, 'lazy$n'):\n    del $owner.lazy$n",
        },
    ),
    Feature(
        name="lazy module",
        forward="if not hasattr(self, 'made$n'):\n    self.made$n = nn.Tanh()\ny = self.made$n(y)",
        changes={"replaced": "$owner.made$n = nn.Sigmoid()"},
    ),
    Feature(
        name="first call is special",
        init="self.fresh$n = True",
        forward="if self.fresh$n:\n    y = y * 3.0\n    self.fresh$n = False",
        changes={"again": "$owner.fresh$n = True"},
    ),
)
