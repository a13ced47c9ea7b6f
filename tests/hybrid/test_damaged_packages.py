"""Saved programs that were damaged or edited are refused, or compute what they did.

`damaged_packages.py` loads thousands that were damaged. Descriptions are edited with checksums that are right.
"""

import hashlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damaged_packages import Damaged, answer, save_callable, save_step

import ridgeline as rl
from ridgeline.errors import PackageError
from ridgeline.packages.archive import METADATA, ROOT, SEAL, STATE


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved module of two layers; what damages it writes copies."""
    return save_callable(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def saved_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved step."""
    return save_step(tmp_path_factory.mktemp("step"))


@pytest.mark.parametrize("saved", ["package", "saved_step"])
def test_damaged_files_are_refused_or_unharmed(saved: str, request: pytest.FixtureRequest) -> None:
    """Bits, stretches, cuts and shifts, half of them where the file says what is where."""
    damaged = Damaged(request.getfixturevalue(saved), 1)
    for _ in range(200):
        damaged.one()
    assert damaged.wrong == []
    assert damaged.counts["refused"] > 150
    assert damaged.counts["unharmed"] < 20


def test_members_that_begin_elsewhere_are_refused_or_unharmed(package: Path) -> None:
    """Also those by which torch knows the file, of which its own reader in Python refuses some."""
    damaged = Damaged(package, 1)
    damaged.misplaced()
    assert damaged.wrong == []
    assert damaged.counts["refused"] > 300


def edited(
    package: Path, target: Path, edit: Callable[[dict[str, Any], dict[str, bytes]], object]
) -> Path:
    """A copy whose description and members were changed, sealed again."""
    with zipfile.ZipFile(package) as archive:
        names = [name.removeprefix(f"{ROOT}/") for name in archive.namelist()]
        members = {name: archive.read(f"{ROOT}/{name}") for name in names}
    noun = json.loads(members[METADATA])
    del noun["sha256"]
    edit(noun["value"], members)
    noun["value"]["checksums"] = {
        name: hashlib.sha256(content).hexdigest()
        for name, content in members.items()
        if name not in (METADATA, SEAL)
    }
    members[METADATA] = json.dumps(noun).encode()
    members[SEAL] = hashlib.sha256(members[METADATA]).hexdigest().encode()
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"{ROOT}/{name}", content)
    return target


def described(**changes: Any) -> Callable[[dict[str, Any], dict[str, bytes]], object]:
    return lambda told, members: told["state"]["0.weight"].update(changes)


EDITS: list[tuple[Callable[[dict[str, Any], dict[str, bytes]], object], str]] = [
    (described(stride=[6, 6]), r"stride \(6, 6\) for shape \(8, 6\) of 0\.weight"),
    (described(stride=[6]), r"stride \(6,\) for shape \(8, 6\) of 0\.weight"),
    (described(stride=[-6, 1]), r"stride \(-6, 1\) for shape \(8, 6\) of 0\.weight"),
    (described(stride=[1, 10**13]), ".*alloc.*"),
    (described(shape=[6, 8]), r"0\.weight is described as \(6, 8\) float32, and saved as \(8, 6\) float32"),
    (described(shape=[-8, 6]), r"shape \(-8, 6\) of 0\.weight"),
    (described(dtype="float64"), r"0\.weight is described as \(8, 6\) float64, and saved as \(8, 6\) float32"),
    (described(dtype="load"), "dtype 'load' of 0.weight"),
    (lambda told, _: told["state"].pop("0.weight"), r"0\.weight is saved, but not described"),
    (lambda told, _: told["state"].update(zz=told["state"].pop("0.bias")), r"0\.bias is saved, but not described"),
    (lambda told, _: told.update(inputs=[]), "0 inputs for 1 leaves of its arguments"),
    (lambda told, _: told["inputs"][0].update(stride=[6, 6]), r"stride \(6, 6\) for shape \(4, 6\) of input 0"),
    (lambda _, members: members.pop(STATE), f"a damaged file: {STATE} is missing"),
    (lambda _, members: members.update({STATE: b"short"}), "tensors that cannot be read: .*"),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "said"), EDITS)
def test_a_description_that_cannot_be_so_is_refused(
    package: Path, tmp_path: Path, edit: Any, said: str
) -> None:
    """Before anything of the program runs, with the tensor that it names."""
    path = edited(package, tmp_path / "edited.pt2", edit)
    with pytest.raises(PackageError, match=f"got {said}[,; ].*; "):
        rl.load(path)


def test_a_file_that_the_system_refuses_is_refused_by_name() -> None:
    """As for want of permission: here its name is too long."""
    with pytest.raises(
        PackageError, match=r"^wanted a program saved by Ridgeline, got File name too long for a"
    ):
        rl.load("a" * 5000)


def test_what_was_only_sealed_again_computes_the_same(package: Path, tmp_path: Path) -> None:
    """The checks are of the description, not of who wrote it; repeated elements are what expanded tensors have."""
    same = edited(package, tmp_path / "same.pt2", lambda told, members: None)
    wanted = answer(rl.load(package))
    got = answer(rl.load(same))
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
