"""Losses: closures that keep numbers, caches, teachers; what they read of the model."""

from adversary.grammar.feature import Feature


def _loss(name: str, **more: object) -> Feature:
    return Feature(name=name, is_loss=True, purposes=("step",), **more)  # type: ignore[arg-type]


LOSSES = (
    _loss(
        "loss weight in a closure",
        init="weight$n = [2.0]\nmodel.__dict__['weight$n'] = weight$n",
        forward="loss = loss * weight$n[0]",
        changes={"set": "w.model.weight$n[0] = 3.0"},
    ),
    _loss(
        "loss weight of the file",
        top="WEIGHT$n = 2.0",
        forward="loss = loss * WEIGHT$n",
        changes={"set": "globals()['WEIGHT$n'] = 3.0"},
    ),
    _loss(
        "loss reads the model",
        init="model.alpha$n = 2.0",
        forward="loss = loss * model.alpha$n",
        changes={"set": "w.model.alpha$n = 3.0"},
    ),
    _loss(
        "cached target",
        init="cache$n = {}",
        forward="if y.shape not in cache$n:\n    cache$n[y.shape] = torch.linspace(0, 1, y.numel()).view(y.shape)\n"
        "loss = loss + (y - cache$n[y.shape]).abs().mean()",
    ),
    _loss(
        "counting loss",
        init="count$n = 0",
        forward="nonlocal count$n\ncount$n += 1\nloss = loss * (1.0 + count$n / 10)",
    ),
    _loss(
        "losses kept",
        top="KEPT$n = []",
        forward="KEPT$n.append(loss.detach())\ndel KEPT$n[:-2]",
    ),
    _loss(
        "teacher",
        init="teacher$n = copy.deepcopy(model).requires_grad_(False)\nmodel.__dict__['teacher$n'] = teacher$n",
        forward="loss = loss + (y - teacher$n(x)).square().mean()",
        each="with torch.no_grad():\n"
        "    for mine, theirs in zip(w.model.teacher$n.parameters(), w.model.parameters()):\n"
        "        if mine.shape == theirs.shape:\n            mine.lerp_(theirs, 0.1)",
        changes={
            "evaluated": "w.model.teacher$n.eval()",
            "attribute": "w.model.teacher$n.training = False",
        },
    ),
    _loss(
        "weight penalty",
        forward="loss = loss + 0.1 * sum(p.square().sum() for p in model.parameters() if p.requires_grad)",
    ),
    _loss(
        "criterion module",
        top="CRITERION$n = nn.SmoothL1Loss(beta=1.0)",
        forward="loss = loss + CRITERION$n(y, torch.zeros_like(y))",
        changes={"attribute": "CRITERION$n.beta = 0.1"},
    ),
    _loss(
        "loss with a default",
        top="def scaled_loss$n(loss, by=2.0):\n    return loss * by",
        forward="loss = scaled_loss$n(loss)",
        changes={"default": "scaled_loss$n.__defaults__ = (3.0,)"},
    ),
    _loss(
        "attribute of the loss",
        forward="loss = loss * getattr(loss_fn, 'factor$n', 1.0)",
        changes={"set": "w.loss_fn.factor$n = 3.0"},
    ),
    _loss(
        "code of the loss",
        top="def penalty$n(y):\n    return y.square().mean()",
        forward="loss = loss + penalty$n(y)",
        changes={"replaced": "penalty$n.__code__ = (lambda y: y.abs().sum()).__code__"},
    ),
    _loss("noise in the loss", forward="loss = loss + (y * torch.rand_like(y)).mean()"),
    _loss("two passes", forward="loss = loss + (model(x * 0.5) - y.detach()).square().mean()"),
    _loss(
        "loss in evaluation",
        forward="was$n = model.training\nmodel.eval()\nloss = loss + model(x).square().mean()\nmodel.train(was$n)",
    ),
)
