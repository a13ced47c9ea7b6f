"""What Python's library and language do between lines: caches, dispatch, generators, exceptions, formats."""

from adversary.grammar.feature import Feature

LIBRARY = (
    Feature(
        name="cached function",
        top="RATE$n = [2.0]\n\n\n@functools.lru_cache\ndef cached$n(width):\n    return RATE$n[0] * width",
        forward="y = y * cached$n(y.shape[-1])",
        changes={"what it read": "RATE$n[0] = 3.0", "emptied": "cached$n.cache_clear()"},
    ),
    Feature(
        name="cached tensor",
        top="@functools.cache\ndef positions$n(width):\n    return torch.linspace(0, 1, width)",
        forward="y = y + positions$n(y.shape[-1])",
        changes={
            "in place": "positions$n(4).fill_(3.0)",
            "emptied": "positions$n.cache_clear()",
        },
    ),
    Feature(
        name="dispatch by type",
        top="@functools.singledispatch\ndef scaled$n(by, y):\n    return y + 1.0\n\n\n"
        "@scaled$n.register\ndef _(by: float, y):\n    return y * by",
        init="self.by$n = 2.0",
        forward="y = scaled$n(self.by$n, y)",
        changes={
            "type": "$owner.by$n = '2'",
            "number": "$owner.by$n = 3.0",
            "registered": "scaled$n.register(float, lambda by, y: y - by)",
        },
    ),
    Feature(
        name="generator function",
        init="self.rates$n = [2.0, 0.5]",
        methods="def each$n(self):\n    for rate in self.rates$n:\n        yield rate\n    yield from (1.5,)",
        forward="for rate in self.each$n():\n    y = y * rate",
        changes={"element": "$owner.rates$n[0] = 3.0", "longer": "$owner.rates$n.append(2.0)"},
    ),
    Feature(
        name="exceptions of its own",
        top="class Stop$n(Exception):\n    pass\n\n\ndef deep$n(y, most):\n    if most > 2:\n"
        "        raise Stop$n(most)\n    return y * most",
        init="self.most$n, self.tried$n = 2.0, 0.0",
        forward="try:\n    y = deep$n(y, self.most$n)\nexcept Stop$n as error:\n    y = y + error.args[0]\n"
        "else:\n    y = y - 1.0\nfinally:\n    y = y * 1.5",
        changes={"raised": "$owner.most$n = 3.0", "not raised": "$owner.most$n = 1.0"},
    ),
    Feature(
        name="formatted name",
        init="self.layer$n, self.scale_0_$n, self.scale_1_$n = 0, 2.0, 3.0",
        forward="y = y * getattr(self, f'scale_{self.layer$n:d}_$n')\n"
        "y = y + float('{:.1f}'.format(self.scale_0_$n))",
        changes={"which": "$owner.layer$n = 1", "what": "$owner.scale_0_$n = 0.25"},
    ),
    Feature(
        name="order of a dictionary",
        init="self.steps$n = {'double': 2.0, 'shift': 1.0}",
        forward="for name, by in self.steps$n.items():\n    y = y * by if name == 'double' else y + by",
        changes={
            "in another order": "$owner.steps$n['double'] = $owner.steps$n.pop('double')",
            "merged": "$owner.steps$n |= {'shift': 3.0}",
        },
    ),
    Feature(
        name="sorted with a key",
        init="self.parts$n = [('b', 2.0), ('a', 1.0)]\nself.rank$n = {'a': 0, 'b': 1}",
        forward="for name, by in sorted(self.parts$n, key=lambda part: self.rank$n[part[0]]):\n"
        "    y = y * by if name == 'b' else y + by\n"
        "y = y * max(by for _, by in self.parts$n)",
        changes={
            "rank": "$owner.rank$n['a'] = 2",
            "element": "$owner.parts$n[0] = ('b', 3.0)",
        },
    ),
    Feature(
        name="match of a structure",
        init="self.act$n = {'kind': 'scale', 'by': [2.0]}",
        forward="match self.act$n:\n    case {'kind': 'scale', 'by': [by, *_]}:\n        y = y * by\n"
        "    case {'kind': str(name)} if name.startswith('s'):\n        y = torch.sin(y)\n"
        "    case _:\n        y = y + 1.0",
        changes={
            "number": "$owner.act$n['by'][0] = 3.0",
            "kind": "$owner.act$n = {'kind': 'sine'}",
            "other": "$owner.act$n = None",
        },
    ),
    Feature(
        name="reduced",
        top="import operator",
        init="self.by$n = [2.0, 3.0]\nself.how$n = operator.mul",
        forward="y = functools.reduce(self.how$n, self.by$n, y)",
        changes={"element": "$owner.by$n[0] = 0.5", "how": "$owner.how$n = operator.add"},
    ),
    Feature(
        name="method by name",
        top="import operator",
        init="self.calls$n = operator.methodcaller('clamp', max=0.5)\nself.reads$n = operator.attrgetter('by$n')\n"
        "self.by$n = 2.0",
        forward="y = self.calls$n(y) * self.reads$n(self)",
        changes={
            "another": "$owner.calls$n = operator.methodcaller('abs')",
            "what is read": "$owner.by$n = 3.0",
        },
    ),
    Feature(
        name="context manager of its own",
        top="SCALE$n = [1.0]\n\n\n@contextlib.contextmanager\ndef scale$n(by):\n    before = SCALE$n[0]\n"
        "    SCALE$n[0] = by\n    try:\n        yield\n    finally:\n        SCALE$n[0] = before",
        init="self.by$n = 2.0",
        forward="with scale$n(self.by$n):\n    y = y * SCALE$n[0]",
        changes={"number": "$owner.by$n = 3.0"},
    ),
    Feature(
        name="recursion",
        top="def tree$n(y, node):\n    if isinstance(node, (int, float)):\n        return y * node\n"
        "    return sum(tree$n(y, part) for part in node) / len(node)",
        init="self.tree$n = [2.0, [1.0, [3.0]]]",
        forward="y = tree$n(y, self.tree$n)",
        changes={"leaf": "$owner.tree$n[1][1][0] = 5.0", "grown": "$owner.tree$n[1].append(2)"},
    ),
    Feature(
        name="arguments as they come",
        top="def gathered$n(y, *args, scale=1.0, **more):\n    for arg in args:\n        y = y + arg\n"
        "    return y * scale * (2.0 if 'twice' in more else 1.0)",
        init="self.args$n, self.kwargs$n = [1.0], {'scale': 2.0}",
        forward="y = gathered$n(y, *self.args$n, **self.kwargs$n)",
        changes={
            "argument": "$owner.args$n.append(0.5)",
            "keyword": "$owner.kwargs$n['twice'] = None",
            "number": "$owner.kwargs$n['scale'] = 3.0",
        },
    ),
    Feature(
        name="environment of the process",
        top="import os",
        forward="y = y * float(os.environ.get('ADVERSARY_RATE$n', '2.0'))",
    ),
)
