"""What is found by asking: keys that code makes, orders, descriptors, classes of classes, members, loggers."""

from adversary.grammar.feature import Feature

LOOKUPS = (
    Feature(
        name="weak keys",
        top="import weakref\nWEAK$n = weakref.WeakKeyDictionary()",
        forward="y = y * WEAK$n.get(self, 2.0)",
        changes={"added": "WEAK$n[$owner] = 3.0"},
    ),
    Feature(
        name="weak keys by a descriptor",
        top="import weakref\nOWNED$n = weakref.WeakKeyDictionary()\n\n\nclass Owned$n:\n"
        "    def __get__(self, owner, kind=None):\n        return OWNED$n.get(owner, 2.0)",
        methods="owned$n = Owned$n()",
        forward="y = y * self.owned$n",
        changes={"added": "OWNED$n[$owner] = 3.0"},
    ),
    Feature(
        name="made key",
        init="self.scales$n, self.key$n = {}, nn.Identity()",
        forward="y = y * self.scales$n.get((self.key$n, 'k'), 2.0)",
        changes={
            "added": "$owner.scales$n[$owner.key$n, 'k'] = 3.0",
            "another object": "$owner.key$n = nn.Identity()",
        },
    ),
    Feature(
        name="ordered dictionary",
        top="import collections",
        init="self.ordered$n = collections.OrderedDict(a=2.0, b=1.0)",
        forward="for name, by in self.ordered$n.items():\n    y = y * by if name == 'a' else y + by",
        changes={
            "moved": "$owner.ordered$n.move_to_end('a')",
            "entry": "$owner.ordered$n['b'] = 3.0",
        },
    ),
    Feature(
        name="two hooks",
        init="self.twice$n = nn.Identity()\n"
        "self.twice$n.register_forward_hook(lambda module, args, out: out * 2.0)\n"
        "self.twice$n.register_forward_hook(lambda module, args, out: out + 1.0)",
        forward="y = self.twice$n(y)",
        changes={
            "in another order": "hooks = $owner.twice$n._forward_hooks\nhooks.move_to_end(next(iter(hooks)))"
        },
    ),
    Feature(
        name="answer for missing keys",
        top="class Answering$n(dict):\n    by = 2.0\n\n    def __missing__(self, key):\n        return self.by",
        init="self.answers$n = Answering$n()",
        forward="y = y * self.answers$n['k']",
        changes={"on the class": "Answering$n.by = 3.0", "entry": "$owner.answers$n['k'] = 5.0"},
    ),
    Feature(
        name="member of an enumeration",
        top="import enum\n\n\nclass Kind$n(enum.Enum):\n    A = 2.0\n    LONG = 3.0",
        init="self.kind$n = Kind$n.A",
        forward="y = y * self.kind$n.value + len(self.kind$n.name)",
        changes={"another": "$owner.kind$n = Kind$n.LONG", "its value": "Kind$n.A._value_ = 7.0"},
    ),
    Feature(
        name="abstract class",
        top="import abc\n\n\nclass Abstract$n(abc.ABC):\n    pass\n\n\nclass Plain$n:\n    pass",
        init="self.plain$n = Plain$n()",
        forward="y = y * 2.0 if isinstance(self.plain$n, Abstract$n) else y + 1.0",
        changes={"registered": "Abstract$n.register(Plain$n)"},
    ),
    Feature(
        name="protocol",
        top="import typing\n\n\n@typing.runtime_checkable\nclass Quacking$n(typing.Protocol):\n"
        "    def quack(self): ...\n\n\nclass Duck$n:\n    pass",
        init="self.duck$n = Duck$n()",
        forward="y = y * 2.0 if isinstance(self.duck$n, Quacking$n) else y + 1.0",
        changes={
            "on the class": "Duck$n.quack = lambda self: 1",
            "on the object": "$owner.duck$n.quack = int",
        },
    ),
    Feature(
        name="class in a closure",
        top="class First$n:\n    pass\n\n\nclass Second$n:\n    pass\n\n\n"
        "def asking$n(kind):\n    return lambda y, value: y * 2.0 if isinstance(value, kind) else y + 1.0",
        init="self.asks$n, self.first$n = asking$n(First$n), First$n()",
        forward="y = self.asks$n(y, self.first$n)",
        changes={
            "another": "$owner.asks$n.__closure__[0].cell_contents = Second$n",
            "made again": "$owner.asks$n = asking$n(Second$n)",
        },
    ),
    Feature(
        name="call of a module",
        top="class Called$n(nn.Tanh):\n    pass",
        init="self.called$n = Called$n()",
        forward="y = self.called$n(y)",
        changes={"on the class": "Called$n.__call__ = lambda self, y: y * 3.0"},
    ),
    Feature(
        name="number of NumPy's",
        init="self.number$n = np.float64(2.0)",
        forward="y = y * self.number$n",
        changes={
            "another": "$owner.number$n = np.float64(3.0)",
            "to float": "$owner.number$n = 0.5",
        },
    ),
    Feature(
        name="partial method",
        top="BY$n = {'k': 2.0}",
        methods="def _times$n(self, by, y):\n    return y * by['k']\n\n\n"
        "times$n = functools.partialmethod(_times$n, BY$n)",
        forward="y = self.times$n(y)",
        changes={"content": "BY$n['k'] = 3.0"},
    ),
    Feature(
        name="context variable",
        top="import contextvars\nVARIABLE$n = contextvars.ContextVar('VARIABLE$n', default=2.0)",
        forward="y = y * VARIABLE$n.get()",
        changes={"set": "VARIABLE$n.set(3.0)"},
    ),
    Feature(
        name="weak reference",
        top="import weakref\n\n\nclass Target$n:\n    rate = 2.0",
        init="self.target$n = Target$n()\nself.weak$n = weakref.ref(self.target$n)",
        forward="y = y * self.weak$n().rate if self.weak$n() is not None else y - 1.0",
        changes={"attribute": "$owner.target$n.rate = 3.0", "gone": "$owner.target$n = None"},
    ),
    Feature(
        name="weak reference to a tensor",
        top="import weakref",
        init="self.seen$n = torch.ones(4)\nself.weak$n = weakref.ref(self.seen$n)",
        forward="y = y * self.weak$n() if self.weak$n() is not None else y - 1.0",
        changes={"gone": "$owner.seen$n = torch.zeros(4)"},
    ),
    Feature(
        name="dictionary of attributes",
        top="class Store$n:\n    def __init__(self):\n        self.__dict__['held'] = {'rate': 2.0}\n\n"
        "    def __getattr__(self, name):\n        if name in self.__dict__['held']:\n"
        "            return self.__dict__['held'][name]\n        raise AttributeError(name)",
        init="self.store$n = Store$n()",
        forward="y = y * self.store$n.rate",
        changes={
            "entry": "$owner.store$n.held['rate'] = 3.0",
            "hidden": "$owner.store$n.__dict__['rate'] = 5.0",
        },
    ),
    Feature(
        name="sentinel",
        top="MISSING$n = object()",
        init="self.given$n = MISSING$n",
        forward="y = y * 2.0 if self.given$n is MISSING$n else y + 1.0",
        changes={
            "given": "$owner.given$n = object()",
            "another sentinel": "globals()['MISSING$n'] = object()",
        },
    ),
    Feature(
        name="two objects or one",
        top="class Twin$n:\n    rate = 2.0",
        init="self.one$n, self.two$n = Twin$n(), Twin$n()",
        forward="y = y * 2.0 if self.one$n is self.two$n else y + 1.0",
        changes={"one": "$owner.two$n = $owner.one$n"},
    ),
    Feature(
        name="truth of an object",
        top="class Truth$n:\n    pass",
        init="self.truth$n = Truth$n()",
        forward="y = y * 2.0 if self.truth$n else y + 1.0",
        changes={"on the class": "Truth$n.__bool__ = lambda self: False"},
    ),
)
