"""What reading and writing a member runs: setters, descriptors, registries, special methods, odd containers."""

from adversary.grammar.feature import Feature

MEMBERS = (
    Feature(
        name="property with a setter",
        init="self._level$n = 2.0",
        methods="@property\ndef level$n(self):\n    return self._level$n\n\n\n@level$n.setter\n"
        "def level$n(self, value):\n    self._level$n = value * 10.0",
        forward="y = y + self.level$n",
        changes={"set": "$owner.level$n = 0.5", "below it": "$owner._level$n = 3.0"},
    ),
    Feature(
        name="property that forward sets",
        init="self._seen$n = 0.0",
        methods="@property\ndef seen$n(self):\n    return self._seen$n\n\n\n@seen$n.setter\n"
        "def seen$n(self, value):\n    self._seen$n = value + 1.0",
        forward="self.seen$n = self.seen$n\ny = y + self.seen$n",
        changes={"reset": "$owner._seen$n = 0.0"},
    ),
    Feature(
        name="data descriptor",
        top="class Bounded$n:\n    most = 2.0\n\n    def __set_name__(self, kind, name):\n"
        "        self.name = '_' + name\n\n    def __get__(self, owner, kind=None):\n"
        "        return min(getattr(owner, self.name, 1.0), self.most)\n\n"
        "    def __set__(self, owner, value):\n        setattr(owner, self.name, value)",
        methods="bounded$n = Bounded$n()",
        forward="y = y * self.bounded$n",
        changes={"set": "$owner.bounded$n = 5.0", "what it reads": "Bounded$n.most = 3.0"},
    ),
    Feature(
        name="cached property",
        init="self.root$n = 2.0",
        methods="@functools.cached_property\ndef cached$n(self):\n    return self.root$n * 2.0",
        forward="y = y * self.cached$n",
        changes={
            "what it read": "$owner.root$n = 3.0",
            "forgotten": "vars($owner).pop('cached$n', None)",
        },
    ),
    Feature(
        name="attributes found by a method",
        top="class Finding$n(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.inner, self.options = nn.Linear(4, 4), {'rate': 2.0}\n\n"
        "    def __getattr__(self, name):\n        try:\n            return super().__getattr__(name)\n"
        "        except AttributeError:\n            if name in self.__dict__['options']:\n"
        "                return self.__dict__['options'][name]\n            raise\n\n"
        "    def forward(self, y):\n        return self.inner(y) * self.rate",
        init="self.finding$n = Finding$n()",
        forward="y = self.finding$n(y)",
        changes={
            "entry": "$owner.finding$n.options['rate'] = 3.0",
            "hidden": "$owner.finding$n.rate = 5.0",
        },
    ),
    Feature(
        name="attribute of a thread",
        top="import threading\n\nLOCAL$n = threading.local()\nLOCAL$n.rate = 2.0",
        forward="y = y * getattr(LOCAL$n, 'rate', 1.0)",
        changes={"set": "LOCAL$n.rate = 3.0", "removed": "vars(LOCAL$n).pop('rate', None)"},
    ),
    Feature(
        name="registry of classes",
        top="REGISTRY$n = {}\n\n\nclass Registered$n:\n    def __init_subclass__(cls, name='', **more):\n"
        "        REGISTRY$n[name] = cls\n\n\nclass Double$n(Registered$n, name='act'):\n"
        "    def __call__(self, y):\n        return y * 2.0",
        forward="y = REGISTRY$n['act']()(y)",
        changes={
            "another": "class Other(Registered$n, name='act'):\n    def __call__(self, y):\n        return y + 3.0",
            "method": "Double$n.__call__ = lambda self, y: y - 1.0",
        },
    ),
    Feature(
        name="named tuple",
        top="import typing\n\n\nclass Options$n(typing.NamedTuple):\n    rate: float = 2.0\n    more: list = [1.0]",
        init="self.options$n = Options$n(more=[1.0])",
        forward="rate$n, more$n = self.options$n\ny = y * rate$n + more$n[0] * self.options$n.rate",
        changes={
            "replaced": "$owner.options$n = $owner.options$n._replace(rate=3.0)",
            "element": "$owner.options$n.more[0] = 5.0",
        },
    ),
    Feature(
        name="dataclass with a default",
        top="@dataclasses.dataclass\nclass Setting$n:\n    rates: list = dataclasses.field(default_factory=lambda: [2.0])\n"
        "    kind: dataclasses.InitVar[str] = 'a'\n    add: float = 1.0",
        init="self.setting$n = Setting$n()",
        forward="y = y * self.setting$n.rates[0] + sum(\n"
        "    getattr(self.setting$n, f.name) for f in dataclasses.fields(self.setting$n) if f.name == 'add')",
        changes={
            "element": "$owner.setting$n.rates[0] = 3.0",
            "default of the class": "vars($owner.setting$n).pop('add', None)\nSetting$n.add = 7.0",
            "field": "$owner.setting$n.add = 0.25",
        },
    ),
    Feature(
        name="member of flags",
        top="import enum\n\n\nclass Flags$n(enum.IntFlag):\n    NONE = 0\n    DOUBLE = 1\n    SHIFT = 2",
        init="self.flags$n = Flags$n.DOUBLE",
        forward="y = y * 2.0 if Flags$n.DOUBLE in self.flags$n else y\n"
        "y = y + 1.0 if self.flags$n & Flags$n.SHIFT else y",
        changes={
            "another": "$owner.flags$n = Flags$n.DOUBLE | Flags$n.SHIFT",
            "to a number": "$owner.flags$n = Flags$n(2)",
        },
    ),
    Feature(
        name="numbers of NumPy's in containers",
        init="self.whole$n = {'k': np.int64(2), 'on': np.bool_(True), 'by': [np.float32(0.5)]}",
        forward="y = y * self.whole$n['k'] + self.whole$n['by'][0] if self.whole$n['on'] else y - 1.0",
        changes={
            "whole": "$owner.whole$n['k'] = np.int64(3)",
            "truth": "$owner.whole$n['on'] = np.bool_(False)",
            "fraction": "$owner.whole$n['by'][0] = np.float32(0.25)",
        },
    ),
    Feature(
        name="special methods",
        top="class Special$n:\n    def __init__(self):\n        self.parts = [2.0, 3.0]\n\n"
        "    def __len__(self):\n        return len(self.parts)\n\n    def __iter__(self):\n"
        "        return iter(self.parts)\n\n    def __contains__(self, part):\n        return part in self.parts\n\n"
        "    def __getitem__(self, place):\n        return self.parts[place]\n\n    def __rmul__(self, y):\n"
        "        return y * self.parts[-1]\n\n    def __eq__(self, other):\n        return self.parts == other.parts\n\n"
        "    __hash__ = None",
        init="self.special$n, self.alike$n = Special$n(), Special$n()",
        forward="for part in self.special$n:\n    y = y * part / len(self.special$n)\n"
        "y = y + self.special$n[0] if 2.0 in self.special$n else y\n"
        "y = y * 0.5 if self.special$n == self.alike$n else y",
        changes={
            "element": "$owner.special$n.parts[0] = 4.0",
            "longer": "$owner.special$n.parts.append(0.5)",
            "method": "Special$n.__len__ = lambda self: 1",
        },
    ),
    Feature(
        name="containers of the library",
        top="import collections",
        init="self.queue$n = collections.deque([1.0, 2.0], maxlen=2)\n"
        "self.chain$n = collections.ChainMap({}, {'by': 2.0})\n"
        "self.tally$n = collections.defaultdict(lambda: 0.5)",
        forward="y = y * self.queue$n[0] + self.chain$n['by'] * self.tally$n.get('k', 1.0)",
        changes={
            "turned": "$owner.queue$n.rotate()",
            "pushed": "$owner.queue$n.append(3.0)",
            "in front": "$owner.chain$n['by'] = 3.0",
            "made by asking": "$owner.tally$n['k']",
        },
    ),
    Feature(
        name="view of a mapping",
        init="self.under$n = {'by': 2.0}\nself.proxy$n = types.MappingProxyType(self.under$n)",
        forward="y = y * self.proxy$n['by'] + len(self.proxy$n)",
        changes={"entry": "$owner.under$n['by'] = 3.0", "added": "$owner.under$n['k'] = 1.0"},
    ),
    Feature(
        name="iterator that is kept",
        top="import itertools",
        init="self.turns$n = itertools.cycle((1.0, 2.0, 3.0))",
        forward="y = y * next(self.turns$n)",
        changes={"another": "$owner.turns$n = itertools.cycle((5.0,))"},
    ),
)
