"""Saved programs: what a package keeps, and what it refuses."""

import random
import resource
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from ridgeline import codec
from ridgeline.errors import PackageError
from ridgeline.packages import package as package_module
from ridgeline.packages.archive import METADATA, ROOT, SEAL, STATE, write_archive
from ridgeline.packages.host import describe_host
from ridgeline.packages.metadata import Metadata, TensorMetadata
from ridgeline.packages.package import read_package, write_package
from ridgeline.runtime.steps.load import load

CPU = torch.device("cpu")


# The file. Its program is a stand-in: nothing here may load it.


def stand_in_program(folder: Path) -> Path:
    """A zip of the shape that AOTInductor writes."""
    path = folder / "program.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("program/archive_format", b"pt2")
        archive.writestr(
            "program/data/aotinductor/model/code.wrapper.cpp", b"// /home/someone/model.py"
        )
        archive.writestr("program/data/aotinductor/model/code.wrapper.so", bytes(range(256)) * 8)
    return path


def metadata(**changes: Any) -> Metadata:
    """Metadata of a callable of one vector."""
    spec = TensorMetadata(shape=(2,), dtype="float32")
    fields: dict[str, Any] = {
        "purpose": "callable",
        "device": "cpu",
        "inputs": (spec,),
        "outputs": (spec,),
        "input_tree": "{}",
        "output_tree": "{}",
    }
    return Metadata(**{**fields, **changes})


def save(folder: Path, **changes: Any) -> Path:
    """A small package in the folder."""
    return write_package(
        folder / "saved.pt2",
        program=stand_in_program(folder),
        metadata=metadata(**changes),
        state={"weight": torch.arange(6.0).reshape(2, 3)},
    )


def rewrite(path: Path, change: Callable[[dict[str, bytes]], None]) -> None:
    """Change members of a package by name, with a correct zip around them."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(PackageError) as caught:
        read_package(path, **options)
    return str(caught.value)


DAMAGED = "nothing of it was run: copy it again, or save the program again"


def test_state_keeps_values_types_and_layout(tmp_path: Path) -> None:
    """Every tensor comes back with its values, type and strides, whatever it shared memory with."""
    base = torch.arange(24.0).reshape(2, 3, 4)
    state = {
        "bf16": torch.randn(3, 5).bfloat16(),
        "int": torch.tensor([1, -2], dtype=torch.int64),
        "bool": torch.tensor([True, False]),
        "0-d": torch.tensor(7, dtype=torch.int32),
        "empty": torch.empty(0, 3),
        "transposed": base.transpose(0, 2),
        "view": base[1],
        "slice": base[:, ::2],
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 3),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": nn.Parameter(torch.ones(2)),
    }
    path = write_package(
        tmp_path / "saved.pt2", program=stand_in_program(tmp_path), metadata=metadata(), state=state
    )
    loaded = read_package(path).state()
    assert list(loaded) == list(state)
    for name, tensor in state.items():
        assert torch.equal(loaded[name], tensor), name
        assert (loaded[name].dtype, loaded[name].stride()) == (tensor.dtype, tensor.stride()), name


def test_metadata_keeps_what_is_known_of_the_program(tmp_path: Path) -> None:
    """What was described comes back, with the machine, the state and the checksums filled in."""
    read = read_package(save(tmp_path, details={"constants": {"1": None}})).metadata
    assert read.details == {"constants": {"1": None}}
    assert read.state == {"weight": TensorMetadata(shape=(2, 3), dtype="float32")}
    assert read.host == describe_host(CPU)
    assert read.host.versions["torch"] == torch.__version__
    assert read.capability == torch.backends.cpu.get_cpu_capability()
    assert set(read.checksums) == {
        "archive_format",
        "data/aotinductor/model/code.wrapper.cpp",
        "data/aotinductor/model/code.wrapper.so",
        STATE,
    }


def test_no_generated_source_is_shipped(tmp_path: Path) -> None:
    """The file names that torch looks at stay; the source with this machine's folders does not."""
    with zipfile.ZipFile(save(tmp_path)) as archive:
        assert archive.read(f"{ROOT}/data/aotinductor/model/code.wrapper.cpp") == b""
        assert b"/home/someone" not in b"".join(archive.read(name) for name in archive.namelist())


def test_a_package_is_the_program_of_another(tmp_path: Path) -> None:
    """A package can be saved again with other state, without its source."""
    first = save(tmp_path)
    state = {"weight": torch.zeros(2, 3)}
    again = write_package(tmp_path / "again.pt2", program=first, metadata=metadata(), state=state)
    assert torch.equal(read_package(again).state()["weight"], torch.zeros(2, 3))


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    """A write that fails half way leaves the old package as it was, and no temporary file."""
    path = save(tmp_path)
    before, names = path.read_bytes(), sorted(tmp_path.iterdir())
    program = tmp_path / "program.pt2"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        # Too small for the weights; then for the archive around them only.
        for size in (1000, 100_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
            with pytest.raises(OSError, match="File too large"):
                write_package(
                    path, program=program, metadata=metadata(), state={"w": torch.ones(24_900)}
                )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == names


def test_a_path_ends_in_pt2(tmp_path: Path) -> None:
    """Torch reads programs from .pt2 files only, so no other name is written."""
    with pytest.raises(PackageError) as caught:
        write_package(tmp_path / "saved.bin", program=tmp_path, metadata=metadata())
    assert str(caught.value) == (
        f"wanted a path that ends in .pt2 for a saved program, got {tmp_path / 'saved.bin'}; torch reads "
        "programs from such files only"
    )


def test_types_that_cannot_be_saved_are_named(tmp_path: Path) -> None:
    """A tensor that safetensors cannot hold is an error before anything is written."""
    program = stand_in_program(tmp_path)
    state = {"z": torch.zeros(2, dtype=torch.complex128)}
    with pytest.raises(PackageError) as caught:
        write_package(tmp_path / "saved.pt2", program=program, metadata=metadata(), state=state)
    assert str(caught.value) == (
        "wanted tensors of types that safetensors can hold, got (2,) complex128 for z; keep tensors of other "
        "types out of the program"
    )
    assert list(tmp_path.iterdir()) == [program]


def test_what_is_no_package_is_refused(tmp_path: Path) -> None:
    """A missing file, a directory, a text, a checkpoint and a foreign program are told apart."""
    missing = tmp_path / "missing.pt2"
    assert refusal(missing) == (
        f"wanted a program saved by Ridgeline, got no such file at {missing}; give the path of a file "
        "written by save()"
    )
    assert refusal(tmp_path) == (
        f"wanted a program saved by Ridgeline, got a directory at {tmp_path}; give the path of a file "
        "written by save()"
    )
    text = tmp_path / "text.pt2"
    text.write_text("hello")
    assert refusal(text) == (
        "wanted a program saved by Ridgeline, got a file that is not a zip archive (it starts with b'hell') "
        f"in {text}; give the path of a file written by save()"
    )
    text.write_bytes(b"")
    assert "(it starts with b'')" in refusal(text)
    checkpoint = tmp_path / "checkpoint.pt2"
    torch.save({"weight": torch.ones(2)}, checkpoint)
    for foreign in (checkpoint, stand_in_program(tmp_path)):
        assert refusal(foreign) == (
            "wanted a program saved by Ridgeline, got a zip archive of another kind (it has no "
            f"{ROOT}/{METADATA}) in {foreign}; give the path of a file written by save()"
        )


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    """Wherever a copy broke off, the file is refused."""
    path = save(tmp_path)
    content = path.read_bytes()
    for size in (4, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        assert refusal(path) == (
            "wanted the saved program as it was written, got a damaged file: it was cut short, or its "
            f"directory is broken, in {path}; {DAMAGED}"
        )


def test_a_damaged_byte_of_the_program_is_refused(tmp_path: Path) -> None:
    """One flipped bit of native code is found, and the member is named."""
    path = save(tmp_path)
    content = bytearray(path.read_bytes())
    content[content.index(bytes(range(256))) + 300] ^= 1
    path.write_bytes(content)
    assert refusal(path) == (
        "wanted the saved program as it was written, got a damaged file: "
        f"data/aotinductor/model/code.wrapper.so is not what was written, in {path}; {DAMAGED}"
    )


def test_no_flipped_byte_is_missed(tmp_path: Path) -> None:
    """Whichever byte is flipped, the file is refused, or it reads as it was written."""
    path = save(tmp_path)
    content, weight = path.read_bytes(), read_package(path).state()["weight"]
    program = read_members(path)
    source = random.Random(0)
    refused = 0
    for position in source.sample(range(len(content)), 400):
        damaged = bytearray(content)
        damaged[position] ^= 1 << source.randrange(8)
        path.write_bytes(damaged)
        try:
            read = read_package(path)
        except PackageError:
            refused += 1
            continue
        assert torch.equal(read.state()["weight"], weight)
        assert read_members(path) == program
    assert refused > 200


def read_members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            lambda m: m.update(
                {f"{ROOT}/{METADATA}": m[f"{ROOT}/{METADATA}"].replace(b"cpu", b"gpu")}
            ),
            f"{METADATA} is not what was written",
        ),
        (lambda m: m.pop(f"{ROOT}/{SEAL}"), f"{SEAL} is missing"),
        (lambda m: m.pop(f"{ROOT}/{STATE}"), f"{STATE} is missing"),
        (lambda m: m.update({f"{ROOT}/extra/more": b""}), "extra/more does not belong to it"),
        (
            lambda m: m.update({f"{ROOT}/archive_format": b"pt3"}),
            "archive_format is not what was written",
        ),
        (
            lambda m: m.update({f"{ROOT}/../evil": b""}),
            f"member '{ROOT}/../evil' points outside of it",
        ),
        (lambda m: m.update({"/etc/evil": b""}), "member '/etc/evil' points outside of it"),
        (lambda m: m.update({f"{ROOT}/a\\b": b""}), f"member '{ROOT}/a\\\\b' points outside of it"),
    ],
    ids=["metadata", "no seal", "missing", "extra", "other", "dots", "absolute", "backslash"],
)
def test_an_edited_package_is_refused(
    tmp_path: Path, change: Callable[[dict[str, bytes]], None], what: str
) -> None:
    """Members that were edited, dropped, added or point elsewhere are found, though the zip is correct."""
    path = save(tmp_path)
    rewrite(path, change)
    assert refusal(path) == (
        f"wanted the saved program as it was written, got a damaged file: {what}, in {path}; {DAMAGED}"
    )


def test_compressed_or_doubled_members_are_refused(tmp_path: Path) -> None:
    """Nothing is unpacked that may become larger than the file, and no name means two contents."""
    path = save(tmp_path)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{ROOT}/extra/bomb", bytes(1 << 20))
    assert "extra/bomb is compressed, which no member is" in refusal(path)
    path = save(tmp_path)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr(f"{ROOT}/archive_format", b"pt3")
    assert "archive_format is in it twice" in refusal(path)


def test_a_flag_of_encryption_is_damage(tmp_path: Path) -> None:
    """Features of zip files that no package uses are damage, not errors of the zip module."""
    path = save(tmp_path)
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + 8] ^= 1
    path.write_bytes(content)
    assert "archive_format is not what was written" in refusal(path)


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    """A file of a later version is not guessed at."""
    path = tmp_path / "saved.pt2"
    later = codec.encode(metadata()).replace(b'"version": 1', b'"version": 2')
    write_archive(path, {}, lambda _checksums: later)
    assert refusal(path) == (
        f"wanted package version 1, got version 2 in {path}, written by ridgeline {codec.VERSION}; make the "
        "file again with this release"
    )


def test_metadata_with_unknown_fields_is_refused(tmp_path: Path) -> None:
    """Metadata that does not fit is a package error, not one of another kind."""
    path = tmp_path / "saved.pt2"
    odd = codec.encode(metadata()).replace(b'"purpose"', b'"porpoise"')
    write_archive(path, {}, lambda _checksums: odd)
    assert refusal(path).startswith("wanted a package file, got content that does not fit in ")


def test_another_device_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program runs on the kind of device that it was made for."""
    path = save(tmp_path)
    assert refusal(path, device="cuda") == (
        f"wanted a program for cuda, got one made for cpu in {path}; save it again from a model on cuda"
    )
    monkeypatch.setattr(package_module, "describe_host", lambda _device: describe_host(CPU))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = save(tmp_path, device="cuda")
    assert refusal(path) == (
        f"wanted a CUDA device for the program in {path}, got none on this machine; run it where there is "
        "one, or save it again from a model on cpu"
    )


def test_another_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the program needs and this machine lacks is named."""
    here = describe_host(CPU)
    other = msgspec.structs.replace(here, versions={**here.versions, "torch": "2.10.1+cpu"})
    monkeypatch.setattr(package_module, "describe_host", lambda _device: other)
    path = save(tmp_path)
    monkeypatch.undo()
    assert refusal(path) == (
        f"wanted torch 2.10, for which the program in {path} was made, got torch {torch.__version__}; save "
        "it again here, from the model's source"
    )


def test_a_file_replaced_after_the_check_is_not_used(tmp_path: Path) -> None:
    """What is loaded is what was verified."""
    path = save(tmp_path)
    package = read_package(path)
    save(tmp_path)
    for use in (package.state, package.load_program):
        with pytest.raises(PackageError) as caught:
            use()
        assert str(caught.value) == (
            f"wanted {path} as it was verified, got a file replaced since; load it again"
        )


def test_a_program_that_does_not_load_is_an_error(tmp_path: Path) -> None:
    """Metadata that describes no callable, and code that the system refuses, are package errors."""
    path = save(tmp_path)
    with pytest.raises(PackageError) as caught:
        load(path)
    assert str(caught.value) == (
        f"wanted the description of a callable, got one that does not fit (KeyError: 'constants') in {path}; "
        "save the program again with this release"
    )
    leaf = torch.utils._pytree.treespec_dumps(torch.utils._pytree.tree_structure(0))
    save(tmp_path, details={"constants": {}}, input_tree=leaf, output_tree=leaf)
    with pytest.raises(
        PackageError, match=r"^wanted to load the program in .*; package it again on this machine$"
    ):
        load(path)
