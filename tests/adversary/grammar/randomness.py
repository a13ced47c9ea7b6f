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
    Feature(
        name="normal noise",
        forward="y = y + torch.normal(y.detach(), 0.1) + torch.randn(())",
    ),
    Feature(
        name="whole random numbers",
        forward="y = y * torch.randint(1, 4, (4,)) + torch.randint_like(y, 3)",
    ),
    Feature(name="permutation", forward="y = y[..., torch.randperm(4)]"),
    Feature(
        name="draws in place",
        forward="y = y + torch.empty(4).uniform_(-1, 1) + torch.empty(4).exponential_() + torch.zeros(4).normal_()",
    ),
    Feature(
        name="draws by weights",
        forward="y = y + torch.multinomial(y.detach().abs().reshape(-1, 4) + 0.1, 1)[:1] * 0.5\n"
        "y = y * torch.bernoulli(torch.sigmoid(y.detach()))",
    ),
    Feature(
        name="draws of distributions",
        forward="y = y + torch.distributions.Normal(y.detach(), 0.5).sample()\n"
        "y = y * F.gumbel_softmax(y, hard=False)",
    ),
    Feature(
        name="draws that look alike",
        forward="first$n, second$n = y.view(y.shape), y.view(y.shape)\n"
        "y = y + torch.randn_like(first$n) - torch.randn_like(second$n) + torch.rand(4) - torch.rand(4)",
    ),
    Feature(
        name="other dropouts",
        init="self.alpha$n, self.leaky$n = nn.AlphaDropout(0.25), nn.RReLU()",
        forward="y = self.leaky$n(self.alpha$n(y))",
        changes={
            "probability": "$owner.alpha$n.p = 0.5",
            "bound": "$owner.leaky$n.upper = 0.5",
            "evaluated": "$owner.leaky$n.eval()",
        },
    ),
    Feature(
        name="sometimes left out",
        init="self.keep$n = 0.5",
        forward="if not self.training or torch.rand(()).item() < self.keep$n:\n    y = y * 2.0",
        changes={"always": "$owner.keep$n = 1.0"},
    ),
    Feature(
        name="random state put back",
        forward="with torch.random.fork_rng(devices=[]):\n    torch.manual_seed(3)\n    y = y + torch.rand(4)",
    ),
)
