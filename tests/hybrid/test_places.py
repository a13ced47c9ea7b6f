"""Places of arguments: known by address and layout, learnt when they come again, never more than a few."""

import pytest
import torch
from torch import Tensor

from ridgeline.runtime.hybrid.calls import places
from ridgeline.runtime.hybrid.calls.places import MOST_PLACES, RECURRENCES, Places


@pytest.fixture(autouse=True)
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether a capture is going on; without CUDA torch cannot say."""
    state = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state[0])
    return state


class Captures:
    """Stands for the captures of a graph: remembers the addresses that it was asked for."""

    def __init__(self) -> None:
        self.made: list[tuple[int, ...]] = []

    def __call__(self, *args: Tensor) -> list[object]:
        self.made.append(tuple(x.data_ptr() for x in args))
        return [self.made[-1]]


def visit(found: Places, *args: Tensor, times: int = 1) -> object:
    for _ in range(times):
        last = found.find(*args)
    return last


def test_the_example_itself_is_a_place() -> None:
    """Its address needs no learning; another tensor is none, though its values are the same."""
    captures, x = Captures(), torch.randn(3, 4)
    found = Places((x,), captures)  # type: ignore[arg-type]
    assert captures.made == [(x.data_ptr(),)]
    assert list(found.find(x)) == captures.made
    assert list(found.find(x.view(3, 4))) == captures.made, "an alias is the same memory"
    assert not found.find(x.clone())


def test_a_place_is_learnt_when_it_comes_again() -> None:
    """At the stated number of times, between calls elsewhere, and then for good."""
    captures, x, y, z = Captures(), torch.randn(4), torch.randn(4), torch.randn(4)
    found = Places((x,), captures)  # type: ignore[arg-type]
    for _ in range(RECURRENCES - 1):
        assert not found.find(y)
        assert not found.find(z)
    assert captures.made == [(x.data_ptr(),)]
    assert list(found.find(y)) == [(y.data_ptr(),)]
    assert captures.made == [(x.data_ptr(),), (y.data_ptr(),)]
    visit(found, y, times=5)
    assert len(captures.made) == 2


def test_nothing_is_learnt_inside_a_capture(capturing: list[bool]) -> None:
    """A capture cannot hold another one; afterwards the place is learnt at once."""
    captures, x, y = Captures(), torch.randn(4), torch.randn(4)
    found = Places((x,), captures)  # type: ignore[arg-type]
    capturing[0] = True
    assert not visit(found, y, times=2 * RECURRENCES)
    capturing[0] = False
    assert found.find(y)


def test_places_are_few() -> None:
    """A further one is served as before, and no longer counted."""
    captures = Captures()
    tensors = [torch.randn(4) for _ in range(MOST_PLACES + 2)]
    found = Places((tensors[0],), captures)  # type: ignore[arg-type]
    for tensor in tensors:
        visit(found, tensor, times=2 * RECURRENCES)
    assert len(captures.made) == MOST_PLACES
    assert not found.find(tensors[-1])
    assert found.find(tensors[1])


def test_arguments_from_everywhere_end_the_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of new addresses costs no memory and no more looking; known places stay."""
    monkeypatch.setattr(places, "MOST_SEEN", 8)
    captures, x, many = Captures(), torch.randn(4), torch.randn(8, 4)
    found = Places((x,), captures)  # type: ignore[arg-type]
    for row in many:
        assert found.is_learning
        found.find(row)
    assert not found.is_learning
    assert not visit(found, many[0], times=2 * RECURRENCES)
    assert found.find(x)


@pytest.mark.parametrize("num", [1, 2])
def test_another_layout_or_sign_at_the_same_address_is_no_place(num: int) -> None:
    """A transposed view, a conjugated or a negative one mean other values."""
    captures = Captures()
    x = torch.randn(4, 4, dtype=torch.complex64)
    args = (x,) * num
    found = Places(args, captures)  # type: ignore[arg-type]
    assert found.find(*args)
    assert not found.find(*[x.t()] * num)
    assert not found.find(*[x.conj()] * num)
    parts = torch.randn(4, 4, 2)
    minus = torch.view_as_complex(parts).conj().imag
    assert minus.is_neg()
    negative = Places((torch.view_as_complex(parts).imag,) * num, captures)  # type: ignore[arg-type]
    assert not negative.find(*[minus] * num)
    assert negative.find(*[parts[..., 1]] * num)


def test_several_arguments_are_a_place_together() -> None:
    """Each pair of addresses is its own; exchanged they are another."""
    captures, x, y = Captures(), torch.randn(4), torch.randn(4)
    found = Places((x, y), captures)  # type: ignore[arg-type]
    assert found.find(x, y)
    assert not found.find(y, x)
    assert not found.find(x, x)
    assert visit(found, y, x, times=RECURRENCES)


def test_only_plain_tensors_of_a_gpu_can_be_places() -> None:
    """Nests, numbers, parameters and tensors of the host are copied."""
    x = torch.randn(3)
    for args in ((), (x,), (1.0,), ({"x": x},), (torch.nn.Parameter(x),)):
        assert not Places.can_serve(args)
