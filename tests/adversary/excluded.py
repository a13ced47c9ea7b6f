"""What fails at present, by mode, and why: left out of the programs of the tests, until it is cured.

`run.py --each --once` runs everything; its report says what is listed here and fails no longer. To cure
something, remove its words here and see the tests pass.
"""

from __future__ import annotations

from typing import NamedTuple


class Exclusion(NamedTuple):
    """Features, `feature/change`s, changes, inputs and contexts that some modes get wrong."""

    why: str
    modes: tuple[str, ...]
    text: str

    @property
    def words(self) -> tuple[str, ...]:
        """The words of `text`, which semicolons part."""
        return tuple(word for part in self.text.split(";") if (word := " ".join(part.split())))


CALLS = ("call:script", "call:compiled", "call:regional", "call:packaged")
GUARDED = ("step:compiled", "step:regional")
ONE_PROGRAM = ("step:step-graph", "step:packaged")

EXCLUDED: tuple[Exclusion, ...] = (
    Exclusion(
        "Not noticed: class attributes, slots, NumPy arrays, what is three objects deep or "
        "read by a computed name, attributes that appear, 0.0 that becomes -0.0.",
        CALLS,
        """
        array/element; attribute with default/add; attribute with default/on the class;
        class attribute/on the class; deep object/deepest; dynamic name/what; has attribute/add;
        object's method/attribute; object's method/method of the class;
        object's method/method of the object; property/replaced; signed zero/negative;
        slotted dataclass/set; through vars/set
        """,
    ),
    Exclusion(
        "An attribute that was missing at capture is not waited for; modes of torch are not "
        "looked at.",
        CALLS,
        """
        expects an exception/added
        """,
    ),
    Exclusion(
        "Not noticed: methods put on classes and objects, defaults, code of closures, what "
        "inherited methods and decorators read.",
        CALLS,
        """
        closure/code; decorated/what the decorator reads; default arguments/default;
        default arguments/keyword default; default arguments/keyword entry;
        helper of a submodule/attribute; helper of a submodule/method;
        inherited forward/attribute of the ancestor; inherited forward/method of the heir;
        inherited forward/no override; list as a default/element; method/on the class;
        method/on the object; mixin/attribute; mixin/method; mixin/override;
        static method/default; static method/replaced; super forward/class of the object;
        super forward/forward of the child; super forward/forward of the object;
        super forward/forward of the parent; super forward/what the parent reads
        """,
    ),
    Exclusion(
        "What the code keeps in Python stays as it was at capture, or was changed by the "
        "capture's own runs, also before a refusal.",
        CALLS,
        """
        cache by shape; counter; first call is special; global counter; hidden state; history;
        idle counter; last activation; lazy module; lazy tensor
        """,
    ),
    Exclusion(
        "What hooks read and do in Python is not noticed; TorchScript fails on some hooks "
        "with an error of its own.",
        CALLS,
        """
        forward hook/before the first; forward hook/what it reads;
        forward pre-hook/what it reads; hook that counts
        """,
    ),
    Exclusion(
        "Not noticed: a forward put on a module or a class, and weights of other strides or "
        "length at the same address.",
        CALLS,
        """
        bias half as long at its address; block repeated; forward of a block;
        forward of a layer; forward of the class; weight transposed;
        weight's strides at its address
        """,
    ),
    Exclusion(
        "Generators of the user's own are drawn from by checks, and are further on after a "
        "refusal.",
        CALLS,
        """
        generator; generator of the file; numpy generator
        """,
    ),
    Exclusion(
        "A result that is the module's own tensor, or a view of an argument, is another tensor.",
        CALLS,
        """
        weight result
        """,
    ),
    Exclusion(
        "Buffers that are replaced are changed by a refused capture; tensors in containers "
        "are constants.",
        CALLS,
        """
        reassigned buffer; tensors in containers/in place
        """,
    ),
    Exclusion(
        "torch's compiler guards neither the sign of zero, nor lists in tuples, nor methods "
        "of classes.",
        GUARDED,
        """
        object's method/method of the class; signed zero/negative; tuple of lists/element
        """,
    ),
    Exclusion(
        "torch's compiler does not guard functions that are attributes of classes.",
        GUARDED,
        """
        helper of a submodule/method; inherited forward/method of the heir;
        inherited forward/no override; method/on the class; mixin/method; mixin/override;
        super forward/forward of the child
        """,
    ),
    Exclusion(
        "Python values that the model reads are constants of one program; the guide says so.",
        ONE_PROGRAM,
        """
        array/element; attribute with default/add; attribute with default/on the class;
        callable object/entry; callable object/replaced; class attribute/on the class;
        class attribute/on the object; deep object/deepest; deep object/middle;
        dictionary/entry; dictionary/inner entry; dictionary/replaced; dynamic name/what;
        dynamic name/which; frozen dataclass/forced; frozen dataclass/replaced;
        has attribute/add; int or float/to float; list/element; list/longer; list/shorter;
        none or number/set; number/class attribute; number/set; number/to a tensor;
        number/to nan; object's method/attribute; object's method/method of the class;
        object's method/method of the object; objects in a list/attribute; plain object/inner;
        plain object/replaced; plain object/set; property/replaced; property/what it reads;
        set/add; signed zero/negative; slotted dataclass/replaced; slotted dataclass/set;
        text/set; through vars/set; tuple of lists/element
        """,
    ),
    Exclusion(
        "So are branches on what changed.",
        ONE_PROGRAM,
        """
        branch on a number/set; expects an exception/added; loop of a length/more;
        loop of a length/none
        """,
    ),
    Exclusion(
        "Code, and what it reads of closures, globals and defaults, is a constant of one program.",
        ONE_PROGRAM,
        """
        closure/cell; closure/code; closure/content; decorated/what the decorator reads;
        default arguments/default; default arguments/keyword default;
        default arguments/keyword entry; function of a namespace/function;
        function of a namespace/number; global function/inner; global function/outer;
        global list/element; global list/replaced; global number/set; global tensor/replaced;
        helper of a submodule/attribute; helper of a submodule/method; hidden module/replaced;
        hidden module/weight; inherited forward/attribute of the ancestor;
        inherited forward/method of the heir; inherited forward/no override; lambda/content;
        lambda/replaced; list as a default/element; method/attribute; method/on the class;
        method/on the object; mixin/attribute; mixin/method; mixin/override; partial/content;
        partial/replaced; static method/default; static method/replaced;
        super forward/class of the object; super forward/forward of the child;
        super forward/forward of the object; super forward/forward of the parent;
        super forward/what the parent reads
        """,
    ),
    Exclusion(
        "Caches that are emptied or reset are not filled again.",
        ONE_PROGRAM,
        """
        cache by shape/emptied; cache by shape/entries replaced; first call is special/again;
        lazy tensor/removed
        """,
    ),
    Exclusion(
        "What hooks read is a constant of one program.",
        ONE_PROGRAM,
        """
        backward hook/what it reads; forward hook/what it reads; forward pre-hook/what it reads;
        tensor hook/what it reads
        """,
    ),
    Exclusion(
        "What a loss reads of the model's attributes and of defaults is not watched.",
        ONE_PROGRAM,
        """
        loss reads the model/set; loss with a default/default
        """,
    ),
    Exclusion(
        "Not noticed: a forward put on a module or a class, and other strides at the same address.",
        ONE_PROGRAM,
        """
        forward of a block; forward of a layer; forward of the class; weight transposed;
        weight's strides at its address
        """,
    ),
    Exclusion(
        "Probabilities are constants of one program.",
        ONE_PROGRAM,
        """
        dropout/probability; functional dropout/probability
        """,
    ),
    Exclusion(
        "Settings of batch norm are constants, replaced tensors outside of parameters are not "
        "noticed, and expanded buffers raise torch's error.",
        ONE_PROGRAM,
        """
        batch norm/epsilon; batch norm/momentum; batch norm/without statistics;
        expanded buffer/contiguous; expanded buffer/replaced; kept view/replaced;
        tensors in containers/element
        """,
    ),
)


def excluded(mode: str) -> frozenset[str]:
    """The words that programs for a mode go without."""
    return frozenset(word for entry in EXCLUDED if mode in entry.modes for word in entry.words)
