"""What stopped torch's compiler as it read a program, in words and with the line."""

import re
from pathlib import Path

from ridgeline.errors import first_line
from ridgeline.reach.owners import is_machinery, is_standard, is_torchs

_PLACE = re.compile(r'File "(.+)", line (\d+), in (\S+)')
_LEFT_CHANGED = (
    "requires_grad_() of a tensor that it is given, which stays changed behind it: call it on a copy, as "
    "in x.clone().requires_grad_()"
)
_DRAWN = (
    "a draw of random numbers that are not torch's ({}): draw with torch, or outside of the step"
)
_CALLED = "a call of {}, which the compiler does not read"
_CALLED_OF = _CALLED.replace("{}", "{}.{}")
_OF_PYTHON = "where a captured program does not look"
_WORDS = {
    r"attempted to jump with .*NumpyNdarrayVariable": (
        "a branch on a number of NumPy's, whose value a program leaves open; make it Python's own, by "
        "item(), where it is set"
    ),
    r"data-dependent": "a branch on the value of a tensor",
    r"Unsupported Tensor.requires_grad_\(\) call|setattr\(\) on Tensor.requires_grad": _LEFT_CHANGED,
    r"args/kwargs to proxy(?s:.*)\(Generator\)": (
        f"a draw from a torch.Generator, whose state is kept {_OF_PYTHON}; draw outside and pass what it "
        "gives, or draw without it"
    ),
    r"is_inference_mode_enabled during tracing": (
        f"a call of torch.is_inference_mode_enabled(), {_OF_PYTHON}"
    ),
    r"enter a `RLock` context manager": (
        "a lock, as the first read of a functools.cached_property takes one; read that once before"
    ),
    r"functools\.py\", line \d+, in dispatch": (
        f"a call of a functools.singledispatch function, which looks for types {_OF_PYTHON}"
    ),
    r"op returned non-Tensor(?s:.*)target: <function (\w+) ": "a call of {}(), which gives no tensor",
    r"GetAttrVariable\(AutogradFunctionVariable\(\), (\w+)\)": (
        "{} of an autograd.Function, in whose class the compiler reads numbers and texts only; hold it in a "
        "name of the module, or pass it to apply()"
    ),
    r"module: torch\.ao\.quantization\S*, qualname: (\w*observer\w*)": (
        "an observer of torch.ao.quantization ({}), which decides by values of its buffers"
    ),
    # Kinds of failures, of which dynamo tells the rest in sentences for its developers.
    r"marked as skipped\n.*`(?:<unknown module>\.)?(Random\.\w+)": _DRAWN,
    r"unsupported by PyTorch\n.*bound method (RandomState\.\w+)": _DRAWN,
    r"Unsupported method call\n.*method `(\w+)` of class `(?:RandomState|Generator)`": _DRAWN,
    r"marked as skipped\n(?s:.)*?module: ([\w.]+), qualname: ([\w.<>]+)": _CALLED_OF,
    r"marked as skipped\n(?s:.)*?context: qualname: ([\w.<>]+),": _CALLED,
    r"marked as skipped\n.*builtin `(?:<unknown module>\.)?(.+?)\.?`": _CALLED,
    r"Unsupported method call\n.*(method `\w+` of class `\w+`)": _CALLED,
    r"Failed to trace builtin operator\n.*operator `(\w+)`": _CALLED,
    r"Observed exception\n(?s:.)*?raised exception (.+)": "{}, raised as the compiler read the code",
    r"args/kwargs to proxy\n(?s:.)*?args: (?:TensorVariable\(\) )*(.+?) *\n": "an operator on no tensor ({})",
    r"Dynamic shape operator\n.*Operator `([\w.]+)`": "{}, whose result is as long as values decide",
    r"Pending unbacked symbols": "a size that the values of tensors decide",
    r"valid indices \(got SymInt\)": "an index that the values of tensors decide",
    r"modified by an inplace operation: \[(?:torch\.)?(\w+ \[[\d, ]*\])": (
        "a tensor ({}) that the code changes in place before backward, where compiled code reads it again: "
        "change a copy, or change it behind the step"
    ),
    r"in sourceless builder\n(?s:.)*?debug context: (\S+)": "an object of {}, which it cannot follow",
    r"its data is not allocated yet": (
        "a look at the values of a tensor, which has none as it is read (torch.as_tensor of a list of "
        "tensors: use torch.stack)"
    ),
}
"""What is found in an error (groups of the pattern go to the braces), and what is said of it."""


def obstacle(error: BaseException) -> str:
    """What stopped the compiler: the first line of its error, and the innermost line of the program's own."""
    text = str(error)
    # Within what it quotes of another error, lines end in two characters.
    first = first_line(error, type(error).__name__).partition("\\n")[0]
    found = ((re.search(pattern, text), words) for pattern, words in _WORDS.items())
    what = next((words.format(*match.groups()) for match, words in found if match), first)
    places = [match for match in _PLACE.findall(text) if not is_machinery(match[0])]
    own = [match for match in places if not (is_torchs(match[0]) or is_standard(match[0]))]
    place = (own or places)[-1:]
    where = "".join(f" ({Path(file).name}:{line} in {name})" for file, line, name in place)
    return what.rstrip(".") + where
