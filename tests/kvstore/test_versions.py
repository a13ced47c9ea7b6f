"""Which pushes a value holds, told with it, and values that all hold the same ones."""

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from test_served import serving

import ridgeline as rl
from ridgeline.errors import KVStoreError
from ridgeline.runtime.kvstore.serving.server.shard import Shard
from ridgeline.runtime.kvstore.serving.worker import remote
from ridgeline.runtime.kvstore.serving.worker.remote import RemoteShelf
from ridgeline.runtime.kvstore.store import KVStore
from ridgeline.runtime.kvstore.updaters import OptimizerUpdater, SetOptimizer

KEYS = ["w", "v", "n"]


def test_versions_are_told() -> None:
    """With a pull that returns, one that fills, one of rows and one after a push."""
    with serving(Shard(1, None)) as server:
        store = KVStore("dist_async", RemoteShelf([server.address], 0, 1), threads=2)
        store.init("w", torch.zeros(3))
        assert store.versions("w") == {}
        store.set_optimizer("sgd", lr=1.0)
        for times in range(1, 4):
            store.push("w", torch.ones(3))
            reading = store.pull("w")
            assert reading.versions == store.versions("w") == {0: times}
        store.row_sparse_pull("w", torch.empty(1), row_ids=torch.tensor([1]))
        assert store.versions("w") == {0: 3}
        out = torch.ones(3)
        store.pushpull("w", out)
        assert store.versions("w") == {0: 4}
        assert torch.equal(out, torch.full((3,), -4.0))
        with pytest.raises(
            KVStoreError,
            match=r"^wanted a key with a value for versions, got 'x'; call init first$",
        ):
            store.versions("x")
        store.close()
    with rl.kvstore.create("local") as store:
        store.init("w", torch.zeros(3))
        assert store.pull("w", snapshot=True).versions == {}


def test_parts_that_hold_less_count() -> None:
    """Of a divided value: what all parts of it hold."""
    with serving(Shard(2, None)) as first, serving(Shard(2, None)) as second:
        shelf = RemoteShelf([first.address, second.address], 0, 2)
        shelf.init({"w": torch.zeros(2_000_000, 1)})
        shelf.set_updater(OptimizerUpdater(SetOptimizer("sgd", 1.0, {"lr": 1.0})))
        rows = torch.sparse_coo_tensor(
            [[0]], torch.ones(1, 1), (2_000_000, 1), check_invariants=True
        )
        shelf.push({"w": rows})
        (call, *_) = shelf._pushes("w", rows)
        shelf._servers.ask([call])
        assert shelf.read("w", [torch.empty(2_000_000, 1)], None) == {0: 1}
        shelf.close()


def test_a_snapshot_holds_the_same_pushes_of_all_keys() -> None:
    """On two servers, while another worker pushes one key after the other."""
    with serving(Shard(2, None)) as first, serving(Shard(2, None)) as second:
        addresses = [first.address, second.address]
        reads, pushes = (RemoteShelf(addresses, rank, 2) for rank in range(2))
        values = {key: torch.zeros(5) for key in KEYS}
        reads.init(values)
        pushes.init(values)
        pushes.set_updater(OptimizerUpdater(SetOptimizer("sgd", -1.0, {"lr": 1.0})))
        goes_on = threading.Event()

        def push() -> None:
            for _ in range(50):
                for key in KEYS:
                    pushes.push({key: torch.ones(5)})
                goes_on.wait(0.005)

        thread = threading.Thread(target=push)
        thread.start()
        newest = 0
        while thread.is_alive():
            outs = {key: [torch.empty(5)] for key in KEYS}
            versions = reads.read_alike(outs)
            found = torch.stack([out for (out,) in outs.values()])
            assert torch.equal(found, torch.full((3, 5), float(versions.get(1, 0))))
            assert versions.get(1, 0) >= newest
            newest = versions.get(1, 0)
        thread.join()
        reads.close()
        pushes.close()


def test_keys_without_such_a_moment_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are not pushed equally often."""
    monkeypatch.setattr(remote, "ALIKE_S", 0.0)
    with serving(Shard(1, None)) as server:
        shelf = RemoteShelf([server.address], 0, 1)
        shelf.init({"w": torch.zeros(1), "v": torch.zeros(1)})
        shelf.set_updater(OptimizerUpdater(SetOptimizer("sgd", 1.0, {"lr": 1.0})))
        shelf.push({"w": torch.ones(1)})
        with pytest.raises(
            KVStoreError,
            match=r"^wanted a moment at which keys \['w', 'v'\] hold the same pushes of each worker, got none "
            r"for 0 s; push all of them equally often, or pull behind a barrier$",
        ):
            shelf.read_alike({"w": [torch.empty(1)], "v": [torch.empty(1)]})
        shelf.close()


def test_a_server_beside_that_is_killed_is_replaced(tmp_path: Path) -> None:
    """Nothing is lost; and a store that is made again with the folder goes on with what is in it."""
    for begins_at in (0, 6):
        with rl.kvstore.create("dist_async", snapshots=tmp_path) as store:
            store.init("w", torch.zeros(20_000))
            store.set_optimizer("sgd", rescale_grad=-1.0, lr=1.0)
            out = torch.empty(20_000)
            for step in range(6):
                if step == 3:
                    store.pull("w", out)
                    os.kill(store._shelf._beside._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
                store.push("w", torch.ones(20_000))
            store.pull("w", out)
            assert torch.equal(out, torch.full((20_000,), begins_at + 6.0))
    (tmp_path / "server-0-of-2").mkdir()
    with pytest.raises(
        KVStoreError,
        match=r"^wanted snapshots of 1 servers in .*, got server-0-of-2; have as many servers as before, or name",
    ):
        rl.kvstore.create("dist_async", snapshots=tmp_path)


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_process_that_waits_takes_the_place(tmp_path: Path, *, is_alone: bool) -> None:
    """Of a server that is killed; where that process was killed, too, another one is started."""
    with rl.kvstore.create("dist_async", snapshots=tmp_path) as store:
        store.init("w", torch.zeros(2))
        store.set_optimizer("sgd", rescale_grad=-1.0, lr=1.0)
        store.push("w", torch.ones(2))
        beside = store._shelf._beside  # type: ignore[attr-defined]
        first, waits = beside._process, beside._standby
        for process in [waits, first] if is_alone else [first]:
            process.kill()
            process.wait()
        store.push("w", torch.ones(2))
        assert torch.equal(store.pull("w").get(), torch.full((2,), 2.0))
        assert (beside._process is waits) != is_alone
        assert beside._process is not first
    assert beside._standby is None or beside._standby.returncode is not None
