"""Training through a key-value store: its options, and what its servers' links carry.

Each worker pushes its gradients to servers, which update the parameters, and pulls these. The servers are
beside the workers: they share their links.
"""

from collections.abc import Mapping

from ridgeline.laws.collectives import bus_bandwidth_factor, parameter_server_seconds
from ridgeline.synchronisation.entries import Option, OptionValue

SYNCHRONOUS, ASYNCHRONOUS = "dist_sync", "dist_async"
KIND = Option("kind", str, SYNCHRONOUS, is_exact=False, among=(SYNCHRONOUS, ASYNCHRONOUS))
STALENESS = Option("staleness", int, -1, least=-1)
"""How many pushes of a parameter a worker may be ahead of another; -1: any number."""
SERVERS = Option("servers", int, 0, least=0)
"""The first so many workers have one beside them; 0: all."""
SNAPSHOTS = Option("snapshots", str, "")
"""A folder in which servers write down what they hold, for one that is killed to be replaced; empty: none."""
OPTIONS = (KIND, STALENESS, SERVERS, SNAPSHOTS)
REMARK = (
    "its servers share the workers' links and send what a ring does: it is for workers that need not wait "
    f"for each other ({KIND.name}={ASYNCHRONOUS!r}, which changes the maths) and for sparse rows"
)


def is_synchronous(options: Mapping[str, OptionValue]) -> bool:
    """Whether all workers take the same step."""
    return options[KIND.name] == SYNCHRONOUS


def goes_ahead(options: Mapping[str, OptionValue]) -> bool:
    """Whether a worker may take any number of steps without the others; False without such options."""
    staleness = options.get(STALENESS.name, STALENESS.default)
    return options.get(KIND.name) == ASYNCHRONOUS and staleness == STALENESS.default


def busiest(workers: int, options: Mapping[str, OptionValue]) -> float:
    """How many times as long pushing and pulling take as an all-reduce of the same bytes by a ring.

    Source: `laws.parameter_server_seconds` with servers that are beside workers.
    """
    if workers == 1:
        return 1.0
    # 0 stands for all; a server lies beside a worker, so there are never more of them.
    servers = min(int(options[SERVERS.name]) or workers, workers)
    # One byte at one byte a second: the law then gives what `bus_bandwidth_factor` gives for a ring.
    seconds = parameter_server_seconds(1.0, workers, 1.0, servers=servers, colocated=True)
    return seconds / bus_bandwidth_factor("all_reduce", workers)


def updates(workers: int, options: Mapping[str, OptionValue]) -> float:
    """How often a server makes the update of all parameters while each worker takes a step.

    Each has its part of them. Where pushes are added up there is one update for all, else one for each.
    """
    servers = min(int(options.get(SERVERS.name, 0)) or workers, workers)
    # Without such options, as of an entry assigned from outside, all take the same step.
    kind = options.get(KIND.name, SYNCHRONOUS)
    adds_up = kind == SYNCHRONOUS or options[STALENESS.name] == 0
    return (1 if adds_up else workers) / servers


def objection(workers: int, options: Mapping[str, OptionValue]) -> str:
    """Why a plan with these options is refused; empty where it is not."""
    if is_synchronous(options):
        for option in (STALENESS, SERVERS, SNAPSHOTS):
            if options[option.name] != option.default:
                return (
                    f"wanted sync.options[{KIND.name!r}]={ASYNCHRONOUS!r} for sync.options[{option.name!r}], "
                    f"got {options[KIND.name]!r} in the plan; set it, or leave the option out"
                )
    if workers > 1 and int(options[SERVERS.name]) > workers:
        return (
            f"wanted sync.options[{SERVERS.name!r}] <= workers={workers}, got {options[SERVERS.name]} in the "
            "plan; a worker has one server beside it at most: lower it"
        )
    return ""
