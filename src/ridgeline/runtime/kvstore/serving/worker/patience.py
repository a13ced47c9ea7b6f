"""How long a worker waits for a server, and at it for other workers, before it names who does not come."""

from collections.abc import Collection

from ridgeline.errors import UnansweredError

SHORT_S = 0.25
"""How long is waited where it was in vain before: the calls behind that one would each wait as long."""


class Company:
    """The other workers, to all connections of one: who hangs comes to no server.

    Attributes:
        was_missed: They were waited for in vain, and have come to nothing that was waited for since.
    """

    def __init__(self) -> None:
        self.was_missed = False


class Patience:
    """Of all connections of a worker to one server.

    Args:
        company: Of the worker, at all servers; None: of one that asks this server alone.

    Attributes:
        company: As above.
        is_silent: The server was waited for in vain, and was not heard of since.
    """

    def __init__(self, company: Company | None = None) -> None:
        self.company = company or Company()
        self.is_silent = False

    def heard(self) -> None:
        """The server says something."""
        self.is_silent = False

    def came(self) -> None:
        """Other workers came to what this one waited for."""
        self.company.was_missed = False

    def check_heard(self, address: str, silent_s: float, most_s: float) -> None:
        """Refuse to wait for a server for ever.

        Args:
            address: Of the server.
            silent_s: How long nothing was heard of it.
            most_s: How long that may be.

        Raises:
            UnansweredError: it was longer.
        """
        if silent_s <= (min(SHORT_S, most_s) if self.is_silent else most_s):
            return
        self.is_silent = True
        raise UnansweredError(
            f"wanted an answer of the server at {address}, got none for {silent_s:.0f} s; check whether it "
            "runs"
        )

    def check_came(
        self,
        address: str,
        worker: int,
        calls: Collection[str],
        asked_s: float,
        most_s: float,
        awaits: Collection[int],
    ) -> None:
        """Refuse to wait for other workers for ever.

        Args:
            address: Of the server.
            worker: That waits.
            calls: Kinds of the calls that are not answered.
            asked_s: How long it has waited.
            most_s: How long it may.
            awaits: For whom, as the server says; none where it has not said that a call waits.

        Raises:
            UnansweredError: it was longer.
        """
        if asked_s <= (min(SHORT_S, most_s) if awaits and self.company.was_missed else most_s):
            return
        self.company.was_missed = True
        waiting, names = ", ".join(calls), " and ".join(map(str, sorted(awaits)))
        who = f" of worker{'s' * (len(awaits) > 1)} {names}" if awaits else ""
        raise UnansweredError(
            f"wanted other workers to come to what worker {worker} waits for ({waiting}) at {address}, got "
            f"none{who} for {asked_s:.0f} s; make sure that all make the same calls of init and barrier, and "
            "push",
            tuple(sorted(awaits)),
        )
