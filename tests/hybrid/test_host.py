"""What a machine must have to run a saved program."""

from typing import Any

import msgspec

from ridgeline.packages.host import NativeHost, unmet


def test_what_a_machine_must_have() -> None:
    """Platform, torch and processor must fit; a GPU program also needs its GPU and CUDA."""
    versions = {"torch": "2.13.0+cu130", "ridgeline": "0.1.0", "cuda": "13.0"}
    wanted = NativeHost(
        platform="linux x86_64", capability="AVX2", instructions=("avx", "avx2"), versions=versions
    )

    def got(**changes: Any) -> NativeHost:
        return msgspec.structs.replace(wanted, **changes)

    def with_versions(**changes: str) -> NativeHost:
        return got(versions={**versions, **changes})

    assert unmet(wanted, wanted, "cpu") is None
    assert (
        unmet(wanted, got(instructions=("avx", "avx2", "avx512f"), capability="AVX512"), "cpu")
        is None
    )
    assert (
        unmet(wanted, with_versions(torch="2.13.1+cpu", ridgeline="0.2.0", cuda=""), "cpu") is None
    )
    assert unmet(wanted, got(platform="linux aarch64"), "cpu") == (
        "platform linux x86_64",
        "linux aarch64",
    )
    assert unmet(wanted, with_versions(torch="2.11.0"), "cpu") == ("torch 2.13", "torch 2.11.0")
    assert unmet(wanted, got(instructions=("avx",)), "cpu") == (
        "a processor with avx2",
        "one without",
    )
    assert unmet(wanted, got(instructions=(), capability="DEFAULT"), "cpu") == (
        "a processor of AVX2",
        "DEFAULT",
    )
    gpu = msgspec.structs.replace(wanted, capability="sm_90")
    assert unmet(gpu, gpu, "cuda") is None
    assert unmet(gpu, got(capability="sm_80"), "cuda") == ("a GPU of sm_90", "sm_80")
    older = msgspec.structs.replace(gpu, versions={**versions, "cuda": "12.8"})
    assert unmet(gpu, older, "cuda") == ("CUDA 13", "CUDA 12.8")
