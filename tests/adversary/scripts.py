"""A failing program as a script of its own, which shows eager beside the mode; it needs no file of ours."""

from __future__ import annotations

from string import Template

from adversary.judging import Verdict
from adversary.program import Program
from adversary.rendering import render

FOOTER = '''

# ---- What shows it: two copies of this file, one run by plain PyTorch and one by Ridgeline. ----
MODE = "$mode"
KIND = """$kind"""
FOUND = """
$detail
"""


def load(name):
    import importlib.util
    import sys

    spec = importlib.util.spec_from_file_location(name, __file__)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module, module.make()


def plain(w):
    def call(x):
        if torch.is_grad_enabled() and x.requires_grad:
            return w.model(x)
        with torch.no_grad():
            return w.model(x)

    def step(x):
        w.optimizer.zero_grad(set_to_none=True)
        loss = w.loss_fn(w.model, x)
        loss.backward()
        w.optimizer.step()
        return loss.detach()

    return call if MODE.startswith("call:") else step


def ridgeline(w):
    import ridgeline as rl

    name = MODE.split(":")[1]
    if MODE.startswith("call:"):
        return rl.hybridize(w.model, x_of(0), mode=name, max_shapes=4)
    return rl.TrainStep(w.model, w.loss_fn, w.optimizer, rl.Plan(execution=name), device="cpu")


def one(module, w, run, index, before):
    torch.set_rng_state(before[0])
    torch.set_default_dtype(before[1])
    try:
        result = module.CALLS[index](w, run)
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    return result, (torch.get_rng_state(), torch.get_default_dtype())


def show(what, wanted, got):
    same = wanted == got
    if torch.is_tensor(wanted) and torch.is_tensor(got):
        same = wanted.shape == got.shape and torch.allclose(wanted.double(), got.double(), 1e-3, 1e-5)
    if not same or what == "result":
        print(f"  {what}: {'same' if same else 'DIFFERENT'}\\n    eager: {wanted}\\n    mode:  {got}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    (eager_module, eager), (mode_module, mode) = load("eager_copy"), load("mode_copy")
    torch.manual_seed(2)
    runs = plain(eager), ridgeline(mode)
    before = torch.get_rng_state(), torch.get_default_dtype()
    for index in range(len(CALLS)):
        wanted, after = one(eager_module, eager, runs[0], index, before)
        got, mode_after = one(mode_module, mode, runs[1], index, before)
        print(f"call {index}")
        show("result", wanted, got)
        for name, tensor in eager.model.state_dict().items():
            show(name, tensor, mode.model.state_dict().get(name))
        show("random state", hash(after[0].numpy().tobytes()), hash(mode_after[0].numpy().tobytes()))
        before = after
    print(f"Found by the adversary in {MODE}: {KIND}{FOUND}")
'''


def script(program: Program, verdict: Verdict) -> str:
    """The text of the script."""
    detail = verdict.detail.strip().replace("\\", "/").replace('"""', "'''")
    footer = Template(FOOTER).substitute(mode=verdict.mode, kind=verdict.kind, detail=detail)
    return render(program) + footer
