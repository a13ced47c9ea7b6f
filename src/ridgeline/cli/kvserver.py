"""`ridgeline kvserver`: a server of an asynchronous key-value store."""

import argparse
import importlib
import sys
from pathlib import Path

from ridgeline.cli.command import FINE, Output
from ridgeline.errors import KVStoreError


class Command:
    """Serve a part of the keys of `rl.kvstore.create("dist_async")`, which starts such servers itself.

    The address is the first line of the output. The server ends once its standard input has ended and all
    workers have left or have been silent for their lease.
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of this verb."""
        parser.add_argument("--workers", type=int, required=True, metavar="N", help="who will call")
        parser.add_argument(
            "--staleness",
            type=int,
            default=None,
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
        parser.add_argument("--beside", action="store_true", help=argparse.SUPPRESS)

    def run(self, args: argparse.Namespace, output: Output) -> int:
        """Serve until it is over."""
        from ridgeline.runtime.kvstore.serving.server import Server, serve_beside
        from ridgeline.runtime.kvstore.serving.shard import Shard

        if args.workers < 1 or (args.staleness is not None and args.staleness < 0):
            raise KVStoreError(
                f"wanted --workers from 1 and --staleness from 0 on, got {args.workers} and {args.staleness}"
            )
        if args.module:
            sys.path.insert(0, str(Path.cwd()))
            importlib.import_module(args.module)
        server = Server(Shard(args.workers, args.staleness), "tcp://127.0.0.1:*")
        try:
            serve_beside(server)
        finally:
            server.close()
        return FINE
