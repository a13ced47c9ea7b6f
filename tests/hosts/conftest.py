"""Makes the helpers importable; two hosts on a link of 100 Mbit/s for all tests of a file."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from namespaces import need_hosts

from ridgeline.experiments.namespaces import NamespaceNetwork, hosts

RATE = "100mbit"


@pytest.fixture
def able() -> None:
    """This machine can make hosts."""
    need_hosts()


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[NamespaceNetwork]:
    """Two hosts; the link between them carries 100 Mbit/s each way."""
    need_hosts()
    with hosts(2, RATE) as network:
        yield network
