"""`ridgeline kvserver`: a server of an asynchronous key-value store."""

import argparse
import importlib
import math
import sys
from pathlib import Path

from ridgeline.cli.command import FINE, Output
from ridgeline.errors import KVStoreError


class KvserverCommand:
    """Serve a part of the keys of `rl.kvstore.create("dist_async")`, which starts such servers itself.

    The address is the first line of the output. The server ends once its standard input has ended and all
    workers have left or have been silent for their lease. One that is started again with the folder of its
    snapshots and the same address takes the place of the one before.

    It listens on the loopback. Across hosts workers and servers need keys: `--new-keys DIR` makes them, once
    for a job, and DIR is copied to all hosts.
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of this verb."""
        parser.add_argument("--workers", type=int, metavar="N", help="who will call")
        parser.add_argument(
            "--staleness",
            type=int,
            metavar="S",
            help="how many pushes of a key a worker may be ahead (default: any number)",
        )
        parser.add_argument(
            "--import",
            dest="module",
            default="",
            metavar="MODULE",
            help="imported first, to register updaters",
        )
        parser.add_argument(
            "--snapshots",
            type=Path,
            metavar="DIR",
            help="save its values, and start from those found there (default: keep them in memory only)",
        )
        parser.add_argument(
            "--listen",
            default="tcp://127.0.0.1:*",
            metavar="ADDRESS",
            help="where (default: a free port of the loopback; elsewhere it takes keys)",
        )
        parser.add_argument(
            "--keys",
            default="",
            metavar="DIR",
            help="keys of the processes that may connect (default: those of RIDGELINE_KVSTORE_KEYS)",
        )
        parser.add_argument(
            "--new-keys",
            type=Path,
            metavar="DIR",
            help="write new keys into a new directory instead of serving",
        )
        parser.add_argument("--beside", action="store_true", help=argparse.SUPPRESS)
        parser.add_argument("--idle", type=float, default=math.inf, help=argparse.SUPPRESS)

    def run(self, args: argparse.Namespace, output: Output) -> int:
        """Serve until it is over."""
        from ridgeline.runtime.kvstore.serving.addressing.keys import (
            make_keys,
            named_directory,
            read_keys,
        )
        from ridgeline.runtime.kvstore.serving.server.server import Server, is_wanted, serve_beside
        from ridgeline.runtime.kvstore.serving.server.shard import Shard
        from ridgeline.runtime.kvstore.serving.server.snapshots import Snapshots

        if args.new_keys is not None:
            make_keys(args.new_keys)
            output.progress(
                f"wrote the keys of servers and of workers to {args.new_keys}; copy it to all hosts, and "
                "keep it secret"
            )
            return FINE
        if (
            args.workers is None
            or args.workers < 1
            or (args.staleness is not None and args.staleness < 0)
        ):
            raise KVStoreError(
                f"wanted --workers from 1 and --staleness from 0 on, got {args.workers} and "
                f"{args.staleness}; give the number of workers that will call"
            )
        if args.module:
            # `python -m` has the working directory on the path, an installed command does not.
            sys.path.insert(0, str(Path.cwd()))
            try:
                importlib.import_module(args.module)
            except Exception as error:  # the user's program may raise anything; it is chained
                raise KVStoreError(
                    f"wanted a module to import, got {type(error).__name__}: {error} for --import "
                    f"{args.module}; start the server where that module lies, or correct it"
                ) from error
        if args.beside and not is_wanted():
            return FINE
        directory = named_directory(args.keys)
        keys = read_keys(directory, "server") if directory else None
        shard = Shard(args.workers, args.staleness)
        snapshots = None if args.snapshots is None else Snapshots(args.snapshots, shard)
        server = Server(shard, args.listen, keys=keys, snapshots=snapshots)
        try:
            serve_beside(server, args.idle)
        finally:
            server.close()
        return FINE
