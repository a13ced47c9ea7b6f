"""Workers on several hosts: where servers listen, who needs keys, and what goes wrong for one is told to all."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ridgeline as rl
from ridgeline.errors import KVStoreError
from ridgeline.runtime.kvstore.serving.addressing import addresses
from ridgeline.runtime.kvstore.serving.addressing.addresses import (
    host_identity,
    reached_by_all,
    told_by_all,
)
from ridgeline.runtime.kvstore.serving.addressing.keys import VARIABLE, make_keys
from ridgeline.runtime.kvstore.serving.joining import gathering
from ridgeline.runtime.kvstore.serving.joining.gathering import Wanted, gather
from ridgeline.workers.world import World

WORLD = World(0, 2, 0, torch.device("cpu"))
MINE, OTHER = "tcp://127.0.0.1:1", "tcp://10.0.0.9:2"
NO_ADDRESS = "give address='tcp://HOST:*' with an address of this host that the others reach"


class FakeServer:
    """Stands in for a server process; remembers how it was started."""

    made: "list[FakeServer]" = []

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments
        self.address = MINE
        self.is_closed = False
        FakeServer.made.append(self)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what the other of two workers says."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(gathering, "ServerBeside", FakeServer)
    monkeypatch.setattr(FakeServer, "made", [])

    def says(host: str = "another", address: str = OTHER, problem: str = "") -> None:
        def told(_world: World, topic: str, mine: str) -> list[str]:
            return [mine, host if "hosts" in topic else json.dumps([address, problem])]

        monkeypatch.setattr(gathering, "told_by_all", told)

    return says


def test_on_one_host_servers_are_on_the_loopback(other: Callable[..., None]) -> None:
    """And nobody needs keys."""
    other(host=host_identity())
    found = gather(WORLD, Wanted(2, staleness=3, module="m"))
    assert (found.addresses, found.keys) == ([MINE, OTHER], None)
    assert FakeServer.made[0].arguments[:5] == (2, 3, "m", "tcp://127.0.0.1:*", "")
    assert gather(WORLD, Wanted(1)).addresses == [MINE]
    other(host=host_identity(), address="")


@pytest.mark.parametrize("by_variable", [True, False])
def test_on_several_hosts_servers_are_where_all_reach_them(
    other: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    by_variable: bool,
) -> None:
    """By the route to MASTER_ADDR, or at the address that was given; with keys."""
    other()
    directory = str(tmp_path / "keys")
    make_keys(Path(directory))
    if by_variable:
        monkeypatch.setenv(VARIABLE, directory)
    monkeypatch.setattr(gathering, "reached_by_all", lambda: "tcp://10.0.0.1:*")
    keys = "" if by_variable else directory
    found = gather(WORLD, Wanted(2, keys=keys))
    assert found.keys is not None
    assert FakeServer.made[0].arguments[:5] == (2, None, "", "tcp://10.0.0.1:*", directory)
    gather(WORLD, Wanted(2, keys=keys, address="tcp://192.0.2.7:4000"))
    assert FakeServer.made[1].arguments[:5] == (2, None, "", "tcp://192.0.2.7:4000", directory)


def test_what_goes_wrong_here_is_said(other: Callable[..., None], tmp_path: Path) -> None:
    """Keys that are missing, and addresses that others cannot use."""
    other()
    with pytest.raises(KVStoreError) as refused:
        gather(WORLD, Wanted(2))
    assert str(refused.value) == (
        "wanted keys for workers on several hosts, got none; make some with `ridgeline kvserver --new-keys "
        "DIR`, copy DIR to all hosts, and name it on each: keys=DIR or RIDGELINE_KVSTORE_KEYS=DIR"
    )
    keys = str(tmp_path / "keys")
    make_keys(Path(keys))
    for address, got in (
        (
            "tcp://127.0.0.1:*",
            (
                "wanted an address that the workers on other hosts reach, got 'tcp://127.0.0.1:*'; name "
                "another, or none"
            ),
        ),
        (
            "tcp://*:*",
            (
                "wanted the address of one interface, as other workers connect to it, got 'tcp://*:*'; name "
                "that which they reach, such as 'tcp://10.0.0.3:*'"
            ),
        ),
    ):
        with pytest.raises(KVStoreError) as refused:
            gather(WORLD, Wanted(2, keys=keys, address=address))
        assert str(refused.value) == got
    other(host=host_identity())
    with pytest.raises(KVStoreError, match=r"^wanted keys to listen at 'tcp://10.0.0.1:\*', which"):
        gather(WORLD, Wanted(2, address="tcp://10.0.0.1:*"))
    assert not FakeServer.made


def test_what_goes_wrong_elsewhere_is_told(other: Callable[..., None]) -> None:
    """And the server of this worker is ended."""
    other(host=host_identity(), address="", problem="no room")
    with pytest.raises(KVStoreError) as refused:
        gather(WORLD, Wanted(2))
    assert str(refused.value) == (
        "wanted servers that all workers can use, got none from worker 1: no room"
    )
    assert FakeServer.made[0].is_closed


@pytest.mark.parametrize(
    ("master", "got"),
    [
        ("", f"wanted MASTER_ADDR to find out where others are, got none; {NO_ADDRESS}"),
        (
            "127.0.0.1",
            (
                "wanted an address that other hosts reach, got 127.0.0.1, which MASTER_ADDR=127.0.0.1 is "
                f"here; {NO_ADDRESS}"
            ),
        ),
    ],
)
def test_an_address_that_nobody_reaches_is_refused(
    master: str, got: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be published in vain."""
    monkeypatch.setenv("MASTER_ADDR", master)
    with pytest.raises(KVStoreError) as refused:
        reached_by_all()
    assert str(refused.value) == got


def test_a_master_that_cannot_be_found_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that nobody has."""
    monkeypatch.setenv("MASTER_ADDR", "nobody.invalid")
    with pytest.raises(KVStoreError, match=r"^wanted a route to MASTER_ADDR=nobody.invalid, got "):
        reached_by_all()


def test_a_worker_alone_asks_nobody() -> None:
    """There may be no store."""
    assert told_by_all(World(0, 1, 0, torch.device("cpu")), "x", "mine") == ["mine"]
    assert addresses.is_loopback("tcp://127.1.2.3:*")
    assert not addresses.is_loopback("tcp://localhost:*"), "a name may be anything"


def test_a_worker_alone_may_have_keys(tmp_path: Path) -> None:
    """Its server lets in who has them alone."""
    with pytest.raises(KVStoreError, match=r"^wanted a key in '.*/worker.key_secret', got No such"):
        rl.kvstore.create("dist_async", keys=tmp_path)
    make_keys(tmp_path)
    (tmp_path / "server.key_secret").rename(tmp_path / "elsewhere")
    with pytest.raises(KVStoreError, match=r"^wanted a key in '.*/server.key_secret', got No such"):
        rl.kvstore.create("dist_async", keys=tmp_path)
    (tmp_path / "elsewhere").rename(tmp_path / "server.key_secret")
    with rl.kvstore.create("dist_async", keys=tmp_path) as store:
        store.init("w", torch.zeros(2))
        assert torch.equal(store.pull("w").get(), torch.zeros(2))
