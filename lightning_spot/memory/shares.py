"""Uploads that several ranks of this host fill together: who takes part, whose bytes are there, when it is given up.

The rank that leased the slot has share 0. The others ask for theirs by the snapshot's name, write into the same slot,
and say when their bytes are in place. The slot is not used again before each of them has said so, or has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from lightning_spot.errors import (
    FailureReason,
    ServerUnreachableError,
    SettingsError,
    ShareFault,
    SnapshotFailedError,
    SnapshotNotFoundError,
)
from lightning_spot.image.manifest import Order, snapshot_order
from lightning_spot.memory.joint import Joint, Layouts, Shared
from lightning_spot.memory.registry import Registry
from lightning_spot.memory.upload import Upload
from lightning_spot.tiers.fences import check_fence

SHARES_WAIT_S = 600.0
"""A snapshot whose first rank is done is given up if the other ranks' bytes are not in place so much later."""

RECONNECT_S = 5.0
"""A rank whose connection has closed, and that has not asked for its share, is given so long to connect again."""

HOST_SILENT_S = 60.0
"""Where hosts fill it, it is given up if none of them has sent anything for so long, once the first one is done."""

_LOOK_S = 1.0
_NEVER: tuple[Order, str] = ((0, 0, 0), "")
_MOST_DECLINED = 256  # of a run, by name


class Shares:
    """The joint uploads of a server. All methods may be called from any thread.

    Args:
        registry: of runs and sessions; its lock guards everything here.
        notify: wakes who waits on an event loop.
        free: frees the slot of an upload that was given up, once nobody writes into it.

    Attributes:
        wait_s: see :data:`SHARES_WAIT_S`.
        reconnect_s: see :data:`RECONNECT_S`.
        silent_s: see :data:`HOST_SILENT_S`.
    """

    def __init__(self, registry: Registry, notify: Callable[[], None], free: Callable[[Upload], None]) -> None:
        self.wait_s, self.reconnect_s, self.silent_s = SHARES_WAIT_S, RECONNECT_S, HOST_SILENT_S
        self._registry = registry
        self._notify, self._free = notify, free
        self._changed = threading.Condition(registry.lock)
        self._open: dict[str, Upload] = {}
        self._over: dict[str, tuple[Order, str]] = {}
        self._declined: dict[str, dict[str, str]] = {}
        self._layouts = Layouts()
        self._sessions: dict[tuple[str, int], str] = {}
        self._without: dict[tuple[str, int], str] = {}

    # -- the rank that leased the slot ----------------------------------------------------------------------------

    def joint(self, key: str, shared: Shared, layout_id: str = "") -> Joint:
        """Begin to share an upload of a run, see :meth:`Layouts.joint`."""
        with self._changed:
            return self._layouts.joint(key, shared, layout_id)

    def say(self, upload: Upload, nbytes: int, shared: Shared, layout_id: str = "") -> None:
        """Say for which snapshot a slot was leased. To say it again does nothing: an answer may have been lost.

        Args:
            upload: leased on this host for nothing in particular.
            nbytes: size of the snapshot.
            shared: see :meth:`joint`.
            layout_id: see there.

        Raises:
            FencedError: if its attempt no longer holds the run.
            SettingsError: if it was leased for something else, or is too small.
            SnapshotNotFoundError: if it has ended.
        """
        with self._changed:
            if upload.joint is not None and upload.joint.shared.name == shared.name:
                return
            if upload.ended:
                raise SnapshotNotFoundError(f"upload {upload.id!r} does not exist (any more)")
            check_fence(upload.run, upload.attempt, self._registry.highest(upload.run))
            if upload.name or upload.joint is not None or upload.sealing or not upload.session:
                raise SettingsError(f"upload {upload.id} was begun for something else than {shared.name}")
            if nbytes > upload.slot.capacity:
                raise SettingsError(f"{shared.name} of {nbytes} bytes does not fit its slot of {upload.slot.capacity}")
            upload.joint = self.joint(upload.run, shared, layout_id)
            upload.name, upload.nbytes = shared.name, nbytes
            self.begun(upload)

    def begun(self, upload: Upload) -> None:
        """An upload was opened; ranks may join it."""
        if upload.joint is not None:
            with self._changed:
                self._open[upload.id] = upload
                if why := self._why_over(upload.run, upload.joint.shared.name):  # who asks for a share is told so
                    upload.joint.failed = upload.joint.failed or why
                for share in range(1, upload.joint.shared.shares):
                    if self._without.get((upload.run, share)) == upload.joint.shared.name:
                        self._fail_without(upload.joint, share)
                self._wake()

    def decline(self, run: str, attempt: int, name: str, why: str, *, by_hosts: bool = False, host: int = 0) -> None:
        """There will be no snapshot of that name: nobody waits for it any more.

        Args:
            run: as in URLs.
            attempt: that would have written it.
            name: of the snapshot.
            why: for people.
            by_hosts: whether hosts would have filled it. An earlier one may begin yet, which waits for its turn. Ranks
                of one host begin nothing earlier any more.
            host: that says so of itself, from 1; what it has brought already counts. 0 for who leads.
        """
        key = self._admit(run, attempt)
        with self._changed:
            joints = [each.joint for each in self._open.values() if each.run == key and each.joint is not None]
            for joint in (each for each in joints if each.shared.name == name):
                if host in joint.placed:
                    return
                joint.failed = joint.failed or why
            if by_hosts:
                self._note_declined(key, name, why)
            else:
                self._end(key, name, why)

    def is_over(self, run: str, name: str) -> bool:
        """Whether nobody can join a snapshot here any more: it is committed, given up, or overtaken."""
        key = self._registry.key(run)
        with self._changed:
            return bool(self._why_over(key, name))

    def is_joined(self, run: str, name: str, share: int) -> bool:
        """Whether a rank has asked for its share of a snapshot here, or nobody can any more.

        Args:
            run: the run, as in URLs.
            name: of the snapshot.
            share: of the rank.
        """
        key = self._registry.key(run)
        with self._changed:
            joints = [upload.joint for upload in self._open.values() if upload.run == key]
            joined = (share in joint.joined for joint in joints if joint is not None and joint.shared.name == name)
            return any(joined) or self.is_over(run, name)

    def wait(self, upload: Upload) -> None:
        """Return when the bytes of all shares are in place.

        Raises:
            SnapshotFailedError: if they will never be, or not in time.
            SnapshotNotFoundError: if the upload is given up meanwhile.
        """
        if (joint := upload.joint) is None:
            return
        begun_s = time.monotonic()
        deadline_s = begun_s + self.wait_s if not upload.is_gathered else float("inf")  # as long as something comes
        with self._changed:
            while joint.missing:
                if upload.ended:
                    raise SnapshotNotFoundError(f"upload {upload.id!r} does not exist (any more)")
                if time.monotonic() - begun_s >= self.reconnect_s:
                    self._look(upload.run, joint)
                left_s = deadline_s - time.monotonic()
                late = ", ".join(map(str, joint.missing))
                self.fail_if_silent(upload)
                if not joint.failed and left_s <= 0:
                    joint.failed = f"the bytes of rank {late} did not come within {self.wait_s:.0f} s"
                if joint.failed:
                    raise SnapshotFailedError(joint.failed, reason=FailureReason.SHARE_MISSING, fault=joint.fault)
                self._changed.wait(min(left_s, _LOOK_S))

    def fail_if_silent(self, upload: Upload) -> None:
        """Where hosts fill it, and nothing was heard of them for long, it cannot become a snapshot any more."""
        joint = upload.joint
        if joint is None or not upload.is_gathered or time.monotonic() - upload.touched_s < self.silent_s:
            return
        with self._changed:
            if joint.missing and not joint.failed:
                late = ", ".join(map(str, joint.missing))
                joint.failed = f"host {late} has brought no portion, and nothing came for {self.silent_s:.0f} s"

    def fail(self, upload: Upload, why: str) -> None:
        """An upload cannot become a snapshot any more: nobody waits for its shares."""
        with self._changed:
            if upload.joint is not None:
                upload.joint.failed = upload.joint.failed or why
            self._wake()

    def ended(self, upload: Upload) -> None:
        """An upload was committed or given up. Call it under the registry's lock."""
        if (joint := upload.joint) is not None:
            why = joint.failed or ("it was given up" if upload.given_up else "it is committed already")
            self._end(upload.run, joint.shared.name, why)
            self._close(upload, joint)

    # -- the other ranks ------------------------------------------------------------------------------------------

    def join(
        self,
        run: str,
        attempt: int,
        name: str,
        share: int,
        session: str | None,
        digest: str = "",
        *,
        is_led_here: bool = True,
    ) -> Upload | None:
        """Take a share of a snapshot; ``None`` if its upload is not there yet.

        Args:
            run: the run, as in URLs.
            attempt: that writes.
            name: of the snapshot.
            share: from 1.
            session: live connection of the rank. When it closes, the rank counts as ended. ``None`` for another host.
            digest: must be that of the first rank; ``""`` for whatever it is.
            is_led_here: whether the rank that leases the slot is on this host: when it has left, there will be none.

        Raises:
            SnapshotFailedError: if it is over, given up, overtaken by a later one, or another digest is wanted.
            ServerUnreachableError: if the connection is closed: another one is to be made.
            FencedError: if ``attempt`` no longer holds the run.
        """
        key = self._admit(run, attempt)
        order = _order_of(name)
        with self._changed:
            alive = [upload for upload in self._open.values() if upload.run == key and not upload.ended]
            joints = {upload.joint.shared.name: (upload, upload.joint) for upload in alive if upload.joint is not None}
            if name not in joints:  # one that has begun goes on, whatever was said of a later one
                self._check_awaited(key, name)
            if session is not None:
                self._check_connected(key, name, share, session, is_led_here=is_led_here)
            if name in joints:
                return self._take(*joints[name], share, session, digest)
            for later in joints:
                if _order_of(later) > order:
                    raise SnapshotFailedError(f"{name} was overtaken by {later}", reason=FailureReason.SHARE_MISSING)
        return None

    def not_begun(self, run: str, name: str, share: int, wait_s: float) -> SnapshotFailedError:
        """The error of a rank that has waited in vain: it writes no share of that snapshot, so nobody waits for it."""
        with self._changed:
            key = self._registry.find(run).info.key
            self._without[key, share] = name
            for upload in self._open.values():
                joint = upload.joint
                if joint is not None and upload.run == key and joint.shared.name == name:
                    self._fail_without(joint, share)
            self._wake()
        return SnapshotFailedError(
            f"there is no share of {name} to write: it was not begun within {wait_s:.0f} s",
            reason=FailureReason.SHARE_MISSING,
        )

    def placed(self, upload_id: str, share: int, torn: str = "", fault: ShareFault | None = None) -> None:
        """A rank writes no more: its bytes are in place, or, if ``torn`` says why, never will be.

        To say again that they are in place does nothing: an answer may have been lost.

        Args:
            upload_id: of the upload.
            share: of the rank, or number of the host.
            torn: why, for people.
            fault: what rank 0 has to know of that.

        Raises:
            SnapshotNotFoundError: if that share is not being written.
        """
        with self._changed:
            upload = self._open.get(upload_id)
            joint = upload.joint if upload is not None else None
            if joint is not None and share in joint.placed and not torn:
                return
            if upload is None or joint is None or share not in joint.writing:
                raise SnapshotNotFoundError(f"share {share} of upload {upload_id!r} is not being written (any more)")
            joint.writing.discard(share)
            if torn:
                if not joint.failed:
                    joint.failed, joint.fault = torn, fault
            else:
                joint.placed.add(share)
            self._let_go(upload, joint)
            self._wake()

    def end_session(self, session: str) -> None:
        """A rank has ended: what it was writing is torn."""
        with self._changed:
            for upload in list(self._open.values()):
                joint = upload.joint
                gone = [share for share, owner in joint.joined.items() if owner == session] if joint is not None else []
                for share in gone:
                    if joint is not None and share in joint.writing:
                        joint.writing.discard(share)
                        joint.failed = joint.failed or f"rank {share} ended before its bytes were in place"
                        self._let_go(upload, joint)
            self._wake()

    def close(self) -> None:
        """The server is shutting down: nobody waits any more."""
        with self._changed:
            for upload in self._open.values():
                if upload.joint is not None:
                    upload.joint.failed = upload.joint.failed or "this server is shutting down"
            self._wake()

    def forget(self, key: str) -> None:
        """Keep nothing of a run."""
        with self._changed:
            self._over.pop(key, None)
            self._declined.pop(key, None)
            self._layouts.forget(key)
            for known in (self._sessions, self._without):
                for item in [item for item in known if item[0] == key]:
                    del known[item]

    # -- inside, under the lock -----------------------------------------------------------------------------------

    def _admit(self, run: str, attempt: int) -> str:
        known = self._registry.find(run)
        check_fence(known.info.name, attempt, self._registry.highest(known.info.key))
        return known.info.key

    def _why_over(self, key: str, name: str) -> str:
        """Why a snapshot will never be begun (any more); ``""`` if it may be."""
        over, why = self._over.get(key, _NEVER)
        if _order_of(name) <= over:
            return why or "it is over"
        return self._declined.get(key, {}).get(name, "")

    def _note_declined(self, key: str, name: str, why: str) -> None:
        declined = self._declined.setdefault(key, {})
        declined[name] = why or "it was declined"
        while len(declined) > _MOST_DECLINED:
            del declined[next(iter(declined))]
        self._wake()

    def _check_awaited(self, key: str, name: str) -> None:
        """Raise if a snapshot will never be begun (any more)."""
        if why := self._why_over(key, name):
            raise SnapshotFailedError(
                f"there is no share of {name} to write: {why}", reason=FailureReason.SHARE_MISSING
            )

    def _check_connected(self, key: str, name: str, share: int, session: str, *, is_led_here: bool) -> None:
        """Raise if a rank of this host, or the one that it waits for, has ended."""
        self._sessions[key, share] = session  # also one that has closed: nobody waits long for a rank without one
        if session not in self._registry.sessions:
            raise ServerUnreachableError(f"the connection of who asks for a share of {name} has closed")
        info = self._registry.info(key)
        if is_led_here and (info is None or info.session not in self._registry.sessions):
            raise SnapshotFailedError(
                f"there is no share of {name} to write: the rank that leases its slot has ended",
                reason=FailureReason.SHARE_MISSING,
            )

    def _take(self, upload: Upload, joint: Joint, share: int, session: str | None, digest: str) -> Upload:
        name = joint.shared.name
        if joint.shared.by_hosts != (session is None):
            raise SettingsError(f"{name} is filled by {'hosts' if joint.shared.by_hosts else 'ranks of one host'}")
        if joint.failed:
            raise SnapshotFailedError(f"{name} is not committed: {joint.failed}", reason=FailureReason.SHARE_MISSING)
        if not 1 <= share < joint.shared.shares:
            raise SettingsError(f"{name} has {joint.shared.shares} shares; {share} is none of the other ranks'")
        if joint.joined.get(share, session or "") != (session or ""):
            raise SettingsError(f"share {share} of {name} is another rank's")
        if digest and digest != joint.shared.digest:
            joint.failed = f"rank {share} has another layout than rank 0"
            self._wake()
            raise SnapshotFailedError(f"{name} is not committed: {joint.failed}", reason=FailureReason.SHARE_MISSING)
        if share not in joint.joined:
            joint.joined[share] = session or ""
            joint.writing.add(share)
        return upload

    def _look(self, key: str, joint: Joint) -> None:
        """Whether a rank has ended before it asked for its share."""
        for share in joint.missing:
            session = self._sessions.get((key, share))
            if share not in joint.joined and session is not None and session not in self._registry.sessions:
                joint.failed = joint.failed or f"rank {share} ended before its bytes were in place"

    def _fail_without(self, joint: Joint, share: int) -> None:
        """A rank did not wait for the slot long enough."""
        joint.failed = joint.failed or f"rank {share} has waited for its slot in vain"

    def _end(self, key: str, name: str, why: str) -> None:
        order = _order_of(name)
        if order > self._over.get(key, _NEVER)[0]:
            self._over[key] = (order, why)
        self._wake()

    def _let_go(self, upload: Upload, joint: Joint) -> None:
        """A rank writes no more into a slot; the last one of an upload that was given up frees it."""
        self._close(upload, joint)
        self._free(upload)

    def _close(self, upload: Upload, joint: Joint) -> None:
        if upload.ended and (upload.is_gathered or not joint.writing):
            self._open.pop(upload.id, None)

    def _wake(self) -> None:
        self._changed.notify_all()
        self._notify()


def _order_of(name: str) -> Order:
    if (order := snapshot_order(name)) is None:
        raise SettingsError(f"{name!r} names no snapshot")
    return order
