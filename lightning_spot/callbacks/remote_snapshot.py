"""RemoteSnapshot: asynchronous snapshots to memory, at an interval, and from there to servers and storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from lightning_spot.callbacks.fit_callback import FitCallback, move_to_the_end
from lightning_spot.capture.partitions import CopyMode
from lightning_spot.capture.schedule import PlaceKind
from lightning_spot.config import (
    DEVICE_BUFFER,
    KEEP,
    SERVER_CALL_TIMEOUT_S,
    SERVER_IDLE_TIMEOUT_S,
    UPLOAD_TIMEOUT_S,
    check_choice,
    check_number,
    check_webhook,
    parse_bytes,
    read_environment,
)
from lightning_spot.errors import SettingsError
from lightning_spot.events import OnEvent
from lightning_spot.interval.convergence import ConvergenceAware
from lightning_spot.interval.policy import EverySeconds, IntervalPolicy
from lightning_spot.renamed import refusing_old
from lightning_spot.run.location import Location, RingSettings, check_replicas, memory_limit_bytes
from lightning_spot.session.coordinator import OnError, SnapshotSettings
from lightning_spot.session.preflight import takes_part
from lightning_spot.session.session import FitSession
from lightning_spot.session.snapshotter import Snapshotter
from lightning_spot.snapshot.packing import chosen_compression
from lightning_spot.state.fit_state import FitState
from lightning_spot.store.retention import Keep

if TYPE_CHECKING:
    import lightning.pytorch as pl


class RemoteSnapshot(FitCallback):
    """Takes snapshots beside training: into a ring in memory, from there to snapshot servers and storage.

    What the next forward pass may change is copied before the hook returns; parameters and optimizer state are copied
    while the next forward and backward run, and ``optimizer.step()`` waits for what is left.

    :class:`~lightning_spot.SpotCheckpoint` documents the arguments.

    Raises:
        SettingsError: if an argument cannot be used.

    Attributes:
        snapshotter: takes the snapshots of the last ``fit``; ``None`` before one.
        tells: what is told of events: ``on_event`` and ``webhook``.

    Example::

        trainer = L.Trainer(callbacks=[RemoteSnapshot("s3://bucket/run-1", servers="spot://10.0.0.5:7070")])
    """

    writes = True

    @refusing_old
    def __init__(
        self,
        dirpath: str,
        *,
        servers: str | Sequence[str] | None = None,
        local_server: bool = True,
        replicas: int = 1,
        run_name: str | None = None,
        interval: IntervalPolicy | None = None,
        keep: int | Keep | Mapping[str, Any] = KEEP,
        slots: int | None = None,
        memory_limit: str | float | None = None,
        on_full: Literal["skip", "wait"] = "skip",
        min_upload_interval_s: float | None = None,
        compression: Literal["auto", "always", "off"] = "auto",
        lossy: Literal["topk"] | None = None,
        upload_timeout_s: float = UPLOAD_TIMEOUT_S,
        server_idle_timeout_s: float = SERVER_IDLE_TIMEOUT_S,
        server_call_timeout_s: float = SERVER_CALL_TIMEOUT_S,
        on_error: OnError = "warn",
        on_event: OnEvent | None = None,
        webhook: str | None = None,
        copy_mode: CopyMode = "auto",
        device_buffer: str | float | None = DEVICE_BUFFER,
    ) -> None:
        super().__init__()
        if on_event is not None and not callable(on_event):
            raise SettingsError(f"on_event={on_event!r}: it is a function that takes an Event")
        self.tells = on_event, check_webhook("webhook=", webhook)
        if slots is not None:
            check_number("slots", slots, 2, whole=True)  # one stays whole while the other is filled
        check_choice("on_full", on_full, ("skip", "wait"))
        if min_upload_interval_s is not None:
            check_number("min_upload_interval_s", min_upload_interval_s, 0)
        check_number("upload_timeout_s", upload_timeout_s, 0)
        check_number("server_idle_timeout_s", server_idle_timeout_s, 0)
        check_number("server_call_timeout_s", server_call_timeout_s, 0, above=True)
        check_choice("on_error", on_error, ("warn", "raise"))
        check_choice("copy_mode", copy_mode, get_args(CopyMode))
        self.location = self._named = Location.of(
            dirpath, servers=servers, local_server=local_server, run_name=run_name
        )
        check_replicas(replicas, servers)
        if lossy is not None and not self.location.servers:
            raise SettingsError(
                "lossy= is for what is sent to snapshot servers, and servers= names none: name one, such as"
                " servers='spot://10.0.0.5:7070', or leave lossy out"
            )
        asked = (getattr(interval, name, None) for name in ("due", "taken"))
        if interval is not None and (isinstance(interval, type) or not all(map(callable, asked))):
            raise SettingsError(f"interval={interval!r} is no policy; write EverySeconds(30) or EverySteps(100)")
        if read_environment().drill_dir is not None:
            interval = EverySeconds(1.0)  # a drill is short, and wants something to resume from
        ring = RingSettings(
            slots=int(slots) if slots is not None else 3 + min(int(replicas), len(self.location.servers)),
            beyond=slots is None,
            memory_bytes=memory_limit_bytes(memory_limit),
            server_idle_timeout_s=float(server_idle_timeout_s),
            keep=Keep.of(keep),
            strict=on_error == "raise",
            min_upload_interval_s=float(min_upload_interval_s) if min_upload_interval_s is not None else None,
            compression=chosen_compression(compression, lossy),
            replicas=int(replicas),
            server_call_timeout_s=float(server_call_timeout_s),
            device_buffer_bytes=(
                0 if device_buffer is None else parse_bytes(device_buffer, "device_buffer", none="no buffer")
            ),
        )
        policy = interval if interval is not None else ConvergenceAware()
        self._interval = _told(policy)
        self._settings = SnapshotSettings(
            policy=policy,
            ring=ring,
            on_full=on_full,
            upload_timeout_s=float(upload_timeout_s),
            copy_mode=copy_mode,
        )
        self.snapshotter: Snapshotter | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.location.url!r})"

    def of_a_fit(self) -> dict[str, Any]:
        """See :class:`~lightning_spot.state.namespaces.Copied`."""
        return {"snapshotter": None}

    def in_common(self) -> dict[str, Any]:
        """See :class:`FitCallback`. How much memory there is, and the paths, are a host's.

        The servers that rank 0 names are those that all use, in whatever order. So is its name of the run, but that is
        for people: where it is drawn at each start, such as from the time, ranks may differ in it.
        """
        ring, told = self._settings.ring, self._named
        return {
            "interval": self._interval,
            "servers": ", ".join(sorted(told.servers)) or None,
            "local_server": told.has_local_server,
            "replicas": ring.replicas,
            "keep": ring.keep,
            "on_full": self._settings.on_full,
            "min_upload_interval_s": ring.min_upload_interval_s,
            "compression": ring.compression,
            "on_error": "raise" if ring.strict else "warn",
        }

    @property
    def interval(self) -> IntervalPolicy:
        """The policy that decides when a snapshot is taken."""
        return self._settings.policy

    @property
    def attempt(self) -> int:
        """Number of this attempt of the run, from 1; 0 before it has begun."""
        return self.snapshotter.writing.number if self.snapshotter is not None else 0

    @property
    def blocked_s(self) -> float:
        """Seconds that training has waited for snapshots in this ``fit``."""
        return self.snapshotter.pacing.stall_s if self.snapshotter is not None else 0.0

    @property
    def last_committed_step(self) -> int | None:
        """``global_step`` of the newest snapshot of this attempt that is committed in memory."""
        committed = self.snapshotter.writing.committed if self.snapshotter is not None else None
        return committed.step if committed is not None else None

    @property
    def num_skipped(self) -> int:
        """Snapshots of this ``fit`` that were due and not taken, since every slot was busy."""
        return self.snapshotter.skipped if self.snapshotter is not None else 0

    @property
    def num_dropped(self) -> int:
        """Snapshots of this ``fit`` that were dropped: a tensor changed while it was copied, or a rank has failed."""
        return self.snapshotter.writing.dropped if self.snapshotter is not None else 0

    @property
    def is_passed_over(self) -> bool:
        """Whether training goes on and ``on_train_start`` was not called: another callback has changed the list."""
        return self.snapshotter is not None and not self.snapshotter.has_begun

    # -- Lightning's hooks, in the order in which they are called -------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Open the ring and begin the next attempt of the run (rank 0)."""
        if stage == "fit":
            self.snapshotter = None
        if not takes_part(trainer, stage):
            return
        move_to_the_end(trainer, self)
        fit = FitSession.of(trainer)
        fit.begin()  # first: what one rank refuses, all do
        if len(fit.callbacks(RemoteSnapshot)) > 1:
            raise SettingsError(
                "two callbacks of this Trainer take snapshots. Keep one of them: a configuration file and the command"
                " line may each have added one"
            )
        here = self._named.has_local_server  # AutoResume, which writes nothing, may say otherwise
        self.location = replace(fit.resume.location_of(self._named), has_local_server=here)
        self.snapshotter = fit.snapshotter = Snapshotter(trainer, self.location, self._settings, fit.resume)
        self.snapshotter.open()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start counting, and listen for the places at which a snapshot can be taken."""
        if self.snapshotter is not None:
            self.snapshotter.begin_training()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        """The forward pass of a micro-batch begins: what was held for it is copied."""
        if self.is_passed_over:
            self.on_train_start(trainer, pl_module)
        if self.snapshotter is not None:
            self.snapshotter.writing.schedule.reached(PlaceKind.FORWARD)

    def on_before_backward(self, *_: Any, **__: Any) -> None:
        """The backward pass begins."""
        if self.snapshotter is not None:
            self.snapshotter.writing.schedule.reached(PlaceKind.BACKWARD)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """All gradients of a micro-batch are there."""
        if self.snapshotter is not None:
            self.snapshotter.after_backward()

    def on_before_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Wait for what is not copied yet."""
        if self.snapshotter is not None:
            self.snapshotter.before_step()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any, **__: Any
    ) -> None:
        """Look at the loss."""
        if self.snapshotter is not None:
            self.snapshotter.read(outputs)
            FitState.of(trainer).batch_ended(self.snapshotter)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the state go that was kept for the time of the validation."""
        if self.snapshotter is not None:
            self.snapshotter.validated()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Callbacks may change weights here."""
        if self.snapshotter is not None:
            self.snapshotter.disturbed()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the last snapshot, of the finished run."""
        if self.snapshotter is not None:
            self.snapshotter.end_training()


def _told(policy: IntervalPolicy) -> str:
    """A policy and its numbers, for people; asked before training, in which rank 0 may learn others."""
    told = vars(policy).items() if policy.by_step else ()  # of any other, rank 0 alone decides
    numbers = [f"{name}={value}" for name, value in told if name[0] != "_" and isinstance(value, (int, float))]
    return f"{type(policy).__name__}({', '.join(numbers)})"
