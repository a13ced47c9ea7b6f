"""Weights that are computed from others: parametrizations, and what they replaced."""

from adversary.grammar.feature import Feature

PARAMETRIZED = (
    Feature(
        name="parametrized weight",
        top="class Scaled$n(nn.Module):\n    def __init__(self, by):\n        super().__init__()\n"
        "        self.by = by\n\n    def forward(self, weight):\n        return weight * self.by",
        init="self.shaped$n = nn.Linear(4, 4)\n"
        "nn.utils.parametrize.register_parametrization(self.shaped$n, 'weight', Scaled$n(0.5))",
        forward="y = self.shaped$n(y)",
        changes={
            "what it reads": "for module in $owner.shaped$n.modules():\n"
            "    if isinstance(module, Scaled$n):\n        module.by = 2.0",
            "another": "nn.utils.parametrize.register_parametrization($owner.shaped$n, 'weight', nn.Tanh())",
            "another of the bias": "nn.utils.parametrize.register_parametrization($owner.shaped$n, 'bias', nn.Tanh())",
            "removed": "if nn.utils.parametrize.is_parametrized($owner.shaped$n, 'weight'):\n"
            "    nn.utils.parametrize.remove_parametrizations($owner.shaped$n, 'weight')",
        },
    ),
    Feature(
        name="weight norm",
        init="self.normed$n = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))",
        forward="y = self.normed$n(y)",
        changes={
            "removed": "if nn.utils.parametrize.is_parametrized($owner.normed$n, 'weight'):\n"
            "    nn.utils.parametrize.remove_parametrizations($owner.normed$n, 'weight')",
        },
    ),
    Feature(
        name="weight norm by a hook",
        init="self.hooked_norm$n = nn.utils.weight_norm(nn.Linear(4, 4))",
        forward="y = self.hooked_norm$n(y)",
        changes={
            "removed": "if hasattr($owner.hooked_norm$n, 'weight_g'):\n"
            "    nn.utils.remove_weight_norm($owner.hooked_norm$n)",
        },
    ),
    Feature(
        name="spectral norm",
        init="self.bounded$n = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))",
        forward="y = self.bounded$n(y)",
        changes={
            "evaluated": "$owner.bounded$n.eval()",
            "removed": "if nn.utils.parametrize.is_parametrized($owner.bounded$n, 'weight'):\n"
            "    nn.utils.parametrize.remove_parametrizations($owner.bounded$n, 'weight')",
        },
    ),
)
