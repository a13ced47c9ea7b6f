"""Hooks that notify a reducer of its gradients: of each one, or of the last one of every bucket.

Autograd calls a hook in Python, which costs the host 10 to 20 us a gradient: a tenth of a ResNet-18 step
of 10 ms on an H200, operator by operator. Where gradients come in the same order in every step, the last one
of a bucket reports all in it.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ridgeline.errors import WorkloadError
from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.buckets.coverage import check_shape


class GradientHooks:
    """The hooks on some parameters.

    Args:
        parameters: That a gradient may be made for.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = tuple(parameters)
        self._handles: list[tuple[nn.Parameter, RemovableHandle]] = []

    def listen(self, calls: Mapping[int, Callable[[Tensor], None]]) -> None:
        """Call these, by position of the parameter, when its gradient is complete; no others any more."""
        self.close()
        for index, call in calls.items():
            parameter = self._parameters[index]
            self._handles.append((parameter, parameter.register_post_accumulate_grad_hook(call)))

    def stay_last(self) -> None:
        """Have hooks that a script registered since come first: what they make of a gradient is exchanged.

        Cost: 0.1 us a parameter.
        """
        for parameter, handle in self._handles:
            hooks = parameter._post_accumulate_grad_hooks  # noqa: SLF001 - the only way to their order
            if next(reversed(hooks), handle.id) != handle.id:
                # Autograd reads the order of the `dict` below, which `move_to_end` leaves as it is.
                hooks[handle.id] = hooks.pop(handle.id)

    def close(self) -> None:
        """Remove all."""
        for _, handle in self._handles:
            handle.remove()
        self._handles.clear()


def last_of_each(members: Sequence[Sequence[int]], arrivals: Sequence[int]) -> dict[int, int]:
    """The parameter whose gradient came last, by bucket; buckets of which some did not come are left out.

    Args:
        members: Parameters of each bucket.
        arrivals: Parameters in the order in which their gradients came.
    """
    rank = {index: place for place, index in enumerate(arrivals)}
    return {
        number: max(bucket, key=rank.__getitem__)
        for number, bucket in enumerate(members)
        if all(index in rank for index in bucket)
    }


class Sent:
    """A bucket as it was sent, to notice a gradient that came after that.

    Autograd adds a second gradient to the first one in place, which the bucket's version shows, or puts the
    sum where the first one was.
    """

    __slots__ = ("_bucket", "_gradients", "_version")

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._gradients = [parameter.grad for parameter in bucket.parameters]
        self._version = bucket.flat._version  # noqa: SLF001

    def has_changed(self) -> bool:
        """Whether a gradient came since."""
        if self._bucket.flat._version != self._version:  # noqa: SLF001
            return True
        pairs = zip(self._bucket.parameters, self._gradients, strict=True)
        return any(parameter.grad is not gradient for parameter, gradient in pairs)


def second_gradient(name: str) -> WorkloadError:
    """What is raised where a gradient came after its bucket was sent."""
    return WorkloadError(
        f"wanted one gradient for {name} in a backward pass, got a second after the first was sent; use "
        "checkpoint(..., use_reentrant=False), or run the layer in one checkpoint"
    )


def unfinished_backward() -> WorkloadError:
    """What is raised where a step begins whose last one has left exchanges behind."""
    return WorkloadError(
        "wanted the last backward pass to have ended, got one that raised while gradients were on their way "
        "to other workers; make the step again on all workers"
    )


def fitting(gradient: Tensor | None, place: Tensor, name: str) -> Tensor:
    """A gradient that fits its place among dense ones.

    Raises:
        WorkloadError: it came sparse, or of another type or shape.
    """
    if gradient is None or gradient.is_sparse:
        raise WorkloadError(
            f"wanted a dense gradient for {name}, got a sparse one, which workers exchange of nn.Embedding "
            "and nn.EmbeddingBag that had sparse=True when the step was made; use one of these, make the "
            "gradient dense, or train on one worker (--workers 1)"
        )
    if gradient.dtype is not place.dtype:
        was, now = (str(one.dtype).removeprefix("torch.") for one in (place, gradient))
        raise WorkloadError(
            f"wanted {name} to have its type of when the step was made, {was}, got a gradient of {now}; make "
            "the step again after model.to()"
        )
    check_shape(name, gradient, place)
    return gradient
