"""AutoResume: restores the newest good snapshot of a run from any tier when ``fit`` begins."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_spot.callbacks import earlier
from lightning_spot.callbacks.fit import Fit, is_kept, on_rank_zero, takes_part
from lightning_spot.callbacks.part import Part
from lightning_spot.callbacks.remote_snapshot import snapshots_of
from lightning_spot.errors import CorruptSnapshot, ModelChanged, SettingsError
from lightning_spot.exact import namespaces, private
from lightning_spot.exact.fit_state import FitState
from lightning_spot.exact.position import REWINDS, Rewind
from lightning_spot.exact.resumable import check_resumable, put_in_own_objects
from lightning_spot.exact.unpickling import read_checkpoint
from lightning_spot.run.choice import open_newest
from lightning_spot.run.location import Location
from lightning_spot.run.reading import OpenSnapshot
from lightning_spot.run.survey import look_again

if TYPE_CHECKING:
    import lightning.pytorch as pl

_MOST_KEYS_NAMED = 5


@dataclass(frozen=True, slots=True)
class ResumedFrom:
    """The snapshot a run was resumed from.

    Attributes:
        name: of the snapshot.
        step: its ``global_step``.
        epoch: its ``current_epoch``.
        attempt: that took it.
        tier: ``"memory"``, ``"durable"`` or the URL of a memory node.
        url: where exactly.
        complete: whether the run had reached its end.
    """

    name: str
    step: int
    epoch: int
    attempt: int
    tier: str
    url: str
    complete: bool


class AutoResume(Part):
    """Restores the newest snapshot whose checksums hold, from whichever tier has it.

    Nothing is restored when the user passes ``ckpt_path`` to ``fit``: that always wins. When every tier has answered
    and none has a snapshot, training starts afresh, which is said once. When the durable tier cannot be read, or there
    are snapshots and none can be used, ``fit`` raises: a resume that could not read is no fresh start.

    Args:
        dirpath: durable directory or fsspec URL of the run.
        memory: ``"auto"`` for this host's node, ``None`` for the durable tier only, or one or several
            ``spot://host:port``.
        run: name of the run; default the last component of ``dirpath``.
        rewind: how a resumed epoch gets to its place in the data: ``"replay"`` loads the batches before it again, which
            is exact even with random augmentation in workers; ``"skip"`` draws their indices only; ``"auto"`` skips
            where the loader has no workers (exact, too) and replays where it has.

    Raises:
        SettingsError: if an argument cannot be used.

    Attributes:
        resumed_from: what was restored in the last ``fit``, or ``None``.

    Example::

        trainer = L.Trainer(callbacks=[AutoResume("s3://bucket/run-1", memory="spot://10.0.0.5:7070")])
    """

    resumes = True

    def __init__(
        self,
        dirpath: str,
        *,
        memory: str | Sequence[str] | None = "auto",
        run: str | None = None,
        rewind: Rewind = "auto",
    ) -> None:
        super().__init__()
        if rewind not in REWINDS:
            raise SettingsError(f"rewind={rewind!r}: it is one of {', '.join(map(repr, REWINDS))}")
        self.rewind: Rewind = rewind
        self.location = self._named = Location.of(dirpath, memory, run)
        self.resumed_from: ResumedFrom | None = None
        self._start_step = 0
        self._others: list[str] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Put the choice where Lightning looks for a checkpoint to resume from.

        ``resume_start`` is the one place all strategies pass through, on every rank, with the process group up.
        """
        if not takes_part(trainer, stage):
            return
        self.resumed_from = None
        fit = Fit.of(trainer)
        FitState.of(trainer).rewind = self.rewind
        FitState.of(trainer).attach()
        self.location = fit.place_of(self._named)
        if self.location != self._named:
            rank_zero_info(
                f"lightning_spot: this process has finished run {self._named.name!r}: this fit is a run of its own, in"
                f" {self.location.url}"
            )
        if not fit.resumes:
            on_rank_zero(trainer, lambda: self._refuse(trainer))
            return
        connector = private.RESUMING_CONNECTOR.of(trainer)
        vars(connector).pop(private.RESUME_START.name, None)  # of a fit that ended before it came to that
        original = private.RESUME_START.of(connector)

        def resume_start(checkpoint_path: Any = None, **options: Any) -> None:
            vars(connector).pop(private.RESUME_START.name, None)  # once
            fit.trusts = options.get("weights_only") is False
            begun_s = time.monotonic()
            original(checkpoint_path, **options)
            if checkpoint_path:
                rank_zero_info(f"lightning_spot: resumed from ckpt_path={str(checkpoint_path)!r}, as asked")
            else:
                self._restore(trainer, fit.trusts)
            if checkpoint_path or self.resumed_from is not None:
                fit.restore_s = time.monotonic() - begun_s
            fit.decided()

        # Its second parameter came with Lightning 2.6 and is passed by name.
        private.RESUME_START.set(connector, resume_start)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say where the run goes on; there is something to train."""
        self._start_step = -1
        resumed = self.resumed_from
        if resumed is not None:
            number = next((f" attempt {part.attempt}" for part in snapshots_of(trainer)), "")
            rank_zero_info(
                f"lightning_spot: run {self.location.name!r}{number} resumes at step {resumed.step} (epoch"
                f" {resumed.epoch}) from {resumed.tier} ({resumed.url}, {resumed.name})"
            )

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let the trainer's loaders and loops go."""
        Fit.of(trainer).clear()
        super().teardown(trainer, pl_module, stage)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Remember it: another training in this process is not to take this one's place without a word."""
        if is_kept(trainer, trainer.state.fn):
            earlier.interrupted(self._named, exception)
        super().on_exception(trainer, pl_module, exception)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say so when the run had ended already: Lightning trains nothing then, without a word."""
        if is_kept(trainer, "fit"):
            earlier.finished(self._named)
        resumed = self.resumed_from
        if resumed is not None and self._start_step >= 0:
            rank_zero_info(
                f"lightning_spot: run {self.location.name!r} is complete (epoch {resumed.epoch}, step {resumed.step}):"
                " nothing was left to train. Raise max_epochs or max_steps to go on, or choose another dirpath for a"
                " new run"
            )
            if self._others:  # such as the next trial of a sweep that was started again
                rank_zero_warn(
                    f"lightning_spot: the model now has the weights of that run, which had other hyperparameters:"
                    f" {_some(self._others)}. Give another training a dirpath of its own"
                )

    def _refuse(self, trainer: pl.Trainer) -> None:
        """No resume is possible here: a run that has snapshots must not begin anew without a word."""
        newest = next(iter(Fit.of(trainer).found(self.location).candidates), None)
        if newest is not None and trainer.ckpt_path is None:
            raise SettingsError(
                f"run {self.location.name!r} has snapshots, and with this version of Lightning none can be resumed from"
                f" (see the warning). Fetch one with `lightning-spot pull {self.location.url}` and name it in"
                " fit(ckpt_path=), install another version of Lightning, or start afresh with resume=False"
            )

    def _restore(self, trainer: pl.Trainer, trusts: bool) -> None:
        self._start_step = 0
        many = trainer.world_size > 1

        def use(snapshot: OpenSnapshot) -> tuple[dict[str, Any], bytes | None]:
            return _load(snapshot, trusts, many)

        def newest() -> tuple[OpenSnapshot, tuple[dict[str, Any], bytes | None]] | None:
            found = Fit.of(trainer).found(self.location)
            try:
                return open_newest(found, use)
            except CorruptSnapshot:
                again = look_again(found)
                if [item[0] for item in again.candidates] == [item[0] for item in found.candidates]:
                    raise
                return open_newest(again, use)  # a write that was under way when the run was claimed took their place

        opened = on_rank_zero(trainer, newest)
        facts = trainer.strategy.broadcast(_facts(opened[0]) if opened is not None else None)
        if facts is None:
            again = any(part.attempt > 1 for part in snapshots_of(trainer))
            rank_zero_info(
                f"lightning_spot: no snapshot of run {self.location.name!r} at any tier"
                f"{', also none of its earlier attempts' if again else ''}; starting afresh"
            )
            return
        checkpoint, data = opened[1] if opened is not None else (None, None)
        if many:
            data = trainer.strategy.broadcast(data)
            if checkpoint is None:
                assert data is not None
                checkpoint = _read(io.BytesIO(data), trusts)
        assert checkpoint is not None
        put_in_own_objects(trainer, checkpoint)
        check_resumable(trainer, checkpoint)
        _check_model(trainer, checkpoint, facts)
        self._others = _other_hyperparameters(trainer.lightning_module, checkpoint)
        home = namespaces.of(trainer, "utilities.migration")
        migrated, _ = private.MIGRATE.of(home)(checkpoint)
        private.LOADED_CHECKPOINT.set(private.RESUMING_CONNECTOR.of(trainer), migrated)
        self.resumed_from = facts
        if (error := earlier.what_interrupted(self._named)) is not None:
            rank_zero_warn(
                f"lightning_spot: a fit of this process in {self._named.url} was ended by {error}, and this one goes on"
                " from its last snapshot. If it is another training, give it a dirpath of its own"
            )


def _load(snapshot: OpenSnapshot, trusts: bool, with_bytes: bool) -> tuple[dict[str, Any], bytes | None]:
    """Read a snapshot, and its bytes for the ranks that have none. What could not be read raises as such."""
    with snapshot.reader() as reader:
        try:
            checkpoint = _read(reader.as_file(), trusts)
            if not with_bytes:
                return checkpoint, None
            reader.seek(0)
            return checkpoint, reader.read()
        except Exception:
            if reader.problem is not None:  # torch may have made something else of it
                raise reader.problem from None
            raise


def _read(file: IO[bytes], trusts: bool) -> dict[str, Any]:
    """Read a checkpoint; unless the user trusts it, nothing in it runs code."""
    checkpoint: dict[str, Any] = (
        torch.load(file, map_location="cpu", weights_only=False) if trusts else read_checkpoint(file)
    )
    return checkpoint


def _facts(snapshot: OpenSnapshot) -> ResumedFrom:
    manifest = snapshot.manifest
    return ResumedFrom(
        name=manifest.name,
        step=manifest.step,
        epoch=manifest.epoch,
        attempt=manifest.attempt,
        tier=snapshot.tier,
        url=snapshot.url,
        complete=manifest.complete,
    )


def _check_model(trainer: pl.Trainer, checkpoint: dict[str, Any], facts: ResumedFrom) -> None:
    """Name what no longer fits before Lightning loads half of it."""
    module = trainer.lightning_module
    if not module.strict_loading or _mends_itself(module):
        return  # the user's own hook may mend the difference
    saved = checkpoint.get("state_dict", {})
    present = trainer.strategy.lightning_module_state_dict()
    missing, unexpected = sorted(set(present) - set(saved)), sorted(set(saved) - set(present))
    reshaped = [
        f"{key} {tuple(saved[key].shape)}→{tuple(value.shape)}"
        for key, value in present.items()
        if key in saved and isinstance(value, torch.Tensor) and getattr(saved[key], "shape", None) != value.shape
    ]
    if missing or unexpected or reshaped:
        parts = [("new in the model", missing), ("gone from the model", unexpected), ("changed shape", reshaped)]
        listed = "; ".join(f"{what}: {_some(keys)}" for what, keys in parts if keys)
        raise ModelChanged(
            f"the model has changed since snapshot {facts.name} ({facts.url}): {listed}. Use the model it was taken"
            " of, set strict_loading=False in the LightningModule to load what fits, or start afresh with resume=False"
            " or another dirpath. The snapshot is left as it is",
            missing=missing,
            unexpected=unexpected,
            reshaped=reshaped,
        )


def _other_hyperparameters(module: pl.LightningModule, checkpoint: dict[str, Any]) -> list[str]:
    """The plain ones that a snapshot has otherwise, as ``name saved→present``."""
    saved, plain = checkpoint.get("hyper_parameters"), (bool, int, float, str)
    if not isinstance(saved, dict):
        return []
    pairs = [(name, saved[name], value) for name, value in module.hparams.items() if name in saved]
    return [
        f"{name} {old!r}→{value!r}"
        for name, old, value in pairs
        if isinstance(old, plain) and isinstance(value, plain) and repr(old) != repr(value)
    ]


def _mends_itself(module: pl.LightningModule) -> bool:
    """Whether a hook of the user's sees the checkpoint before it is loaded."""
    plain = [kind.on_load_checkpoint for kind in namespaces.classes("", "LightningModule")]
    return type(module).on_load_checkpoint not in plain


def _some(keys: list[str]) -> str:
    more = len(keys) - _MOST_KEYS_NAMED
    return ", ".join(keys[:_MOST_KEYS_NAMED]) + (f" and {more} more" if more > 0 else "")
