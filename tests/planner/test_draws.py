"""Random numbers land elsewhere in images whose channels are innermost: such plans need permission."""

import msgspec
import pytest

from chained_workloads import make_chain
from ridgeline.planner.knobs import enumerate_plans, make_request
from ridgeline.workload import TensorSpec, Workload
from strategies import make_machine

SHAPE = (2, 3, 8, 8)
PLAIN, INNERMOST = (192, 64, 8, 1), (192, 1, 24, 3)


def step(*, filled: tuple[int, ...] | None, traced: bool = True) -> Workload:
    """A convolution, and with `filled` a mask drawn into memory of those strides with channels innermost."""
    workload = make_chain(device="cpu")

    def with_mask(strides: tuple[int, ...]) -> Workload:
        spec = TensorSpec(shape=SHAPE, stride=strides, dtype="float32")
        image = msgspec.structs.replace(workload.ops[0], family="convolution", inputs=(spec, spec))
        rest = workload.ops[1:]
        if filled is not None:
            mask = msgspec.structs.replace(rest[0], name="aten.bernoulli_.float", outputs=(spec,))
            rest = (mask, *rest[1:])
        return msgspec.structs.replace(workload, ops=(image, *rest))

    made = with_mask(PLAIN)
    if traced:
        other = msgspec.structs.replace(
            with_mask(filled or INNERMOST), memory_format="channels_last"
        )
        made = msgspec.structs.replace(made, variants=(other,))
    return made


def plans(workload: Workload, allow: tuple[str, ...] = (), **fixed: str) -> set[tuple[str, ...]]:
    request = make_request(make_machine(), workload, 1, fixed, allow)
    found, _ = enumerate_plans(request)
    return {(p.execution, p.memory_format, p.random) for p in found}


def formats(found: set[tuple[str, ...]]) -> set[str]:
    return {memory_format for _, memory_format, _ in found}


@pytest.mark.parametrize("filled", [None, PLAIN])
def test_channels_last_is_compared_where_the_same_numbers_land_in_the_same_places(filled) -> None:
    found = plans(step(filled=filled))
    assert formats(found) == {"as-is", "channels_last"}
    assert {random for *_, random in found} == {"as-is"}


@pytest.mark.parametrize(("filled", "traced"), [(INNERMOST, True), (PLAIN, False)])
def test_channels_last_needs_permission_where_they_land_elsewhere_or_nobody_knows(
    filled, traced
) -> None:
    workload = step(filled=filled, traced=traced)
    assert formats(plans(workload)) == {"as-is"}
    found = plans(workload, ("random",))
    assert ("eager", "channels_last", "compiled") in found
    assert ("compiled", "channels_last", "compiled") in found
    assert ("eager", "as-is", "as-is") in found
    assert not {p for p in found if p[1:] == ("channels_last", "as-is")}
    assert ("eager", "as-is", "compiled") not in found


def test_what_the_user_fixed_is_left_alone() -> None:
    found = plans(step(filled=INNERMOST), execution="eager", memory_format="channels_last")
    assert found == {("eager", "channels_last", "as-is")}


def test_who_fixes_the_random_numbers_gets_no_memory_that_moves_them() -> None:
    """Nor does permission change that: the word was the user's."""
    for allow in ((), ("random",)):
        found = plans(step(filled=INNERMOST), allow, random="as-is")
        assert formats(found) == {"as-is"}
        assert {random for *_, random in found} == {"as-is"}
