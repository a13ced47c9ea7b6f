"""Random numbers: torch's own, those of generators that the user owns, Python's and NumPy's."""

from adversary.grammar.feature import Feature

RANDOMNESS = (
    Feature(
        name="dropout",
        init="self.drop$n = nn.Dropout(0.5)",
        forward="y = self.drop$n(y)",
        changes={"probability": "$owner.drop$n.p = 0.1", "evaluated": "$owner.drop$n.eval()"},
    ),
    Feature(
        name="functional dropout",
        init="self.p$n = 0.5",
        forward="y = F.dropout(y, self.p$n, self.training)",
        changes={"probability": "$owner.p$n = 0.25"},
    ),
    Feature(
        name="dropout of images",
        forward="y = F.dropout(y.view(-1, 4, 1, 1), 0.3, self.training).view(-1, 4)",
    ),
    Feature(
        name="noise of images",
        init="self.conv$n = nn.Conv2d(1, 1, 3, padding=1)",
        forward="image = y.view(-1, 1, 2, 2)\ny = self.conv$n(image + torch.randn_like(image)).view(-1, 4)",
    ),
    Feature(name="uniform noise", forward="y = y + torch.rand(4)"),
    Feature(name="two draws", forward="y = y * torch.rand_like(y) + torch.randn(4)"),
    Feature(
        name="generator",
        init="self.generator$n = torch.Generator().manual_seed(5)",
        forward="y = y + torch.rand(4, generator=self.generator$n)",
        changes={"seeded": "$owner.generator$n.manual_seed(6)"},
    ),
    Feature(
        name="generator of the file",
        top="GENERATOR$n = torch.Generator().manual_seed(5)",
        forward="y = y * torch.bernoulli(torch.full((4,), 0.5), generator=GENERATOR$n)",
        changes={"seeded": "GENERATOR$n.manual_seed(6)"},
    ),
    Feature(
        name="numpy generator",
        init="self.rng$n = np.random.default_rng(5)",
        forward="y = y * (2.0 if self.rng$n.random() < 0.5 else 1.0)",
        changes={"replaced": "$owner.rng$n = np.random.default_rng(6)"},
    ),
    Feature(
        name="python generator",
        init="self.dice$n = random.Random(5)",
        forward="y = y * self.dice$n.choice((1.0, 2.0))",
        changes={"seeded": "$owner.dice$n.seed(6)"},
    ),
    Feature(name="python random", forward="y = y * (2.0 if random.random() < 0.5 else 1.0)"),
    Feature(name="numpy random", forward="y = y + float(np.random.rand())"),
)
