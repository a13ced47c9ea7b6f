"""What may happen to any program between calls, what a call is given, and where it is made."""

MODEL_CHANGES: dict[str, str] = {
    "evaluate": "w.model.eval()",
    "train": "w.model.train()",
    "evaluate one block": "w.model.blocks[0].eval()",
    "freeze a block": "w.model.blocks[0].requires_grad_(False)",
    "freeze a bias": "w.model.head.bias.requires_grad_(False)",
    "unfreeze": "w.model.requires_grad_(True)",
    "weight in place": "w.model.head.weight.data.mul_(2.0)",
    "weight replaced": "w.model.head.weight = nn.Parameter(torch.eye(4))",
    "weight of another shape": "w.model.head.weight = nn.Parameter(torch.ones(2, 4))\n"
    "w.model.head.bias = nn.Parameter(torch.zeros(2))",
    "weight transposed": "w.model.head.weight.data = w.model.head.weight.data.t()",
    "weight with other strides": "w.model.head.weight.data = w.model.head.weight.data.t().contiguous().t()",
    "weight's strides at its address": "weight = w.model.head.weight\n"
    "weight.data = weight.data.as_strided((4, 4), (1, 4))",
    "weight's sign at its address": "w.model.head.weight.data.view(torch.int32).bitwise_xor_(-(2**31))",
    "weight's sign noted": "w.model.head.weight.data = torch._neg_view(w.model.head.weight.data)",
    "weight's data exchanged": "w.model.head.weight.data = w.model.head.weight.data.clone() * 2",
    "model to double": "w.model.double()",
    "bias removed": "w.model.head.bias = None",
    "bias's address kept": "bias = w.model.head.bias\nw.model.head.bias = nn.Parameter(bias.data)",
    "bias half as long at its address": "bias = w.model.blocks[1].lin.bias\n"
    "w.model.blocks[1].lin.bias = nn.Parameter(bias.data[:1])",
    "weights exchanged": "first, second = w.model.blocks[0].lin, w.model.blocks[1].lin\n"
    "first.weight, second.weight = second.weight, first.weight",
    "weight tied to another": "w.model.blocks[1].lin.weight = w.model.blocks[0].lin.weight",
    "blocks exchanged": "blocks = w.model.blocks\nblocks[0], blocks[1] = blocks[1], blocks[0]",
    "block repeated": "w.model.blocks[1] = w.model.blocks[0]",
    "block added": "w.model.blocks.append(nn.Tanh())",
    "block removed": "if len(w.model.blocks) > 1:\n    del w.model.blocks[-1]",
    "head replaced": "w.model.head = nn.Sequential(w.model.head, nn.Tanh())\n"
    "w.model.head.weight, w.model.head.bias = w.model.head[0].weight, w.model.head[0].bias",
    "state loaded": "w.model.load_state_dict({k: v * 0.5 if v.is_floating_point() else v\n"
    "    for k, v in w.model.state_dict().items()})",
    "state assigned": "w.model.load_state_dict({k: v.clone() for k, v in w.model.state_dict().items()}, assign=True)",
    "hook on a block": "w.model.blocks[0].register_forward_hook(lambda module, args, out: out + 1.0)",
    "hook on the model": "w.model.register_forward_hook(lambda module, args, out: out)",
    "pre-hook on a block": "w.model.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] * 2,))",
    "hooks cleared": "for module in w.model.modules():\n    module._forward_hooks.clear()",
    "forward of a block": "w.model.blocks[0].forward = lambda y: y * 0.5",
    "forward of the class": "Block.forward = lambda self, y: torch.relu(self.lin(y))",
    "forward of a layer": "w.model.blocks[0].lin.forward = lambda y: y * 2.0",
    "seed": "torch.manual_seed(7)",
    "seed of Python": "random.seed(7)",
    "default dtype double": "torch.set_default_dtype(torch.float64)",
    "default dtype float": "torch.set_default_dtype(torch.float32)",
    "layer swapped": "w.model.blocks[0].lin = nn.Linear(4, 4, bias=False)",
    "head parametrized": "nn.utils.parametrize.register_parametrization(w.model.head, 'bias', nn.Tanh())",
    "state assigned in double": "w.model.load_state_dict(\n"
    "    {k: v.double() for k, v in w.model.state_dict().items()}, assign=True)",
    "state assigned, tied": "state = w.model.state_dict()\n"
    "if 'blocks.0.lin.weight' in state and 'blocks.1.lin.weight' in state:\n"
    "    state['blocks.1.lin.weight'] = state['blocks.0.lin.weight']\n"
    "w.model.load_state_dict(state, assign=True)",
    "views of one tensor": "flat = torch.cat([p.detach().flatten() for p in w.model.parameters()])\n"
    "for p in w.model.parameters():\n"
    "    p.data, flat = flat[:p.numel()].view(p.shape), flat[p.numel():]",
    "data shared": "w.model.blocks[-1].lin.weight.data = w.model.blocks[0].lin.weight.data",
    "called in between": "w.model(torch.ones(2, 4))",
    "called in between without gradients": "with torch.no_grad():\n    w.model(torch.ones(3, 4))",
    "called in between in evaluation": "w.model.eval()\nwith torch.inference_mode():\n    w.model(torch.ones(3, 4))\n"
    "w.model.train()",
    "class of a block": "w.model.blocks[0].__class__ = type('Other', (Block,), {'forward': lambda self, y: y + 1.0})",
    "channels last": "w.model.to(memory_format=torch.channels_last)",
    "pruned": "import torch.nn.utils.prune as prune\nprune.l1_unstructured(w.model.head, 'weight', 0.5)",
    "weight norm": "nn.utils.parametrizations.weight_norm(w.model.blocks[-1], 'weight')"
    " if hasattr(w.model.blocks[-1], 'weight') else None",
    "late buffer": "w.model.register_buffer('late_buffer', torch.ones(4))",
    "weight under no_grad": "with torch.no_grad():\n    for p in w.model.parameters():\n        p.add_(0.1)",
    "weight by a vector": "nn.utils.vector_to_parameters(\n"
    "    nn.utils.parameters_to_vector(w.model.parameters()).detach() * 0.5, w.model.parameters())",
    "random draws in between": "torch.rand(3), random.random(), np.random.rand()",
    "copied": "copy.deepcopy(w.model)",
}
"""Name to lines over `w`, which has `model`, `loss_fn` and `optimizer`."""

OPTIMIZER_CHANGES: dict[str, str] = {
    "learning rate": "w.optimizer.param_groups[0]['lr'] = 0.01",
    "learning rate zero": "w.optimizer.param_groups[0]['lr'] = 0.0",
    "learning rate as a tensor": "for group in w.optimizer.param_groups:\n    group['lr'] = torch.tensor(0.02)",
    "learning rate in place": "rate = w.optimizer.param_groups[0]['lr']\n"
    "w.optimizer.param_groups[0]['lr'] = rate.mul_(0.5) if torch.is_tensor(rate) else rate / 2",
    "epsilon": "for group in w.optimizer.param_groups:\n    group['eps'] = 0.1",
    "betas": "if 'betas' in w.optimizer.param_groups[0]:\n    w.optimizer.param_groups[0]['betas'] = (0.5, 0.9)",
    "betas as a list": "if 'betas' in w.optimizer.param_groups[0]:\n"
    "    w.optimizer.param_groups[0]['betas'] = [*w.optimizer.param_groups[0]['betas']]",
    "beta of the list": "if isinstance(w.optimizer.param_groups[0].get('betas'), list):\n"
    "    w.optimizer.param_groups[0]['betas'][0] = 0.1",
    "for each": "w.optimizer.param_groups[0]['foreach'] = not w.optimizer.param_groups[0]['foreach']",
    "weight decay": "w.optimizer.param_groups[0]['weight_decay'] = 0.5",
    "momentum": "if 'momentum' in w.optimizer.param_groups[0]:\n    w.optimizer.param_groups[0]['momentum'] = 0.5",
    "maximize": "w.optimizer.param_groups[0]['maximize'] = True",
    "parameter group": "w.model.late = nn.Parameter(torch.ones(4))\n"
    "w.optimizer.add_param_group({'params': [w.model.late], 'lr': 0.02})",
    "group moved": "bias = w.optimizer.param_groups[0]['params'].pop()\n"
    "w.optimizer.add_param_group({'params': [bias], 'lr': 0.001})",
    "parameter dropped": "w.optimizer.param_groups[0]['params'].pop()",
    "optimizer state cleared": "w.optimizer.state.clear()",
    "optimizer state loaded": "w.optimizer.load_state_dict(w.optimizer.state_dict())",
    "optimizer state in place": "for state in w.optimizer.state.values():\n"
    "    for value in state.values():\n"
    "        if torch.is_tensor(value) and value.dim():\n            value.mul_(0.5)",
    "optimizer state replaced": "for state in w.optimizer.state.values():\n"
    "    for key, value in state.items():\n"
    "        if torch.is_tensor(value) and value.dim():\n            state[key] = value * 0.5",
    "state of one parameter cleared": "w.optimizer.state.pop(w.optimizer.param_groups[0]['params'][0], None)",
    "late parameter of a group": "w.model.late = nn.Parameter(torch.ones(4))\n"
    "w.optimizer.param_groups[0]['params'].append(w.model.late)",
    "parameters in another order": "w.optimizer.param_groups[0]['params'].reverse()",
    "step of the optimizer": "plain = w.optimizer.step\n"
    "w.optimizer.step = lambda *args: (plain(*args), w.model.head.bias.data.add_(0.1))[0]",
    "frozen weight, in the optimizer's list": "w.optimizer.param_groups[0]['params'][0].requires_grad = False",
    "hook on a gradient": "w.model.blocks[0].lin.weight.register_hook(lambda grad: grad * 2.0)",
    "hook on an accumulated gradient": "w.model.blocks[0].lin.weight.register_post_accumulate_grad_hook(\n"
    "    lambda p: (p.grad.mul_(2.0), None)[1])",
    "backward hook on a block": "w.model.blocks[0].register_full_backward_hook(\n"
    "    lambda module, inputs, outputs: tuple(None if g is None else g * 2.0 for g in inputs))",
    "step pre-hook": "w.optimizer.register_step_pre_hook(\n"
    "    lambda *_: (w.model.head.bias.data.add_(0.1), None)[1])",
    "gradients left": "for p in w.model.parameters():\n    p.grad = torch.ones_like(p)",
    "step hook": "w.optimizer.register_step_post_hook(lambda *_: w.model.head.bias.data.add_(0.1))",
    "scheduler": "torch.optim.lr_scheduler.StepLR(w.optimizer, 1, 0.5).step()",
    "schedule in a cycle": "if not hasattr(w, 'cycle'):\n    w.cycle = torch.optim.lr_scheduler.CyclicLR(\n"
    "        w.optimizer, 0.001, 0.1, step_size_up=2, cycle_momentum='momentum' in w.optimizer.defaults)\n"
    "w.cycle.step()",
    "schedule on the loss": "torch.optim.lr_scheduler.ReduceLROnPlateau(w.optimizer, patience=0).step(1.0)",
    "fused": "for group in w.optimizer.param_groups:\n    if 'fused' in group:\n"
    "        group['foreach'], group['fused'] = False, True\n"
    # As loading a state does: a fused kernel reads the count of steps where the parameters are.
    "for state in w.optimizer.state.values():\n    if torch.is_tensor(state.get('step')):\n"
    "        state['step'] = state['step'].to('cpu')",
    "no form": "for group in w.optimizer.param_groups:\n    group['foreach'] = group['fused'] = False",
    "optimizer in double": "for state in w.optimizer.state.values():\n    for key, value in state.items():\n"
    "        if torch.is_tensor(value) and value.dim():\n            state[key] = value.double().float()",
    "optimizer's count": "for state in w.optimizer.state.values():\n    if 'step' in state:\n"
    "        state['step'] = torch.tensor(10.0)",
    "optimizer stepped alone": "w.optimizer.step()",
    "gradients cleared": "w.model.zero_grad(set_to_none=False)",
    "rates by groups": "for place, group in enumerate(w.optimizer.param_groups):\n    group['lr'] = 0.01 / (place + 1)",
}

CHANGES = {**MODEL_CHANGES, **OPTIMIZER_CHANGES}
STEP_CHANGES = frozenset(OPTIMIZER_CHANGES)
"""Those that only a training step notices."""

INPUTS: dict[str, str] = {
    "plain": "x_of($i)",
    "more rows": "x_of($i).repeat(2, 1)",
    "one row": "x_of($i)[:1]",
    "no rows": "x_of($i)[:0]",
    "double": "x_of($i).double()",
    "half": "x_of($i).half()",
    "bfloat16": "x_of($i).bfloat16()",
    "integers": "torch.arange(12).view(3, 4)",
    "transposed": "x_of($i).t().contiguous().t()",
    "expanded": "x_of($i)[:1].expand(3, 4)",
    "every second": "x_of($i).repeat(1, 2)[:, ::2]",
    "shifted": "torch.cat([x_of($i)[:1], x_of($i)])[1:]",
    "misaligned": "torch.cat([torch.zeros(1), x_of($i).flatten()])[1:].view(3, 4)",
    "flipped": "x_of($i).flip(0)",
    "three dimensions": "x_of($i).unsqueeze(0)",
    "requires gradients": "x_of($i).requires_grad_()",
    "a parameter": "nn.Parameter(x_of($i))",
    "conjugated": "torch.complex(x_of($i), x_of($i)).conj().imag",
    "negative view": "torch._neg_view(x_of($i))",
    "the weight": "w.model.blocks[0].lin.weight.detach()",
    "one dimension": "x_of($i)[0]",
    "truth": "x_of($i) > 0",
    "channels last": "x_of($i).repeat(2, 1).view(1, 2, 3, 4).to(memory_format=torch.channels_last)",
    "no leaf": "x_of($i).requires_grad_() * 1.0",
    "of inference": "torch.inference_mode()(x_of)($i)",
    "one tensor filled again": "w.__dict__.setdefault('kept', torch.zeros(3, 4)).copy_(x_of($i))",
    "labelled": "x_of($i).as_subclass(Labelled)",
    "named tuple": "Named(x_of($i), 2.0)",
    "named tuple of another number": "Named(x_of($i), 3.0)",
    "dataclass": "Held(x_of($i), 2.0)",
    "dictionary": "{'x': x_of($i), 'by': 2.0}",
    "dictionary in another order": "{'by': 2.0, 'x': x_of($i)}",
}
"""Name to an expression; `$i` is the number of the call."""

CONTEXTS: dict[str, str] = {
    "plain": "",
    "autocast bf16": "torch.autocast('cpu', torch.bfloat16)",
    "autocast fp16": "torch.autocast('cpu', torch.float16)",
    "autocast off": "torch.autocast('cpu', enabled=False)",
    "no_grad": "torch.no_grad()",
    "inference_mode": "torch.inference_mode()",
    "enable_grad": "torch.enable_grad()",
    "deterministic": "deterministic()",
    "hook on all modules": "global_hook(lambda module, args, out: out * 1.5)",
    "anomaly": "torch.autograd.set_detect_anomaly(True)",
    "tensors saved on the way": "torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t)",
    "threads": "threads(2)",
    "function mode": "Doubling()",
    "default device": "torch.device('cpu')",
    "random state forked": "torch.random.fork_rng()",
    "parametrizations cached": "nn.utils.parametrize.cached()",
    "dispatch mode": "Halving()",
    "saved on the host": "torch.autograd.graph.save_on_cpu()",
    "autocast without a cache": "torch.autocast('cpu', torch.bfloat16, cache_enabled=False)",
    "kernels of torch alone": "torch.backends.mkldnn.flags(enabled=False)",
}
"""Name to a context manager around the call."""

WITHOUT_GRADIENTS = frozenset(("no_grad", "inference_mode"))
"""No step can be trained there, in any mode."""

OPTIMIZERS: dict[str, str] = {
    "sgd": "torch.optim.SGD(params, lr=0.05)",
    "momentum": "torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)",
    # With `foreach`, the default on GPUs, torch's SGD leaves the update in `.grad`, where nobody decays weights.
    "nesterov": "torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, foreach=False)",
    "adam": "torch.optim.Adam(params, lr=0.01)",
    "adamw": "torch.optim.AdamW(params, lr=0.01, amsgrad=True)",
    "rmsprop": "torch.optim.RMSprop(params, lr=0.01)",
    "adagrad": "torch.optim.Adagrad(params, lr=0.05)",
    "nadam": "torch.optim.NAdam(params, lr=0.01)",
    "radam": "torch.optim.RAdam(params, lr=0.01)",
    "adamax": "torch.optim.Adamax(params, lr=0.01)",
    "adadelta": "torch.optim.Adadelta(params, lr=0.5)",
    "asgd": "torch.optim.ASGD(params, lr=0.05)",
    "rprop": "torch.optim.Rprop(params, lr=0.01)",
    "fused adam": "torch.optim.Adam(params, lr=0.01, fused=True)",
    "sgd one by one": "torch.optim.SGD(params, lr=0.05, momentum=0.9, foreach=False, fused=False)",
    "adam of a tensor": "torch.optim.Adam(params, lr=torch.tensor(0.01), foreach=False)",
    "three groups": "torch.optim.AdamW([{'params': params[:2], 'betas': (0.5, 0.9)},\n"
    "        {'params': params[2:3], 'weight_decay': 0.0}, {'params': params[3:], 'lr': 0.001}], lr=0.01)",
    "two groups": "torch.optim.SGD([{'params': params[:2]}, {'params': params[2:], 'lr': 0.01}], lr=0.05)",
}
"""Name to an expression over `params`."""
