"""A failing program as a script of its own, which shows eager beside the mode; it needs no file of ours."""

from __future__ import annotations

from string import Template

from adversary.devices import device_of
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
PATHS = $paths


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
        if torch.is_grad_enabled() and torch.is_tensor(x) and x.requires_grad:
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

    name, _, device = MODE.split(":")[1].partition("@")
    if MODE.startswith("call:"):
        return rl.hybridize(w.model, x_of(0), mode=name, max_shapes=4)
    return rl.TrainStep(w.model, w.loss_fn, w.optimizer, rl.Plan(execution=name), device=device or "cpu")


def one(module, w, run, index, before):
    torch.set_rng_state(before[0])
    torch.set_default_dtype(before[1])
    try:
        result = module.CALLS[index](w, run)
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    return result, (torch.get_rng_state(), torch.get_default_dtype())


def same(wanted, got):
    if isinstance(wanted, (list, tuple)) and type(wanted) is type(got):
        return len(wanted) == len(got) and all(map(same, wanted, got))
    if isinstance(wanted, dict) and isinstance(got, dict):
        return wanted.keys() == got.keys() and all(same(wanted[k], got[k]) for k in wanted)
    if not torch.is_tensor(wanted) or type(wanted).__name__ != type(got).__name__:
        return repr(wanted) == repr(got)
    about = lambda t: (t.shape, t.stride(), t.dtype, t.requires_grad, t.is_inference())
    values = (side.detach().as_subclass(torch.Tensor).double() for side in (wanted, got))
    return about(wanted) == about(got) and torch.allclose(*values, 1e-3, 1e-5, equal_nan=True)


def look(path, module, w):
    try:
        return eval(path, vars(module), {"w": w})
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def show(what, wanted, got):
    if what == "result" or not same(wanted, got):
        print(f"  {what}: {'same' if same(wanted, got) else 'DIFFERENT'}")
        print(f"    eager: {wanted}\\n    mode:  {got}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    (eager_module, eager), (mode_module, mode) = load("eager_copy"), load("mode_copy")
    torch.manual_seed(2)
    try:
        runs = plain(eager), ridgeline(mode)
    except Exception as error:
        print(f"making it raises {type(error).__name__}: {error}")
        for path in PATHS:
            show(path, look(path, eager_module, eager), look(path, mode_module, mode))
        raise SystemExit(f"Found by the adversary in {MODE}: {KIND}{FOUND}") from None
    before = torch.get_rng_state(), torch.get_default_dtype()
    for index in range(len(CALLS)):
        wanted, after = one(eager_module, eager, runs[0], index, before)
        got, mode_after = one(mode_module, mode, runs[1], index, before)
        print(f"call {index}")
        show("result", wanted, got)
        for path in PATHS:
            show(path, look(path, eager_module, eager), look(path, mode_module, mode))
        show("random state", hash(after[0].numpy().tobytes()), hash(mode_after[0].numpy().tobytes()))
        before = after
    print(f"Found by the adversary in {MODE}: {KIND}{FOUND}")
'''


def script(program: Program, verdict: Verdict) -> str:
    """The text of the script."""
    detail = verdict.detail.strip().replace("\\", "/").replace('"""', "'''")
    paths = [path for path in verdict.paths if not path.startswith("result")]
    footer = Template(FOOTER).substitute(
        mode=verdict.mode, kind=verdict.kind, detail=detail, paths=repr(paths)
    )
    return render(program, device_of(verdict.mode)) + footer
