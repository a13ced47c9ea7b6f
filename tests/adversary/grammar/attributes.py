"""Python values that a forward reads of its own object: attributes, containers, objects at any depth."""

from adversary.grammar.feature import Feature

ATTRIBUTES = (
    Feature(
        name="number",
        init="self.gain$n = 2.0",
        forward="y = y * self.gain$n",
        changes={
            "set": "$owner.gain$n = 3.0",
            "to int": "$owner.gain$n = 2",
            "class attribute": "$cls.gain$n = 0.5\nvars($owner).pop('gain$n', None)",
            "to nan": "$owner.gain$n = math.nan",
            "to a tensor": "$owner.gain$n = torch.tensor([1.0, 2.0, 3.0, 4.0])",
            "to a parameter": "for home in ($owner, $cls):\n    if 'gain$n' in vars(home):\n        delattr(home, 'gain$n')\n"
            "$owner.gain$n = nn.Parameter(torch.ones(4))",
        },
    ),
    Feature(
        name="signed zero",
        init="self.zero$n = 0.0",
        forward="y = y + math.copysign(1.0, self.zero$n)",
        changes={"negative": "$owner.zero$n = -0.0", "to int": "$owner.zero$n = 0"},
    ),
    Feature(
        name="int or float",
        init="self.whole$n = 3",
        forward="y = y * (2.0 if isinstance(self.whole$n, int) else 0.5)",
        changes={
            "to float": "$owner.whole$n = 3.0",
            "to bool": "$owner.whole$n = True",
            "to one": "$owner.whole$n = 1",
        },
    ),
    Feature(
        name="text",
        init="self.kind$n = 'relu'",
        forward="y = getattr(F, self.kind$n)(y)",
        changes={"set": "$owner.kind$n = 'silu'"},
    ),
    Feature(
        name="none or number",
        init="self.shift$n = None",
        forward="if self.shift$n is not None:\n    y = y + self.shift$n",
        changes={"set": "$owner.shift$n = 1.0", "none": "$owner.shift$n = None"},
    ),
    Feature(
        name="dictionary",
        init="self.config$n = {'a': 2.0, 'inner': {'b': 1.0}}",
        forward="y = y * self.config$n['a'] + self.config$n['inner']['b']",
        changes={
            "entry": "$owner.config$n['a'] = 3.0",
            "inner entry": "$owner.config$n['inner']['b'] = 2.0",
            "replaced": "$owner.config$n = {'a': 0.5, 'inner': {'b': 0.0}}",
        },
    ),
    Feature(
        name="list",
        init="self.scales$n = [1.0, 2.0]",
        forward="for scale in self.scales$n:\n    y = y * scale",
        changes={
            "element": "$owner.scales$n[0] = 3.0",
            "longer": "$owner.scales$n.append(0.5)",
            "shorter": "del $owner.scales$n[-1:]",
        },
    ),
    Feature(
        name="tuple of lists",
        init="self.pair$n = ([1.0], [2.0])",
        forward="y = y * self.pair$n[0][0] - self.pair$n[1][0]",
        changes={"element": "$owner.pair$n[1][0] = 3.0"},
    ),
    Feature(
        name="set",
        init="self.names$n = {'a'}",
        forward="y = y * (2.0 if 'b' in self.names$n else 0.5)",
        changes={"add": "$owner.names$n.add('b')"},
    ),
    Feature(
        name="array",
        init="self.table$n = np.array([1.0, 2.0])",
        forward="y = y * float(self.table$n[1])",
        changes={"element": "$owner.table$n[1] = 3.0"},
    ),
    Feature(
        name="has attribute",
        forward="if hasattr(self, 'extra$n'):\n    y = y + self.extra$n",
        changes={"add": "$owner.extra$n = 1.0", "remove": "vars($owner).pop('extra$n', None)"},
    ),
    Feature(
        name="attribute with default",
        forward="y = y * getattr(self, 'factor$n', 1.0)",
        changes={"add": "$owner.factor$n = 2.0", "on the class": "$cls.factor$n = 3.0"},
    ),
    Feature(
        name="class attribute",
        methods="level$n = 2.0",
        forward="y = y * self.level$n",
        changes={"on the class": "$cls.level$n = 3.0", "on the object": "$owner.level$n = 0.5"},
    ),
    Feature(
        name="property",
        init="self._raw$n = 1.0",
        methods="@property\ndef cooked$n(self):\n    return 2.0 * self._raw$n",
        forward="y = y + self.cooked$n",
        changes={
            "what it reads": "$owner._raw$n = 2.0",
            "replaced": "$cls.cooked$n = property(lambda self: 5.0)",
        },
    ),
    Feature(
        name="dynamic name",
        init="self.which$n, self.left$n, self.right$n = 'left$n', 2.0, 3.0",
        forward="y = y * getattr(self, self.which$n)",
        changes={"which": "$owner.which$n = 'right$n'", "what": "$owner.left$n = 5.0"},
    ),
    Feature(
        name="through vars",
        init="self.hidden$n = 2.0",
        forward="y = y * vars(self)['hidden$n']",
        changes={"set": "$owner.hidden$n = 3.0"},
    ),
)

OBJECTS = (
    Feature(
        name="plain object",
        top="class Config$n:\n    def __init__(self):\n        self.rate, self.inner = 2.0, None",
        init="self.plain$n = Config$n()\nself.plain$n.inner = Config$n()",
        forward="y = y * self.plain$n.rate + self.plain$n.inner.rate",
        changes={
            "set": "$owner.plain$n.rate = 3.0",
            "inner": "$owner.plain$n.inner.rate = 5.0",
            "replaced": "$owner.plain$n = copy.deepcopy($owner.plain$n)\n$owner.plain$n.rate = 7.0",
        },
    ),
    Feature(
        name="deep object",
        top="class Deep$n:\n    def __init__(self, inner):\n        self.inner = inner",
        init="self.deep$n = Deep$n(Deep$n(Deep$n(Deep$n([2.0]))))",
        forward="y = y * self.deep$n.inner.inner.inner.inner[0]",
        changes={
            "deepest": "$owner.deep$n.inner.inner.inner.inner[0] = 3.0",
            "middle": "$owner.deep$n.inner.inner = Deep$n(Deep$n([5.0]))",
        },
    ),
    Feature(
        name="slotted dataclass",
        top="@dataclasses.dataclass(slots=True)\nclass Slotted$n:\n    rate: float = 2.0",
        init="self.slotted$n = Slotted$n()",
        forward="y = y * self.slotted$n.rate",
        changes={
            "set": "$owner.slotted$n.rate = 3.0",
            "replaced": "$owner.slotted$n = Slotted$n(5.0)",
        },
    ),
    Feature(
        name="frozen dataclass",
        top="@dataclasses.dataclass(frozen=True)\nclass Frozen$n:\n    rate: float = 2.0\n    more: tuple = (1.0,)",
        init="self.frozen$n = Frozen$n()",
        forward="y = y * self.frozen$n.rate + self.frozen$n.more[0]",
        changes={
            "replaced": "$owner.frozen$n = dataclasses.replace($owner.frozen$n, rate=3.0)",
            "forced": "object.__setattr__($owner.frozen$n, 'rate', 5.0)",
        },
    ),
    Feature(
        name="object's method",
        top="class Scaler$n:\n    def __init__(self):\n        self.by = 2.0\n\n"
        "    def apply(self, y):\n        return y * self.by",
        init="self.scaler$n = Scaler$n()",
        forward="y = self.scaler$n.apply(y)",
        changes={
            "attribute": "$owner.scaler$n.by = 3.0",
            "method of the class": "Scaler$n.apply = lambda self, y: y + 1.0",
            "method of the object": "$owner.scaler$n.apply = lambda y: y - 1.0",
        },
    ),
    Feature(
        name="callable object",
        top="class Caller$n:\n    def __init__(self):\n        self.by = {'k': 2.0}\n\n"
        "    def __call__(self, y):\n        return y * self.by['k']",
        init="self.caller$n = Caller$n()",
        forward="y = self.caller$n(y)",
        changes={
            "entry": "$owner.caller$n.by['k'] = 3.0",
            "replaced": "$owner.caller$n = torch.sigmoid",
        },
    ),
    Feature(
        name="objects in a list",
        init="self.items$n = [types.SimpleNamespace(k=1.0), types.SimpleNamespace(k=2.0)]",
        forward="for item in self.items$n:\n    y = y * item.k",
        changes={"attribute": "$owner.items$n[1].k = 3.0"},
    ),
)
