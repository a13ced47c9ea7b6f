"""Checkpoints: complete or absent, verified when read, readable by others, honest about full disks."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from ridgeline.engine import Engine
from ridgeline.errors import CheckpointError
from ridgeline.runtime.checkpoints import checkpoint, checkpoint_directory
from ridgeline.runtime.checkpoints.checkpoint import Position
from ridgeline.runtime.checkpoints.staging import Staging
from ridgeline.runtime.checkpoints.state_tree import flatten, like_parameters, restore
from ridgeline.runtime.training.saver import Saver


def position(step: int) -> Position:
    return Position(epoch=0, step_in_epoch=step, step=step)


def write(directory: Path, step: int, **tensors: torch.Tensor) -> Path:
    model = tensors or {"a.weight": torch.full((2, 3), float(step))}
    return checkpoint.write(
        directory,
        position(step),
        workers=2,
        model=model,
        training={"random.0": torch.arange(5, dtype=torch.uint8)},
        state={"note": "x"},
    )


def test_everything_comes_back(tmp_path: Path) -> None:
    """Tensors of any dtype and shape, scalars and empty ones too, return bit for bit."""
    tensors = {
        "matrix": torch.randn(3, 4),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "integers": torch.arange(4),
        "flags": torch.tensor([True, False]),
        "half": torch.randn(5).bfloat16(),
        "empty": torch.empty(0, 3),
    }
    path = write(tmp_path, 3, **tensors)
    manifest, model, training, state = checkpoint.read(path)
    assert path.name == "step-0000003"
    assert manifest.position == position(3)
    assert manifest.workers == 2
    assert model.keys() == tensors.keys()
    assert all(torch.equal(model[name], tensor) for name, tensor in tensors.items())
    assert training["random.0"].tolist() == [0, 1, 2, 3, 4]
    assert state == {"note": "x"}


def test_other_tools_read_the_model(tmp_path: Path) -> None:
    """The readers of safetensors and of torch.distributed.checkpoint need no Ridgeline."""
    weight = torch.randn(2, 3)
    folder = write(tmp_path, 1, **{"a.weight": weight}) / "model"
    plain = safetensors.torch.load_file(folder / "model-00001-of-00001.safetensors")
    assert torch.equal(plain["a.weight"], weight)
    loaded: dict[str, Any] = {"a.weight": torch.zeros(2, 3)}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(loaded, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert torch.equal(loaded["a.weight"], weight)


def test_latest_passes_over_unfinished_ones(tmp_path: Path) -> None:
    """A directory without manifest, as a killed deletion leaves it, is not a checkpoint."""
    assert checkpoint_directory.latest(tmp_path / "none") is None
    write(tmp_path, 2)
    newest = write(tmp_path, 10)
    (write(tmp_path, 11) / "manifest.json").unlink()
    (tmp_path / ".step-0000012.tmp").mkdir()
    assert checkpoint_directory.latest(tmp_path) == newest


def test_damage_is_named(tmp_path: Path) -> None:
    """Whoever reads a damaged one is told the file and what to do; see test_resuming for the kinds of damage."""
    path = write(tmp_path, 1)
    size = (path / "state.json").stat().st_size
    (path / "state.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read(path)
    assert str(caught.value) == (
        f"wanted a whole checkpoint, got a damaged one in {path}: state.json is missing, wanted {size} bytes; "
        "--resume continues from the newest whole one"
    )


FILL = """
import resource, sys, torch
from pathlib import Path
from ridgeline.errors import CheckpointError
from ridgeline.runtime.checkpoints import checkpoint, checkpoint_directory
directory = Path(sys.argv[1])
def write(step, size):
    return checkpoint.write(
        directory, checkpoint.Position(epoch=0, step_in_epoch=0, step=step), workers=1,
        model={"w": torch.zeros(size)}, training={}, state={})
write(1, 10)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
try:
    write(2, 1 << 18)
except CheckpointError as error:
    print(error)
"""


def test_full_disk_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    """A write that the system refuses names path, need and room, leaves no part, and harms nothing."""
    done = subprocess.run(
        [sys.executable, "-c", FILL, str(tmp_path)], capture_output=True, text=True, check=True
    )
    target = tmp_path / "step-0000002"
    assert re.fullmatch(
        rf"wanted to write the checkpoint {target} \(1.00 MiB\), got File too large with \S+ \S+ free; the "
        r"previous checkpoint is untouched: make room there, or copy the run to another disk and name the "
        r"copy with -o, and continue with --resume\n",
        done.stdout,
    ), done.stdout + done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000001"]
    checkpoint.read(tmp_path / "step-0000001")


def test_saver_keeps_the_newest(tmp_path: Path) -> None:
    """Of five checkpoints the newest two stay, and what a killed run left is cleared away."""
    (tmp_path / ".step-0000009.tmp").mkdir(parents=True)
    with Engine() as engine:
        saver = Saver(tmp_path, engine, Staging(), keep=2)
        for step in range(1, 6):
            saver.save(
                position(step), workers=1, tensors={"model.w": torch.zeros(2)}, gathered={}, state={},
            )  # fmt: skip
        saver.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000004", "step-0000005"]
    assert saver.last == tmp_path / "step-0000005"


def test_failed_save_is_told_at_the_next_question(tmp_path: Path) -> None:
    """A write that fails on its lane surfaces when the run asks, not before, and the last good one stays."""
    (tmp_path / "step-0000001").mkdir()
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a directory is wanted")
    with Engine() as engine:
        saver = Saver(blocked, engine, Staging(), keep=2)
        saver.save(
            position(1),
            workers=1,
            tensors={"model.w": torch.zeros(2)},
            gathered={},
            state={},
        )
        with pytest.raises(CheckpointError, match=r"got Not a directory with .* free"):
            saver.finish()
    assert saver.failure is not None
    assert saver.last is None


numbers = (
    st.floats().map(np.float64)
    | st.floats(width=32).map(np.float32)
    | st.floats(width=16).map(np.float16)
    | st.integers(0, 255).map(np.uint8)
    | st.booleans().map(np.bool_)
)
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats()
    | st.text(max_size=3)
    | numbers,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, float | np.floating) and type(a) is type(b):
        return bool(a == b or (math.isnan(a) and math.isnan(b)))
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


@given(plain)
def test_state_survives_json(state: Any) -> None:
    """Any nest of plain values and numbers of NumPy's is restored to equal values of equal types."""
    import msgspec

    tensors: dict[str, torch.Tensor] = {}
    encoded = msgspec.json.decode(msgspec.json.encode(flatten(state, "s", tensors)))
    assert same(restore(encoded, tensors), state)


keys = st.sampled_from(["a", "b", "1", "a.b", "b.1", "a~2", "1~2"]) | st.integers(0, 1)
nested = st.recursive(
    st.integers(0, 99).map(torch.tensor),
    lambda inner: st.dictionaries(keys, inner, max_size=4) | st.lists(inner, max_size=3),
    max_leaves=8,
)


def as_numbers(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: as_numbers(item) for key, item in state.items()}
    return [*map(as_numbers, state)] if isinstance(state, list) else int(state)


@given(nested)
@example({"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}})
@example({1: torch.tensor(1), "1": torch.tensor(2)})
def test_each_tensor_has_a_name_of_its_own(state: Any) -> None:
    """Also where a key has a dot in it, or a number and its text are keys of one dict."""
    tensors: dict[str, torch.Tensor] = {}
    encoded = json.loads(json.dumps(flatten(state, "s", tensors)))
    assert as_numbers(restore(encoded, tensors)) == as_numbers(state)


def test_names_that_were_alike_are_numbered() -> None:
    """What is spelled like an earlier place gets a number behind it; others keep the names they always had."""
    tensors: dict[str, torch.Tensor] = {}
    flatten({"a.b": torch.ones(1), "a": {"b": torch.ones(2), "c": torch.ones(3)}}, "s", tensors)
    assert {name: len(tensor) for name, tensor in tensors.items()} == {
        "s.a.b": 1,
        "s.a.b~2": 2,
        "s.a.c": 3,
    }


def test_optimizer_state_survives(tmp_path: Path) -> None:
    """A real optimizer's and scheduler's states come back, tuples as tuples and formats like parameters'."""
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    model(torch.randn(1, 3, 4, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
    tensors: dict[str, torch.Tensor] = {}
    state = restore(flatten(optimizer.state_dict(), "optimizer", tensors), tensors)
    assert state["param_groups"] == optimizer.state_dict()["param_groups"]
    assert isinstance(state["param_groups"][0]["betas"], tuple)
    formatted = like_parameters(state, list(model.parameters()))
    mine = optimizer.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(formatted["state"][0]["exp_avg"], mine)
    assert formatted["state"][0]["exp_avg"].stride() == mine.stride()
    states = scheduler.state_dict()
    assert restore(flatten(states, "scheduler", tensors), tensors) == states


def test_state_that_is_not_plain_is_refused() -> None:
    """An object that JSON cannot hold is named with its place, and never pickled."""
    with pytest.raises(CheckpointError) as caught:
        flatten({"a": [1, object()]}, "scheduler", {})
    assert str(caught.value) == (
        "wanted state of dense or COO tensors, numbers, text, lists and dicts, got object at scheduler.a.1; "
        "let its state_dict() return plain values"
    )


def test_dtypes_that_files_have_no_word_for_come_back(tmp_path: Path) -> None:
    """By their bytes, whatever their shape; what has no bytes of its own is refused by name."""
    values = torch.randn(2, 3, dtype=torch.complex128)
    state = [values, values.conj()[:, 1], values[0, 0], values[:0]]
    state += [torch.ones(3).to(torch.float8_e8m0fnu)]
    tensors: dict[str, torch.Tensor] = {}
    saved = flatten(state, "model", tensors)
    _, model, _, _ = checkpoint.read(write(tmp_path, 1, **tensors))
    for mine, back in zip(state, restore(saved, model), strict=True):
        assert (back.dtype, back.shape) == (mine.dtype, mine.shape)
        assert back.tolist() == mine.tolist()
    for lost in (torch.eye(2).to_sparse_csr(), torch.empty(2, device="meta")):
        with pytest.raises(CheckpointError, match=f"got a tensor of {lost.layout}, .* at model.w;"):
            flatten({"w": lost}, "model", {})


def test_sparse_state_comes_back() -> None:
    """Momenta of sparse gradients are COO tensors, coalesced or not; each returns as it was."""
    rows = torch.sparse_coo_tensor(
        torch.tensor([[2, 0, 2]]), torch.randn(3, 4), (5, 4), check_invariants=True
    )
    tensors: dict[str, torch.Tensor] = {}
    saved = flatten({0: {"one": rows, "other": rows.coalesce()}}, "state", tensors)
    assert all(tensor.layout == torch.strided for tensor in tensors.values())
    found = restore(json.loads(json.dumps(saved)), tensors)[0]
    assert not found["one"].is_coalesced()
    assert torch.equal(found["one"]._values(), rows._values())
    assert found["other"].is_coalesced()
    assert torch.equal(found["other"].to_dense(), rows.to_dense())
    assert like_parameters({"state": {0: found}}, [torch.zeros(5, 4)])["state"] == {0: found}
