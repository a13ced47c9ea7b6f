"""Keys: who has those of a job is let in, and who has none or others is told so, and the server says it."""

import logging
import re
import stat
from pathlib import Path

import pytest
import torch
from served_here import connected, new_keys, serving, until

from ridgeline.cli.main import main
from ridgeline.errors import KVStoreError
from ridgeline.runtime.kvstore.serving import wire
from ridgeline.runtime.kvstore.serving.addressing.keys import (
    VARIABLE,
    Keys,
    make_keys,
    named_directory,
    read_keys,
)
from ridgeline.runtime.kvstore.serving.server.server import Server
from ridgeline.runtime.kvstore.serving.server.shard import Shard
from ridgeline.runtime.kvstore.serving.worker.remote import RemoteShelf
from ridgeline.runtime.kvstore.updaters import OptimizerUpdater, SetOptimizer

FILES = ("server.key", "server.key_secret", "worker.key", "worker.key_secret")


def test_new_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    """Each side has a pair and the other's public key; no file is written over."""
    server, worker = new_keys(tmp_path / "keys")
    assert (server.other, worker.other) == (worker.public, server.public)
    assert len({server.public, server.secret, worker.public, worker.secret}) == 4
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "keys").iterdir()}
    assert modes == dict.fromkeys(FILES, 0o600)
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    assert server.secret.decode() not in repr(server)
    with pytest.raises(KVStoreError) as refused:
        make_keys(tmp_path / "keys")
    assert str(refused.value) == (
        f"wanted a new or empty directory for keys, got '{tmp_path}/keys' with something in it; name "
        "another, since processes with the old keys would be refused"
    )
    (tmp_path / "file").touch()
    with pytest.raises(KVStoreError, match=r"^wanted a directory for keys, got '.*/file': "):
        make_keys(tmp_path / "file")


def test_keys_that_are_none_are_refused(tmp_path: Path) -> None:
    """Files that are missing, hold something else, or can be read by others."""
    advice = "; make a directory of keys with `ridgeline kvserver --new-keys DIR` and copy it to all hosts"
    with pytest.raises(KVStoreError) as refused:
        read_keys(str(tmp_path), "worker")
    assert str(refused.value) == (
        f"wanted a key in '{tmp_path}/worker.key_secret', got No such file or directory{advice}"
    )
    make_keys(tmp_path)
    secret = tmp_path / "server.key_secret"
    secret.chmod(0o640)
    with pytest.raises(KVStoreError) as refused:
        read_keys(str(tmp_path), "server")
    assert str(refused.value) == (
        f"wanted a secret that only its owner may read, got '{secret}' with mode 640; run `chmod 600` on it, "
        "and make new keys if others may have read it"
    )
    whole = secret.read_text()
    for text, got in (
        ("nothing", f"wanted a key in '{secret}', got No public key found in {secret}{advice}"),
        (
            whole.replace('secret-key = "', 'secret-key = "x'),
            f"wanted keys of 40 characters in '{secret}', got 41{advice}",
        ),
        (
            whole.split("    secret-key")[0],
            f"wanted a secret key in '{secret}', got a public one alone{advice}",
        ),
    ):
        secret.write_text(text)
        secret.chmod(0o600)
        with pytest.raises(KVStoreError) as refused:
            read_keys(str(tmp_path), "server")
        assert str(refused.value) == got


def test_an_argument_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """And neither is needed."""
    monkeypatch.delenv(VARIABLE, raising=False)
    assert named_directory("") == ""
    monkeypatch.setenv(VARIABLE, "there")
    assert named_directory("") == "there"
    assert named_directory(Path("here")) == "here"


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:*", "tcp://*:*", "tcp://192.0.2.1:7000", "tcp://eth0:*"]
)
def test_a_server_that_others_reach_needs_keys(address: str) -> None:
    """It does not start without; what is no address is refused as well."""
    with pytest.raises(KVStoreError) as refused:
        Server(Shard(1, None), address)
    assert str(refused.value) == (
        f"wanted keys to listen at '{address}', which other hosts reach, got none; make some with `ridgeline "
        "kvserver --new-keys DIR`, copy DIR to all hosts, and name it on each: keys=DIR, --keys DIR or "
        "RIDGELINE_KVSTORE_KEYS=DIR"
    )
    # Of a larger port ZeroMQ would take the lower 16 bits, and serve at another one.
    larger = "tcp://127.0.0.1:99999"
    for wrong in ("127.0.0.1", "ipc:///tmp/socket", "tcp://127.0.0.1", "inproc://x", "", larger):
        with pytest.raises(KVStoreError) as refused:
            Server(Shard(1, None), wrong)
        assert str(refused.value) == (
            f"wanted an address such as 'tcp://10.0.0.3:*' or 'tcp://127.0.0.1:*', got '{wrong}'; correct it "
            "(ports end at 65535)"
        )


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:*", "tcp://[::1]:*"])
def test_with_keys_workers_are_let_in(address: str, tmp_path: Path) -> None:
    """At any address, and what they push counts."""
    own, theirs = new_keys(tmp_path)
    if "::" in address and not Path("/proc/net/if_inet6").exists():
        pytest.skip("wanted IPv6, got a kernel without")
    with serving(Shard(1, None), keys=own, address=address) as server:
        at = server.address.replace("0.0.0.0", "127.0.0.1")
        shelf = RemoteShelf([at], 0, 1, keys=theirs)
        push_twice(shelf)
        shelf.close()


def push_twice(shelf: RemoteShelf) -> None:
    """Training of a kind."""
    shelf.init({"w": torch.zeros(40_000)})
    shelf.set_updater(OptimizerUpdater(SetOptimizer("sgd", 1.0, {"lr": 1.0})))
    out = torch.empty(40_000)
    for _ in range(2):
        shelf.push_and_read("w", torch.ones(40_000), [out])
    assert torch.equal(out, torch.full((40_000,), -2.0))


REFUSED = {
    "no key": "this worker has no keys, and the server requires them",
    "another key of a worker": "it does not know the keys in 'DIR', or has others or none",
    "another key of a server": "it does not know the keys in 'DIR', or has others or none",
    "keys of both": "it does not know the keys in 'DIR', or has others or none",
}
SAID = (
    "its key is not that of workers",
    "it has no key or another one, or is not a worker",
    "it ended before it had identified itself",
)


@pytest.mark.parametrize("what", [*REFUSED])
def test_who_has_other_keys_is_refused(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told so long before a server counts as silent; the log has a line; a worker beside it goes on."""
    own, theirs = new_keys(tmp_path / "right")
    _, wrong = new_keys(tmp_path / "wrong")
    directory = str(tmp_path / "wrong")
    keys: dict[str, Keys | None] = {
        "no key": None,
        "another key of a worker": Keys(directory, wrong.public, wrong.secret, theirs.other),
        "another key of a server": Keys(directory, theirs.public, theirs.secret, wrong.other),
        "keys of both": wrong,
    }
    with serving(Shard(1, None), keys=own) as server, caplog.at_level(logging.WARNING):
        beside = RemoteShelf([server.address], 0, 1, keys=theirs)
        push_twice(beside)
        with (
            connected(server.address, keys=keys[what], resend_s=0.05) as channel,
            pytest.raises(KVStoreError) as refused,
        ):
            channel.ask(wire.Beat())
        out = torch.empty(40_000)
        until(lambda: bool(caplog.messages), lambda: beside.read("w", [out], None))
        beside.close()
    assert str(refused.value).replace(directory, "DIR") == (
        f"wanted to connect to the server at {server.address}, got refused: {REFUSED[what]}; name one "
        "directory of `ridgeline kvserver --new-keys DIR` on all hosts, by keys=DIR or "
        "RIDGELINE_KVSTORE_KEYS=DIR"
    )
    first, *rest = caplog.messages
    assert first in {f"a connection was refused: {why}" for why in SAID}
    told = re.compile(r"a connection was refused \(\d+ more since the last line about this\)")
    assert all(told.fullmatch(one) for one in rest)
    assert len(rest) <= 1


def test_keys_for_a_server_without_are_told_of(tmp_path: Path) -> None:
    """It would be talked to in the clear."""
    _, theirs = new_keys(tmp_path)
    with (
        serving(Shard(1, None)) as server,
        connected(server.address, keys=theirs, resend_s=0.05) as channel,
        pytest.raises(
            KVStoreError, match=r"^wanted to connect to the server at .*, got refused: it"
        ),
    ):
        channel.ask(wire.Beat())


def test_the_command_line_makes_keys_and_wants_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--new-keys` writes them and serves nobody; a server that others reach does not start without."""
    monkeypatch.delenv(VARIABLE, raising=False)
    directory = tmp_path / "keys"
    assert main(["kvserver", "--new-keys", str(directory)]) == 0
    assert sorted(path.name for path in directory.iterdir()) == sorted(FILES)
    told = " ".join(capsys.readouterr().err.split())
    assert told.startswith("wrote the keys of servers and of workers to ")
    assert main(["kvserver", "--new-keys", str(directory)]) == 1
    assert "wanted a new or empty directory for keys" in capsys.readouterr().err
    assert main(["kvserver", "--workers", "1", "--listen", "tcp://0.0.0.0:*"]) == 1
    assert "wanted keys to listen at 'tcp://0.0.0.0:*', which" in capsys.readouterr().err
    assert main(["kvserver", "--workers", "1", "--keys", str(tmp_path / "none")]) == 1
    assert "wanted a key in " in capsys.readouterr().err
    assert main(["kvserver", "--workers", "1", "--import", "no_such_module"]) == 1
    assert (
        "wanted a module to import, got ModuleNotFoundError: No module named 'no_such_module' for --import"
        in " ".join(capsys.readouterr().err.split())
    )
    assert main(["kvserver"]) == 1
    assert "wanted --workers from 1 and --staleness from 0 on" in capsys.readouterr().err
