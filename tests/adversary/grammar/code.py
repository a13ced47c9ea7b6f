"""Where code comes from: inheritance, helpers, closures, defaults, globals, methods put on objects."""

from adversary.grammar.feature import Feature

CLASSES = (
    Feature(
        name="super forward",
        top="class Parent$n(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.base = 2.0\n\n    def forward(self, y):\n        return y * self.base\n\n\n"
        "class Child$n(Parent$n):\n    def forward(self, y):\n        return super().forward(y) + 1.0",
        init="self.child$n = Child$n()",
        forward="y = self.child$n(y)",
        changes={
            "what the parent reads": "$owner.child$n.base = 3.0",
            "forward of the parent": "Parent$n.forward = lambda self, y: y - self.base",
            "forward of the child": "Child$n.forward = lambda self, y: y * 0.5",
            "forward of the object": "$owner.child$n.forward = lambda y: y * 0.25",
            "class of the object": "$owner.child$n.__class__ = Parent$n",
        },
    ),
    Feature(
        name="inherited forward",
        top="class Ancestor$n(nn.Module):\n    factor = 2.0\n\n    def forward(self, y):\n"
        "        return self.scaled(y)\n\n    def scaled(self, y):\n        return y * self.factor\n\n\n"
        "class Heir$n(Ancestor$n):\n    def scaled(self, y):\n        return y + self.factor",
        init="self.heir$n = Heir$n()",
        forward="y = self.heir$n(y)",
        changes={
            "attribute of the ancestor": "Ancestor$n.factor = 3.0",
            "method of the heir": "Heir$n.scaled = lambda self, y: y * 0.5",
            "no override": "if 'scaled' in vars(Heir$n):\n    del Heir$n.scaled",
        },
    ),
    Feature(
        name="mixin",
        top="class Mixin$n:\n    bias$n = 1.0\n\n    def shifted$n(self, y):\n        return y + self.bias$n",
        bases="Mixin$n",
        forward="y = self.shifted$n(y)",
        changes={
            "attribute": "Mixin$n.bias$n = 2.0",
            "method": "Mixin$n.shifted$n = lambda self, y: y * 3.0",
            "override": "$cls.shifted$n = lambda self, y: y - 1.0",
        },
    ),
    Feature(
        name="method",
        init="self.by$n = 2.0",
        methods="def helper$n(self, y):\n    return y * self.by$n",
        forward="y = self.helper$n(y)",
        changes={
            "attribute": "$owner.by$n = 3.0",
            "on the class": "$cls.helper$n = lambda self, y: y + 1.0",
            "on the object": "$owner.helper$n = types.MethodType(lambda self, y: y - self.by$n, $owner)",
        },
    ),
    Feature(
        name="static method",
        methods="@staticmethod\ndef fixed$n(y, by=2.0):\n    return y * by",
        forward="y = self.fixed$n(y)",
        changes={
            "replaced": "$cls.fixed$n = staticmethod(lambda y: y + 1.0)",
            "default": "$cls.fixed$n.__defaults__ = (3.0,)",
        },
    ),
    Feature(
        name="helper of a submodule",
        top="class Helper$n(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.inner = nn.Linear(4, 4)\n        self.by = 2.0\n\n"
        "    def mixed(self, y):\n        return self.inner(y) * self.by",
        init="self.part$n = Helper$n()",
        forward="y = self.part$n.mixed(y)",
        changes={
            "attribute": "$owner.part$n.by = 3.0",
            "method": "Helper$n.mixed = lambda self, y: self.inner(y) + self.by",
            "weight": "$owner.part$n.inner.weight = nn.Parameter(torch.eye(4))",
            "submodule": "$owner.part$n.inner = nn.Tanh()",
        },
    ),
    Feature(
        name="module list",
        init="self.parts$n = nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])",
        forward="for part in self.parts$n:\n    y = part(y)",
        changes={
            "appended": "$owner.parts$n.append(nn.Tanh())",
            "replaced": "$owner.parts$n[1] = nn.Tanh()",
            "reversed": "$owner.parts$n = nn.ModuleList(reversed($owner.parts$n))",
        },
    ),
    Feature(
        name="hidden module",
        init="self.hidden$n = [nn.Linear(4, 4)]",
        forward="y = self.hidden$n[0](y)",
        changes={
            "weight": "$owner.hidden$n[0].weight = nn.Parameter(torch.eye(4))",
            "in place": "$owner.hidden$n[0].weight.data.mul_(2.0)",
            "replaced": "$owner.hidden$n[0] = nn.Identity()",
        },
    ),
)

FUNCTIONS = (
    Feature(
        name="closure",
        top="def scaling$n(by):\n    def scale(y):\n        return y * by[0]\n\n    return scale",
        init="self.box$n = [2.0]\nself.scale$n = scaling$n(self.box$n)",
        forward="y = self.scale$n(y)",
        changes={
            "content": "$owner.box$n[0] = 3.0",
            "cell": "$owner.scale$n.__closure__[0].cell_contents = [5.0]",
            "code": "$owner.scale$n.__code__ = (lambda by: lambda y: y + by[0])(1).__code__",
        },
    ),
    Feature(
        name="default arguments",
        top="def defaults$n(y, by=2.0, *, add=1.0):\n    return y * by + add",
        forward="y = defaults$n(y)",
        changes={
            "default": "defaults$n.__defaults__ = (3.0,)",
            "keyword default": "defaults$n.__kwdefaults__ = {'add': 2.0}",
            "keyword entry": "defaults$n.__kwdefaults__['add'] = 3.0",
        },
    ),
    Feature(
        name="list as a default",
        top="def listed$n(y, by=[2.0]):\n    return y * by[0]",
        forward="y = listed$n(y)",
        changes={"element": "listed$n.__defaults__[0][0] = 3.0"},
    ),
    Feature(
        name="global number",
        top="FACTOR$n = 2.0",
        forward="y = y * FACTOR$n",
        changes={"set": "globals()['FACTOR$n'] = 3.0"},
    ),
    Feature(
        name="global list",
        top="FACTORS$n = [2.0]",
        forward="y = y * FACTORS$n[0]",
        changes={"element": "FACTORS$n[0] = 3.0", "replaced": "globals()['FACTORS$n'] = [5.0]"},
    ),
    Feature(
        name="global function",
        top="def outer$n(y):\n    return inner$n(y) + 1.0\n\n\ndef inner$n(y):\n    return y * 2.0",
        forward="y = outer$n(y)",
        changes={
            "outer": "globals()['outer$n'] = torch.tanh",
            "inner": "globals()['inner$n'] = lambda y: y * 3.0",
        },
    ),
    Feature(
        name="global tensor",
        top="TABLE$n = torch.ones(4)",
        forward="y = y * TABLE$n",
        changes={
            "in place": "TABLE$n.mul_(2.0)",
            "replaced": "globals()['TABLE$n'] = torch.full((4,), 3.0)",
        },
    ),
    Feature(
        name="function of a namespace",
        top="SPACE$n = types.SimpleNamespace(fn=torch.tanh, by=2.0)",
        forward="y = SPACE$n.fn(y) * SPACE$n.by",
        changes={"function": "SPACE$n.fn = torch.sigmoid", "number": "SPACE$n.by = 3.0"},
    ),
    Feature(
        name="partial",
        top="def added$n(y, by):\n    return y + by['k']",
        init="self.given$n = {'k': 1.0}\nself.partial$n = functools.partial(added$n, by=self.given$n)",
        forward="y = self.partial$n(y)",
        changes={
            "content": "$owner.given$n['k'] = 2.0",
            "replaced": "$owner.partial$n = functools.partial(added$n, by={'k': 3.0})",
        },
    ),
    Feature(
        name="decorated",
        top="def doubling$n(fn):\n    @functools.wraps(fn)\n    def call(*args):\n        return fn(*args) * DOUBLE$n\n\n"
        "    return call\n\n\nDOUBLE$n = 2.0",
        methods="@doubling$n\ndef wrapped$n(self, y):\n    return y + 1.0",
        forward="y = self.wrapped$n(y)",
        changes={"what the decorator reads": "globals()['DOUBLE$n'] = 3.0"},
    ),
    Feature(
        name="lambda",
        init="by$n = [2.0]\nself.by$n, self.scaled$n = by$n, lambda y: y * by$n[0]",
        forward="y = self.scaled$n(y)",
        changes={
            "content": "$owner.by$n[0] = 3.0",
            "replaced": "$owner.scaled$n = lambda y: y + 2.0",
        },
    ),
)
