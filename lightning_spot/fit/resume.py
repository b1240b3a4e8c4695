"""A resume: which snapshot a ``fit`` goes on from, agreed by all ranks, and what is said of it.

Before training, rank 0 asks all tiers, reads the newest snapshot whose checksums hold, and hands it to the others; what
it lacks for this model is an error then. What is put back at which place of the loops is in
:class:`~lightning_spot.exact.restoring.Restoring`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_spot.config import format_names
from lightning_spot.errors import SettingsError
from lightning_spot.exact import namespaces, private, shipped
from lightning_spot.exact.dump import KEY
from lightning_spot.exact.fit_state import FitState
from lightning_spot.exact.per_trainer import OfTrainer
from lightning_spot.exact.resumable import Trial, check_resumable, put_in_own_objects
from lightning_spot.exact.sharded import is_sharded
from lightning_spot.fit import competing, earlier
from lightning_spot.fit.agreement import Agreement
from lightning_spot.fit.alike import check_one_model
from lightning_spot.fit.changes import check_limits, check_model, check_optimizers, other_hyperparameters
from lightning_spot.fit.chosen import ResumedFrom, choose
from lightning_spot.fit.failed_resumes import OnResumeFailure, without_failed
from lightning_spot.fit.fingerprint import Fingerprint
from lightning_spot.fit.left_elsewhere import bring_from_other_hosts
from lightning_spot.fit.named import fetched_once
from lightning_spot.fit.ranks import main_address
from lightning_spot.fit.restore import Hosts
from lightning_spot.fit.selection import LEAVE_OUT, Selection, select
from lightning_spot.fit.shards import load_shards
from lightning_spot.fit.taking_part import parts_of
from lightning_spot.image.manifest import Manifest
from lightning_spot.memory.runs import RunInfo
from lightning_spot.run.choice import doubt
from lightning_spot.run.location import Location
from lightning_spot.run.survey import Survey, hold, look_again, survey

if TYPE_CHECKING:
    import lightning.pytorch as pl


class Resume(OfTrainer):
    """What one ``fit`` goes on from.

    Args:
        trainer: that fits.

    Attributes:
        named: location that the user gave to who resumes the run; ``None`` if nobody does.
        location: where that run is; ``None`` likewise.
        fingerprint: of this training, on rank 0.
        chosen: the snapshot it goes on from; ``None`` before the choice, for a fresh start, or with a ``ckpt_path``.
        attempt: number of the attempt that goes on, 0 while it is not known.
        info: of that attempt; on rank 0.
        run_id: identity of the run; ``""`` while it is not known, or where no snapshots are taken.
        snapshots: what the tiers had of the run when this ``fit`` began, newest first; on rank 0.
        took_s: seconds that finding and reading the snapshot took; 0 for a fresh start.
        lineage: of the training state that was loaded, ``None`` for a fresh start.
        on_failure: what is done where resumes from the newest snapshot have failed.
        interval: what the attempt that took the snapshot had measured, ``None`` without.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__(trainer)
        self.named: Location | None = None
        self.location: Location | None = None
        self.fingerprint: Fingerprint | None = None
        self.chosen: ResumedFrom | None = None
        self.attempt = 0
        self.info: RunInfo | None = None
        self.run_id = ""
        self.snapshots: list[Manifest] = []
        self.took_s = 0.0
        self.lineage: str | None = None
        self.interval: dict[str, Any] | None = None
        self.on_failure: OnResumeFailure = "error"
        self._found: Survey | None = None
        self._selected: dict[Location, Selection] = {}
        self._trusts = False
        self._is_loaded = False
        self._has_trained = False
        self._then: list[Callable[[], None]] = []

    # -- before the choice ----------------------------------------------------------------------------------------

    def is_wanted(self) -> bool:
        """Whether one of the callbacks resumes the run, and this Lightning lets it; from ``setup`` on."""
        is_able = FitState.of(self._trainer).can(private.RESUME)
        return is_able and any(getattr(part, "resumes", False) for part in parts_of(self._trainer))

    def location_of(self, named: Location) -> Location:
        """Where the run of this ``fit`` is, if runs are resumed: ``dirpath`` may have several. Every rank calls it."""
        if named not in self._selected:
            if self.is_wanted():
                bring_from_other_hosts(self._trainer, named)
            selected = self._trainer.strategy.broadcast(
                Agreement(self._trainer).on_rank_zero(lambda: self._select(named))
            )
            assert selected is not None  # rank 0 has found one, or an error was raised
            self._selected[named] = selected
            self._say(named, selected)
        return self._selected[named].location

    def _select(self, named: Location) -> Selection:
        self.fingerprint = Fingerprint.of(self._trainer)
        if not self.is_wanted():
            return Selection(named)
        if self._trainer.ckpt_path is not None:  # no snapshot that is there is chosen
            places = (earlier.numbered(named, number) for number in itertools.count(1))
            return Selection(next(place for place in places if not earlier.is_finished(place)))
        if any(getattr(part, "writes", False) for part in parts_of(self._trainer)):
            named.check()  # before it is asked, again and again, why it does not answer
        return select(named, self.fingerprint, self._has_more, self._look_first)

    def _has_more(self, newest: Manifest | ResumedFrom) -> bool:
        """Whether this ``fit`` would train on from such a snapshot."""
        trainer = self._trainer
        epochs, steps = trainer.max_epochs, trainer.max_steps
        ends_by_epoch = epochs is not None and 0 <= epochs <= newest.epoch
        return not (ends_by_epoch or 0 <= steps <= newest.step)

    def _look_first(self, location: Location) -> Survey:
        found = self._found = survey(location)
        return found

    def let_go(self) -> None:
        """Let go of what the tiers have, and with it of connections to nodes."""
        self._found = None

    def _say(self, named: Location, selected: Selection) -> None:
        if selected.warning:
            rank_zero_warn(f"lightning_spot: {selected.warning}")
        if selected.notice:
            rank_zero_info(f"lightning_spot: {selected.notice}")
        elif selected.location != named and earlier.is_finished(named):
            rank_zero_info(
                f"lightning_spot: this process has finished run {named.name!r}: this fit is a run of its own, in"
                f" {selected.location.url}"
            )

    def look(self, location: Location) -> Survey:
        """Ask all tiers what they hold of the run. On rank 0."""
        if self._found is None or self._found.location != location:
            self._found = survey(location)
        self.snapshots = [manifest for manifest, _ in self._found.candidates]
        return self._found

    def when_decided(self, found: Survey | None, action: Callable[[], None]) -> None:
        """Do what needs to know what is resumed: at once if nothing is left to decide, on every rank.

        No attempt begins, and claims the directory, before it is known that no resume depends on it.

        Args:
            found: what the tiers hold, on rank 0.
            action: what to do.
        """
        in_doubt = self._trainer.strategy.broadcast(found is not None and doubt(found) is not None)
        if in_doubt and self.is_wanted():
            self._then.append(action)
        else:
            action()

    def trial(self) -> Trial:
        """Finds out whether the snapshots of this ``fit`` can be resumed from."""
        return Trial(self._trainer, lambda: self._trusts)

    # -- the choice -----------------------------------------------------------------------------------------------

    def take_over(self, named: Location) -> Location:
        """Put the choice where Lightning looks for a checkpoint to resume from.

        Returns:
            where the run of this ``fit`` is.
        """
        trainer = self._trainer
        self.named = named
        self.location = location = self.location_of(named)
        if not self.is_wanted():
            Agreement(trainer).on_rank_zero(lambda: self._refuse(location))
            return location
        found = self._found
        was_started = trainer.strategy.broadcast(found is not None and max(found.seen_attempts, default=0) > 0)
        competing.let_config_be_saved_again(trainer, was_started=was_started)
        # All strategies pass through resume_start, on every rank, with the process group up.
        connector = private.RESUMING_CONNECTOR.of(trainer)
        vars(connector).pop(private.RESUME_START.name, None)  # of a fit that ended before it came to that
        original = private.RESUME_START.of(connector)

        def resume_start(checkpoint_path: Any = None, **options: Any) -> None:
            vars(connector).pop(private.RESUME_START.name, None)  # once
            self._trusts = options.get("weights_only") is False
            check_one_model(trainer)
            begun_s = time.monotonic()
            who = trainer.strategy.broadcast(competing.who_found_checkpoint(trainer, checkpoint_path))
            if who or not checkpoint_path:
                self._choose(location)
            if who:
                rank_zero_warn(f"lightning_spot: {self._instead_of(checkpoint_path, who)}")
            checkpoint_path = None if self.chosen is not None else checkpoint_path
            loaded = private.LOADED_CHECKPOINT.of(connector)
            with fetched_once(trainer, location, checkpoint_path):
                original(checkpoint_path, **options)
            if self.chosen is not None:
                private.LOADED_CHECKPOINT.set(connector, loaded)
            if checkpoint_path and not who:
                self._say_named(checkpoint_path)
            if checkpoint_path or self.chosen is not None:
                self.took_s = time.monotonic() - begun_s
            while self._then:
                self._then.pop(0)()

        # Its second parameter came with Lightning 2.6 and is passed by name.
        private.RESUME_START.set(connector, resume_start)
        return location

    def _instead_of(self, path: Any, who: str) -> str:
        """What to say of a checkpoint that somebody else had Lightning find."""
        if self.chosen is not None:
            return (
                f"{path}, which Lightning has found for {who}, is not used: this run goes on from its newest snapshot,"
                f" {self.chosen.name}. Remove the file; or pass resume=False to go on from it"
            )
        return (
            f"this run has no snapshot and begins with {path}, which Lightning has found for {who}. Later starts go on"
            " from snapshots. Remove the file to start afresh"
        )

    def _say_named(self, path: Any) -> None:
        """Say that the user's checkpoint is taken; in each start of a program, it takes its progress away."""
        step = private.LOADED_CHECKPOINT.of(private.RESUMING_CONNECTOR.of(self._trainer)).get("global_step")
        newest = self.snapshots[0].step if self.snapshots else -1
        if isinstance(step, int) and step < newest:
            rank_zero_warn(
                f"lightning_spot: ckpt_path={str(path)!r} is taken, as asked, which is of step {step}; this run has a"
                f" snapshot of step {newest}. Leave ckpt_path out to go on from that"
            )
        else:
            rank_zero_info(f"lightning_spot: resumed from ckpt_path={str(path)!r}, as asked")

    def _refuse(self, location: Location) -> None:
        """No resume is possible here: a run that has snapshots must not begin anew without a word."""
        if self._newest_survey(location).candidates and self._trainer.ckpt_path is None:
            raise SettingsError(
                f"run {location.name!r} has snapshots, and with this version of Lightning none can be resumed from"
                f" (see the warning). Fetch one with `lightning-spot pull {location.url}` and name it in"
                " fit(ckpt_path=), install another version of Lightning, or start afresh with resume=False"
            )

    def _newest_survey(self, location: Location) -> Survey:
        """What the tiers hold now; what was found at nodes at this start is kept."""
        if self._found is None or self._found.location != location:
            return survey(location)
        return look_again(self._found) if self._found.durable is not None else self._found

    def _choose(self, location: Location) -> None:
        """Read the newest good snapshot on all ranks, and hand it to Lightning."""
        trainer = self._trainer
        ranks = Agreement(trainer)
        hosts = Hosts(ranks, location, lambda: main_address(trainer))
        try:
            found = choose(
                ranks,
                hosts,
                lambda: without_failed(self._newest_survey(location), self.attempt, self.on_failure),
                trusts=self._trusts,
                load_shards=lambda image, manifest: load_shards(trainer, image, manifest, trusts=self._trusts),
            )
        finally:
            hosts.close()
        if found is None:
            rank_zero_info(
                f"lightning_spot: no snapshot of run {location.name!r} at any tier"
                f"{', also none of its earlier attempts' if self.attempt > 1 else ''}; starting afresh"
            )
            return
        chosen, checkpoint = found
        self.chosen = chosen
        if self._found is not None and self.info is not None:
            hold(self._found, chosen.name, self.info)
        if not chosen.exact:
            rank_zero_warn(f"lightning_spot: {self._inexact(chosen)}")
        ranks.together(lambda: self._hand_over(checkpoint, chosen))
        if self.named is not None and (error := earlier.what_interrupted(self.named)) is not None:
            rank_zero_warn(
                f"lightning_spot: a fit of this process in {self.named.url} was ended by {error}, and this one goes on"
                " from its last snapshot. If it is another training, give it a dirpath of its own"
            )

    def _inexact(self, chosen: ResumedFrom) -> str:
        """What to say of a resume from an approximation; on rank 0."""
        candidates = self._found.candidates if self._found is not None else []
        exact = next((manifest for manifest, _ in candidates if manifest.exact), None)
        other = "no tier has an exact one"
        if exact is not None:
            other = f"the newest exact one is {exact.name}: name its file in fit(ckpt_path=) to go on from that instead"
        return (
            f"{chosen.name}, from which this run goes on, is not exact (compression='topk'): weights and optimizer"
            f" states are approximately those of step {chosen.step}, and the run will end with other bits;"
            f" {other}"
        )

    def _hand_over(self, checkpoint: dict[str, Any], chosen: ResumedFrom) -> None:
        """Have Lightning load the checkpoint, once it is known to fit this model."""
        trainer = self._trainer
        put_in_own_objects(trainer, checkpoint)
        check_resumable(trainer, checkpoint)
        if not is_sharded(trainer):  # whose model has been loaded already
            check_model(trainer, checkpoint, f"{chosen.name} ({chosen.url})")
            check_optimizers(trainer, f"{chosen.name} ({chosen.url})")
        if said := self._what_differs(other_hyperparameters(trainer, checkpoint), chosen):
            rank_zero_warn(f"lightning_spot: {said}")
        home = namespaces.of(trainer, "utilities.migration")
        migrated, _ = private.MIGRATE.of(home)(checkpoint)
        private.LOADED_CHECKPOINT.set(private.RESUMING_CONNECTOR.of(trainer), migrated)

    def _what_differs(self, others: list[str], chosen: ResumedFrom) -> str:
        """What to say of hyperparameters that a snapshot has otherwise; ``""`` where nothing is worth it."""
        selected = self._selected.get(self.named) if self.named is not None else None
        if selected is None or not selected.drawn_anew:
            had = f"the snapshot that this fit goes on from had other hyperparameters: {format_names(others)}"
            had += ". Optimizers and schedulers go on with the settings that they had"
            return f"{had}. {LEAVE_OUT}. If it is of another training, give each a dirpath of its own" if others else ""
        names = f" ({format_names(others)})" if others else ""
        wrong = "the weights are not its own" if self._has_more(chosen) else "nothing of it is trained"
        return (
            f"the run in {selected.location.url} is complete, and this fit differs from it only in ids, seeds, times or"
            f" folders{names}, which are taken to be others at each start. {LEAVE_OUT}. If it is another training,"
            f" {wrong}: give each a dirpath of its own"
        )

    # -- after it -------------------------------------------------------------------------------------------------

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Take from a checkpoint what Lightning does not, also from one that the user named in ``fit(ckpt_path=)``.

        A second call, or that of a tuner which puts its trial back, does nothing.
        """
        if self._is_loaded or shipped.is_of_a_tuner(self._trainer):
            return
        self._is_loaded = True
        shared = checkpoint.get(KEY, {})
        self.lineage, self.interval = shared.get("lineage"), shared.get("interval")
        origin = shared.get("run_id")  # older versions did not say it
        is_another = bool(origin and self.run_id and origin != self.run_id)
        FitState.of(self._trainer).load(checkpoint, of_another_run=is_another)
        if self.chosen is not None:  # hooks may have given the run more, which is put back by now
            check_limits(self._trainer, checkpoint, f"{self.chosen.name} ({self.chosen.url})")

    def say_where(self) -> None:
        """Say where the run goes on; there is something to train."""
        self._has_trained = True
        chosen, location = self.chosen, self.location
        if chosen is not None and location is not None:
            where = chosen.url if chosen.name in chosen.url else f"{chosen.url}, {chosen.name}"
            rank_zero_info(
                f"lightning_spot: run {location.name!r}{f' attempt {self.attempt}' if self.attempt else ''} resumes at"
                f" step {chosen.step} (epoch {chosen.epoch}) from {chosen.tier} ({where})"
            )

    def say_if_complete(self) -> None:
        """Say at the end of ``fit`` that nothing was left to train: Lightning trains nothing then, without a word."""
        chosen, location = self.chosen, self.location
        if chosen is None or location is None or self._has_trained:
            return
        how = "is complete" if chosen.complete else "has come as far as this fit goes"
        rank_zero_info(
            f"lightning_spot: run {location.name!r} {how} (epoch {chosen.epoch}, step {chosen.step}):"
            " nothing was left to train. Raise max_epochs or max_steps to go on, or choose another dirpath for a"
            " new run"
        )
