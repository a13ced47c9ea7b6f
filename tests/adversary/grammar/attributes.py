"""Python values that a forward reads: attributes at any depth, containers, objects, globals, closures."""

from adversary.grammar.feature import Feature

ATTRIBUTES = (
    Feature(
        name="number",
        init="self.gain$n = 2.0",
        forward="y = y * self.gain$n",
        changes={
            "set": "$owner.gain$n = 3.0",
            "int": "$owner.gain$n = 2",
            "none and back": "$owner.gain$n = None\n$owner.gain$n = 1.5",
            "class attribute": "del $owner.gain$n\n$cls.gain$n = 0.5",
            "to a tensor": "$owner.gain$n = torch.tensor([1.0, 2.0, 3.0, 4.0])",
        },
    ),
)
