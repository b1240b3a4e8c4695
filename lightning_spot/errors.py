"""The one error tree of lightning_spot; every error says what happened, what it means for the run, and what to do.

::

    SpotError
    ├── SettingsError               a setting or argument cannot be used as given
    │   └── MalformedError          a file or an answer of another process has not the form that it should have
    ├── NotSerializableError        the training state holds something that cannot be pickled, or not be loaded safely
    ├── CorruptSnapshotError        bytes or a manifest are not what was committed, or a newer version wrote it
    ├── SnapshotNotFoundError       no such snapshot, file or run at a tier
    ├── SnapshotFailedError         a snapshot could not be taken; ``reason`` is a :class:`FailureReason`
    ├── ModelChangedError           the model no longer fits the snapshot it should resume from
    ├── TierError                   a tier failed (disk full, permission); ``reason`` is a :class:`TierReason`
    │   ├── ServerUnreachableError  no snapshot server answers at an address
    │   └── ServerRefusedError      a snapshot server answered and refused the request, or failed at it
    ├── FencedError                 a later attempt of the run has taken over; this writer's writes are refused
    ├── RunBusyError                a live trainer on this host already writes the run
    └── NoticeUnavailableError      a preemption notice source cannot be asked at present

    SystemExit
    └── PreemptedError              training stopped on a preemption notice; exit code 143

Errors are told apart by class, and within one by its attribute ``reason``. Messages are for people only.
"""

from __future__ import annotations

import enum


class Reason(enum.Enum):
    """Why an error was raised, if its class alone does not say so."""

    def caused(self, error: BaseException | None) -> bool:
        """Whether it is the reason of an error."""
        return getattr(error, "reason", None) is self


class FailureReason(Reason):
    """Why a snapshot could not be taken; the one before it counts."""

    TORN = "torn"
    """A tensor changed while it was copied."""

    SHARD_MISSING = "shard-missing"
    """One rank did not write its shard, or has written another one."""

    RING_FULL = "ring-full"
    """Every slot holds a snapshot that is in use or not uploaded yet. Try again once uploads have caught up."""

    TOO_LARGE = "too-large"
    """It is larger than all of the server's memory: waiting does not help."""

    UNEXPECTED = "unexpected"
    """An unexpected error, such as memory that ran out."""


class TierReason(Reason):
    """How a tier (a snapshot server or the storage) failed, or why a server refused a request."""

    FAILED = "failed"
    """In another way, which the message names."""

    UNCLAIMED = "unclaimed"
    """The attempt has not claimed the run's directory yet: nothing is written or deleted there for it."""

    NO_CREDENTIALS = "no-credentials"
    """No credentials were found for an object store."""

    UNREACHABLE = "unreachable"
    """No snapshot server answers."""

    REFUSED = "refused"
    """A snapshot server refuses the request because of its token, its content or its form."""

    PROTOCOL = "protocol"
    """The client and the server are of different versions. Install the same version on both hosts."""

    TLS = "tls"
    """One side speaks TLS and the other does not, or a certificate is not trusted. Nothing was sent in clear."""

    TOO_MANY_STREAMS = "too-many-streams"
    """A client, or an upload, has as many connections as a server grants one; it continues over those it has."""

    SERVER_FAILED = "server-failed"
    """A server met an unexpected error, such as memory that ran out; it continues with other requests."""


class SpotError(Exception):
    """Base of all errors that lightning_spot raises on purpose."""


class SettingsError(SpotError, ValueError):
    """A setting or an argument cannot be used as given; nothing was started."""


class MalformedError(SettingsError):
    """A file or an answer of another process has not the form that it should have; nothing of it was used."""


class NotSerializableError(SpotError):
    """The training state holds something that cannot be pickled, or that torch does not load ``weights_only``."""


class CorruptSnapshotError(SpotError):
    """The bytes found are not the bytes that were committed, or a manifest cannot be read.

    Attributes:
        where: tier or URL of the snapshot.
        part: index of the first bad part, or ``None`` when the size or the manifest is wrong.
    """

    def __init__(self, message: str, *, where: str = "", part: int | None = None) -> None:
        super().__init__(message)
        self.where = where
        self.part = part


class SnapshotNotFoundError(SpotError, FileNotFoundError):
    """No such snapshot, file or run at this tier."""


class SnapshotFailedError(SpotError):
    """A snapshot could not be taken; the one before it counts.

    Attributes:
        reason: why.
    """

    def __init__(self, message: str, *, reason: FailureReason) -> None:
        super().__init__(message)
        self.reason = reason


class ModelChangedError(SpotError, RuntimeError):
    """The model's parameters do not match the snapshot.

    Attributes:
        missing: keys the model has and the snapshot lacks.
        unexpected: keys the snapshot has and the model lacks.
        reshaped: keys whose shapes differ.
    """

    def __init__(self, message: str, *, missing: list[str], unexpected: list[str], reshaped: list[str]) -> None:
        super().__init__(message)
        self.missing = missing
        self.unexpected = unexpected
        self.reshaped = reshaped


class TierError(SpotError):
    """A tier failed.

    Attributes:
        tier: URL of the tier.
        reason: in what way.
    """

    def __init__(self, message: str, *, tier: str = "", reason: TierReason = TierReason.FAILED) -> None:
        super().__init__(message)
        self.tier = tier
        self.reason = reason


class ServerUnreachableError(TierError, ConnectionError):
    """No snapshot server answers at this address now; the caller retries, or uses the next tier."""

    def __init__(self, message: str, *, tier: str = "") -> None:
        super().__init__(message, tier=tier, reason=TierReason.UNREACHABLE)


class ServerRefusedError(TierError):
    """A snapshot server answered and refused the request, or failed at it.

    Attributes:
        status: the HTTP status it answered with.
    """

    def __init__(
        self, message: str, *, tier: str = "", status: int = 0, reason: TierReason = TierReason.REFUSED
    ) -> None:
        super().__init__(message, tier=tier, reason=reason)
        self.status = status

    @property
    def is_for_the_token(self) -> bool:
        """Whether it refuses the secret: to ask again with the same one is of no use."""
        return self.status == 401


class FencedError(SpotError):
    """A later attempt of the run has taken over, so this writer's snapshots are refused.

    Attributes:
        current: the attempt that holds the run now.
    """

    def __init__(self, message: str, *, current: int = 0) -> None:
        super().__init__(message)
        self.current = current


class RunBusyError(SpotError):
    """A live trainer already writes this run; two trainers must not write one run."""


class NoticeUnavailableError(SpotError):
    """A notice source could not be asked, or its answer has no meaning; it is asked again later."""


class PreemptedError(SystemExit):
    """Training was stopped by a preemption notice, after the state was secured. Not an error: it ends the process.

    Attributes:
        code: exit code of the process.
        notice: what the notice said.
    """

    def __init__(self, notice: str, code: int) -> None:
        super().__init__(code)
        self.notice = notice
