"""The one error tree of lightning_spot; every error says what happened, what it means for the run, and what to do.

::

    SpotError
    ├── SettingsError            a setting or argument cannot be used as given
    │   └── MalformedError            a file, or what another process says, is not what it should be
    ├── LayoutUnsupportedError        this torch cannot lay this checkpoint out; plain ``torch.save`` is used instead
    ├── NotSerializableError          the training state holds something that cannot be pickled, or not be loaded safely
    ├── CorruptSnapshotError          bytes that are there are not the bytes that were committed
    │   └── CorruptManifestError      the manifest itself cannot be read
    │       └── UnknownFormatError    a newer version of this package wrote it
    ├── SnapshotNotFoundError         no such snapshot, file or run at a tier
    ├── TornSnapshotError             a tensor changed while it was copied; the snapshot was dropped
    ├── ShareMissingError             a rank's share of a snapshot did not come, or does not fit; it was dropped
    ├── SnapshotFailedError           a snapshot could not be taken, for a reason that nobody foresaw; it was skipped
    ├── ModelChangedError             the model no longer fits the snapshot it should resume from
    ├── TierError                a tier failed (unreachable, disk full, permission)
    │   ├── OvertakenError            an earlier writer came in between; written again, it stays
    │   ├── MissingCredentialsError   none were found for an object store
    │   ├── ServerUnreachableError      no snapshot server answers at an address
    │   ├── ServerRefusedError          the node answered and said no (token, bad request)
    │   ├── ServerFailedError           the node failed at a request in a way that nobody foresaw
    │   ├── TooManyStreamsError       an upload has its part of a node's connections
    │   └── ProtocolMismatchError     the two ends speak different protocol versions
    ├── RingFullError                 every slot is dirty or in use: back-pressure, not a failure
    ├── SnapshotTooLargeError         the snapshot cannot ever fit the node's memory
    ├── FencedError                   a later attempt of the run has taken over; this writer's writes are refused
    ├── RunBusyError                  a live trainer on this host already writes the run
    └── NoticeUnavailableError        a preemption notice source cannot be asked at present

    SystemExit
    └── PreemptedError                training stopped on a preemption notice; exit code 143
"""

from __future__ import annotations


class SpotError(Exception):
    """Base of everything lightning_spot raises on purpose."""


class SettingsError(SpotError, ValueError):
    """A setting or an argument cannot be used as given; nothing was started."""


class MalformedError(SettingsError):
    """What a file holds, or another process says, is not what it should be; nothing of it was used."""


class LayoutUnsupportedError(SpotError):
    """This torch cannot lay the checkpoint out before filling it; the writer falls back to ``torch.save``."""


class NotSerializableError(SpotError):
    """The training state holds something that cannot be pickled, or that torch does not load ``weights_only``."""


class CorruptSnapshotError(SpotError):
    """The bytes found are not the bytes that were committed.

    Attributes:
        where: tier or URL of the snapshot.
        part: index of the first bad part, or ``None`` when the size is wrong.
    """

    def __init__(self, message: str, *, where: str = "", part: int | None = None) -> None:
        super().__init__(message)
        self.where = where
        self.part = part


class CorruptManifestError(CorruptSnapshotError):
    """A manifest cannot be parsed or contradicts itself."""


class UnknownFormatError(CorruptManifestError):
    """A newer version of this package wrote the manifest: the snapshot may be good, this version cannot tell."""


class SnapshotNotFoundError(SpotError, FileNotFoundError):
    """No such snapshot, file or run at this tier."""


class TornSnapshotError(SpotError):
    """A tensor changed while it was being copied; the snapshot was dropped and the one before it stands."""


class ShareMissingError(SpotError):
    """The bytes that one rank was to write into a snapshot did not come; the one before it stands."""


class SnapshotFailedError(SpotError):
    """Taking a snapshot failed in a way that nobody foresaw (memory ran out, say); the one before it stands."""


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
    """

    def __init__(self, message: str, *, tier: str = "") -> None:
        super().__init__(message)
        self.tier = tier


class UnclaimedError(TierError):
    """An attempt has not claimed the run's directory (yet): nothing is written or deleted there on its behalf."""


class OvertakenError(TierError):
    """Another writer, who began earlier, replaced a file while it was committed; written again, it stays."""


class MissingCredentialsError(TierError):
    """No credentials were found for an object store."""


class ServerUnreachableError(TierError, ConnectionError):
    """No snapshot server answers at this address (now); the caller retries or degrades to the next tier."""


class ServerRefusedError(TierError):
    """The node answered and refused the request.

    Attributes:
        status: the HTTP status it answered with.
    """

    def __init__(self, message: str, *, tier: str = "", status: int = 0) -> None:
        super().__init__(message, tier=tier)
        self.status = status

    @property
    def is_for_the_token(self) -> bool:
        """Whether it refuses the secret: to ask again with the same one is of no use."""
        return self.status == 401


class ServerFailedError(TierError):
    """The node failed at a request in a way that nobody foresaw (memory ran out, say); it goes on with others."""


class TooManyStreamsError(TierError):
    """An upload has its part of the connections that a node receives over at once; those it has go on."""


class ProtocolMismatchError(TierError):
    """The two ends speak different versions of the node protocol; upgrade the older one."""


class RingFullError(SpotError):
    """Every slot of the ring is dirty or in use; try again once the flusher has caught up."""


class SnapshotTooLargeError(SpotError):
    """The snapshot cannot fit the node's memory, however long one waits.

    Attributes:
        nbytes: size of the snapshot in bytes.
        memory_bytes: the node's limit in bytes.
    """

    def __init__(self, message: str, *, nbytes: int = 0, memory_bytes: int = 0) -> None:
        super().__init__(message)
        self.nbytes = nbytes
        self.memory_bytes = memory_bytes


class FencedError(SpotError):
    """A later attempt of the run has taken over, so this writer's snapshots are refused.

    Attributes:
        run: name of the run.
        attempt: the writer's attempt.
        current: the attempt that holds the run now.
    """

    def __init__(self, message: str, *, run: str = "", attempt: int = 0, current: int = 0) -> None:
        super().__init__(message)
        self.run = run
        self.attempt = attempt
        self.current = current


class RunBusyError(SpotError):
    """A live trainer already writes this run; two runs must not share one name.

    Attributes:
        run: name of the run.
        pid: process id of the trainer that holds it.
    """

    def __init__(self, message: str, *, run: str = "", pid: int = 0) -> None:
        super().__init__(message)
        self.run = run
        self.pid = pid


class NoticeUnavailableError(SpotError):
    """A notice source could not be asked, or gave an answer that is none; it is asked again later."""


class PreemptedError(SystemExit):
    """Training was stopped by a preemption notice, after the state was secured. Not an error: it ends the process.

    Attributes:
        code: exit code of the process.
        notice: what the notice said.
    """

    def __init__(self, notice: str, code: int) -> None:
        super().__init__(code)
        self.notice = notice
