"""Arguments given by name, as models of transformers are called, arrive at their places."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ridgeline as rl
from ridgeline.errors import BatchError

pytestmark = pytest.mark.usefixtures("compiler_begins_anew")


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(
        self,
        words: Tensor,
        mask: Tensor | None = None,
        scale: float = 2.0,
        *,
        shift: float = 0.0,
    ) -> Tensor:
        hidden = self.first(words) + self.second(words) * scale + shift
        return hidden if mask is None else hidden * mask


WORDS, MASK = torch.ones(2, 4), torch.tensor([[1.0], [0.0]])
CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((WORDS,), {"mask": MASK}),
    ((), {"mask": MASK, "words": WORDS}),
    ((), {"words": WORDS}),
    ((WORDS,), {"scale": 3.0}),
]


@pytest.mark.parametrize("way", ["hybridize", "parallelize"])
def test_arguments_may_be_named(way: str) -> None:
    model = Encoder()
    made: Any
    if way == "hybridize":
        made = rl.hybridize(model, (WORDS, MASK), "script")
    else:
        made = rl.parallelize(model, (WORDS, MASK), mode="parallel", lanes=2)
    with made as fast, torch.no_grad():
        for inputs, named in CALLS:
            torch.testing.assert_close(fast(*inputs, **named), model(*inputs, **named))
        # Only the first two are the program that was captured.
        assert sum(fast.report.counters.get(key, 0) for key in ("eager_calls", "other_shapes")) == 2
        with pytest.raises(BatchError, match=r"takes by name alone \(shift\); hand in a function"):
            fast(WORDS, shift=1.0)
        with pytest.raises(
            BatchError, match=r"got mast by name: .*'mast'; name them as it does, or give"
        ):
            fast(WORDS, mast=MASK)


def test_functions_take_names_and_any_number_of_arguments() -> None:
    def add(*parts: Tensor, scale: Any = None) -> Tensor:
        return torch.stack(parts).sum(0)

    def blend(x: Tensor, y: Tensor, share: float = 0.5) -> Tensor:
        return x * share + y * (1 - share)

    with rl.hybridize(blend, (WORDS, WORDS * 3, 0.5), "script") as fast:
        assert torch.equal(fast(y=WORDS, x=WORDS * 3, share=0.5), blend(WORDS * 3, WORDS))
        assert fast.report.counters["eager_calls"] == 0
    fast = rl.hybridize(add, (WORDS, WORDS), "script")
    with fast, pytest.raises(BatchError, match="by name alone"):
        fast(WORDS, WORDS, scale=1)
