"""A resume: which snapshot a ``fit`` goes on from, agreed by all ranks, and what is said of it.

Before training, rank 0 asks all tiers, reads the newest snapshot whose checksums hold, and hands it to the others; what
it lacks for this model is an error then. Others may resume the ``fit``, too, from files of their own, or end its second
start. What is put back at which place of the loops is in
:class:`~lightning_spot.state.fit_state.FitState`.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from lightning_spot import retry
from lightning_spot.capture.tensors import shape_of
from lightning_spot.client.starting import attach
from lightning_spot.config import format_names
from lightning_spot.errors import (
    ModelChangedError,
    SettingsError,
    SpotError,
    TierReason,
)
from lightning_spot.patches import Patches
from lightning_spot.run.choice import doubt
from lightning_spot.run.location import Location
from lightning_spot.run.survey import Survey, look_again, survey
from lightning_spot.say import say
from lightning_spot.session import run_lookup
from lightning_spot.session.collectives import Agreement
from lightning_spot.session.preflight import check_one_model, parts_of
from lightning_spot.session.selection import OnResumeFailure, ResumedFrom, choose, load_snapshot, without_failed
from lightning_spot.session.topology import place_of
from lightning_spot.sharded.reader import changed
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.state import builtin_callbacks, compat, loops, namespaces
from lightning_spot.state.compare import shown
from lightning_spot.state.dump import KEY
from lightning_spot.state.fit_state import FitState
from lightning_spot.state.loadability import OF_DATA, OF_MODEL, Trial, check_resumable, held, put_in_own_objects
from lightning_spot.state.per_trainer import OfTrainer
from lightning_spot.state.sharded import is_sharded

if TYPE_CHECKING:
    import lightning.pytorch as pl

logger = logging.getLogger(__name__)

_LONGEST_S = 600.0  # that is waited for what an earlier attempt has left elsewhere

_OF_SLURM = re.compile(r"hpc_ckpt_\d+\.ckpt")


class Resume(OfTrainer):
    """What one ``fit`` goes on from.

    Args:
        trainer: that fits.

    Attributes:
        named: location that the user gave; ``None`` if no callback knows one.
        location: where the run of this ``fit`` is, which may be one of several there; ``None`` likewise.
        chosen: the snapshot it goes on from; ``None`` before the choice, for a fresh start, or with a ``ckpt_path``.
        attempt: number of the attempt that goes on, 0 while it is not known.
        run_id: identity of the run; ``""`` while it is not known, or where no snapshots are taken.
        found: what the tiers had of the run when this ``fit`` began, on rank 0; ``None`` before they were asked.
        took_s: seconds that finding and reading the snapshot took; 0 for a fresh start.
        lineage: of the training state that was loaded, ``None`` for a fresh start.
        on_failure: what is done where resumes from the newest snapshot have failed.
        interval: what the attempt that took the snapshot had measured, ``None`` without.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__(trainer)
        self.named: Location | None = None
        self.location: Location | None = None
        self.chosen: ResumedFrom | None = None
        self.attempt = 0
        self.run_id = ""
        self.took_s = 0.0
        self.lineage: str | None = None
        self.interval: dict[str, Any] | None = None
        self.on_failure: OnResumeFailure = "error"
        self.found: Survey | None = None
        self._trusts = False
        self._is_loaded = False
        self._has_trained = False
        self._then: list[Callable[[], None]] = []
        self._patches = Patches()

    # -- before the choice ----------------------------------------------------------------------------------------

    def is_wanted(self) -> bool:
        """Whether one of the callbacks resumes the run, and this Lightning lets it; from ``setup`` on."""
        is_able = FitState.of(self._trainer).can(compat.RESUME)
        return is_able and any(getattr(part, "resumes", False) for part in parts_of(self._trainer))

    def location_of(self, named: Location) -> Location:
        """Where the run of this ``fit`` is: ``dirpath`` may have several. Every rank calls it.

        Raises:
            SettingsError: if callbacks name several.
        """
        if self.location is not None:
            if self.named is not None and replace(named, has_local_server=self.named.has_local_server) != self.named:
                what = f"two runs, {self.named.url} and {named.url}"
                if named.url == self.named.url:
                    what = f"{named.url} with different servers or run_name"
                raise SettingsError(
                    f"callbacks of this Trainer name {what}. A Trainer has one run: give them the same dirpath,"
                    " servers and run_name"
                )
            return self.location
        ranks = Agreement(self._trainer)
        self.named, self.location = named, ranks.tell(run_lookup.next_at(named))
        location = self.location
        if location != named:
            text = "this program has finished a fit at {about}: this fit is a run of its own, in {url}"
            say(logging.INFO, "run-of-its-own", text, about=named.url, only_rank_zero=True, url=location.url)
        if self.is_wanted():
            bring_below(self._trainer, location)
            ranks.on_rank_zero(lambda: self._look_first(location))
        return location

    def _look_first(self, location: Location) -> None:
        if self._trainer.ckpt_path is not None:  # no snapshot that is there is chosen
            return
        if any(getattr(part, "writes", False) for part in parts_of(self._trainer)):
            location.check()  # before it is asked, again and again, why it does not answer
        self.found = survey(location)

    def let_go(self) -> None:
        """Let go of what the tiers have, and with it of connections to servers."""
        self._patches.close()
        self.found = None

    def look(self, location: Location) -> None:
        """Ask all tiers what they hold of the run, unless they were asked. On rank 0."""
        if self.found is None:
            self.found = survey(location)

    @property
    def snapshots(self) -> list[Manifest]:
        """What the tiers had when this ``fit`` began, newest first; on rank 0."""
        return [manifest for manifest, _ in self.found.candidates] if self.found is not None else []

    def when_decided(self, action: Callable[[], None]) -> None:
        """Do what needs to know what is resumed: at once if nothing is left to decide, on every rank.

        No attempt begins, and claims the directory, before it is known that no resume depends on it.

        Args:
            action: what to do.
        """
        in_doubt = self._trainer.strategy.broadcast(self.found is not None and doubt(self.found) is not None)
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
        location = self.location_of(named)
        if not self.is_wanted():
            Agreement(trainer).on_rank_zero(lambda: self._refuse(location))
            return location
        found = self.found
        was_started = trainer.strategy.broadcast(found is not None and max(found.seen_attempts, default=0) > 0)
        let_config_be_saved_again(trainer, was_started=was_started)
        # All strategies pass through resume_start, on every rank, with the process group up.

        def resume_start(original: Callable[..., None], checkpoint_path: Any = None, **options: Any) -> None:
            self._patches.close()  # once
            self._trusts = options.get("weights_only") is False
            check_one_model(trainer)
            begun_s = time.monotonic()
            who = trainer.strategy.broadcast(who_found_checkpoint(trainer, checkpoint_path))
            if who or not checkpoint_path:
                self._choose(location)
            if who:
                self._say_found(checkpoint_path, who)
            checkpoint_path = None if self.chosen is not None else checkpoint_path
            loaded = compat.LOADED_CHECKPOINT.of(trainer)
            original(checkpoint_path, **options)
            if self.chosen is not None:
                compat.LOADED_CHECKPOINT.set(trainer, loaded)
            if checkpoint_path and not who:
                self._say_named(checkpoint_path)
            if checkpoint_path or self.chosen is not None:
                self.took_s = time.monotonic() - begun_s
            while self._then:
                self._then.pop(0)()

        self._patches.close()  # two callbacks may resume the same run
        compat.RESUME_START.wrap(self._patches, trainer, partial(partial, resume_start))
        return location

    def _say_found(self, path: Any, who: str) -> None:
        """Log whether a checkpoint is used that somebody else had Lightning find."""
        text = (
            "this run has no snapshot and begins with {about}, which Lightning found for {who}. Later starts resume"
            " from snapshots. Remove the file to start afresh"
        )
        name = self.chosen.name if self.chosen is not None else ""
        if name:
            text = (
                "{about}, which Lightning found for {who}, is not used. This run resumes from its newest snapshot,"
                " {name}. Remove the file; or pass resume=False to use it"
            )
        say(logging.WARNING, "checkpoint-found", text, about=path, only_rank_zero=True, who=who, name=name)

    def _say_named(self, path: Any) -> None:
        """Say that the user's checkpoint is taken; in each start of a program, it takes its progress away."""
        step = compat.LOADED_CHECKPOINT.of(self._trainer).get("global_step")
        newest = self.snapshots[0].step if self.snapshots else -1
        if isinstance(step, int) and step < newest:
            text = (
                "ckpt_path={about!r} of step {step} is taken, as asked, though this run has a snapshot of step"
                " {newest}. Leave ckpt_path out to resume from that"
            )
            facts: dict[str, Any] = {"step": step, "newest": newest}
            say(logging.WARNING, "older-checkpoint", text, about=str(path), only_rank_zero=True, **facts)
        else:
            text = "resumed from ckpt_path={about!r}, as asked"
            say(logging.INFO, "resumed", text, about=str(path), only_rank_zero=True)

    def _refuse(self, location: Location) -> None:
        """No resume is possible here: a run that has snapshots must not begin anew without a word."""
        if self._newest_survey(location).candidates and self._trainer.ckpt_path is None:
            raise SettingsError(
                f"run {location.name!r} cannot resume with this version of Lightning (see the warning). Install another"
                f" version; or run `lightning-spot cp {location.url} DEST` and pass ckpt_path=; or pass resume=False"
            )

    def _newest_survey(self, location: Location) -> Survey:
        """What the tiers hold now; what was found at servers at this start is kept."""
        if self.found is None:
            return survey(location)
        return look_again(self.found) if self.found.durable is not None else self.found

    def _choose(self, location: Location) -> None:
        """Read the newest good snapshot on all ranks, and hand it to Lightning."""
        trainer = self._trainer
        ranks = Agreement(trainer)

        def look() -> Survey:
            return without_failed(self._newest_survey(location), self.attempt, self.on_failure)

        found = choose(ranks, location, look, partial(load_snapshot, trainer, trusts=self._trusts))
        if found is None:
            text = "no snapshot of run {about!r} at any tier{earlier}; starting afresh"
            earlier = ", also none of its earlier attempts" if self.attempt > 1 else ""
            say(logging.INFO, "started", text, about=location.name, only_rank_zero=True, earlier=earlier)
            return
        chosen, checkpoint = found
        self.chosen = chosen
        if not chosen.exact:
            self._say_inexact(chosen)
        ranks.together(lambda: self._hand_over(checkpoint, chosen))
        if self.named is not None and (error := run_lookup.what_interrupted(self.named)) is not None:
            text = (
                "{error} ended an earlier fit of this process in {about}. This fit resumes from its last snapshot. If"
                " it is another training, give it its own dirpath"
            )
            say(logging.WARNING, "fit-continued", text, about=self.named.url, only_rank_zero=True, error=error)

    def _say_inexact(self, chosen: ResumedFrom) -> None:
        """Log that the run resumes from an approximation."""
        name = next((manifest.name for manifest in self.snapshots if manifest.exact), "")
        text = "this run resumes from {about}, which is not exact (lossy='topk'). It will end with other bits. "
        text += "To be exact, name the file of {exact} in fit(ckpt_path=)" if name else "No tier has an exact one"
        say(logging.WARNING, "resume-inexact", text, about=chosen.name, only_rank_zero=True, exact=name)

    def _hand_over(self, checkpoint: dict[str, Any], chosen: ResumedFrom) -> None:
        """Have Lightning load the checkpoint, once it is known to fit this model."""
        trainer = self._trainer
        put_in_own_objects(trainer, checkpoint)
        check_resumable(trainer, checkpoint)
        if not is_sharded(trainer):  # whose model has been loaded already
            check_model(trainer, checkpoint, f"{chosen.name} ({chosen.url})")
            check_optimizers(trainer, f"{chosen.name} ({chosen.url})", self._patches)
        if others := format_names(other_hyperparameters(trainer, checkpoint)):
            text = (
                "the snapshot had other hyperparameters: {names}. Optimizers and schedulers keep the settings of the"
                " snapshot. If it is another training, give it a dirpath of its own"
            )
            say(logging.WARNING, "hyperparameters-changed", text, about=chosen.url, only_rank_zero=True, names=others)
        home = namespaces.of(trainer, "utilities.migration")
        migrated, _ = compat.MIGRATE.of(home)(checkpoint)
        compat.LOADED_CHECKPOINT.set(trainer, migrated)

    # -- after it -------------------------------------------------------------------------------------------------

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Take from a checkpoint what Lightning does not, also from one that the user named in ``fit(ckpt_path=)``.

        A second call, or that of a tuner which puts its trial back, does nothing.
        """
        if self._is_loaded or builtin_callbacks.is_of_a_tuner(self._trainer):
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
            text = "run {about!r}{attempt} resumes at step {step} (epoch {epoch}) from {tier} ({where})"
            where = chosen.url if chosen.name in chosen.url else f"{chosen.url}, {chosen.name}"
            facts: dict[str, Any] = {"step": chosen.step, "epoch": chosen.epoch, "tier": chosen.tier, "where": where}
            attempt = f" attempt {self.attempt}" if self.attempt else ""
            say(logging.INFO, "resumed", text, about=location.name, only_rank_zero=True, attempt=attempt, **facts)

    def say_if_complete(self) -> None:
        """Say at the end of ``fit`` that nothing was left to train: Lightning trains nothing then, without a word."""
        chosen, location = self.chosen, self.location
        if chosen is None or location is None or self._has_trained:
            return
        text = (
            "run {about!r} {how} (epoch {epoch}, step {step}): nothing was left to train. Raise max_epochs or max_steps"
            " to continue, or choose another dirpath for a new run"
        )
        how = "is complete" if chosen.complete else "has come as far as this fit goes"
        facts: dict[str, Any] = {"how": how, "epoch": chosen.epoch, "step": chosen.step}
        say(logging.INFO, "nothing-to-train", text, about=location.name, only_rank_zero=True, **facts)


# -- what other hosts owe ---------------------------------------------------------------------------------------------


def bring_below(trainer: pl.Trainer, location: Location) -> None:
    """Have other hosts upload what an earlier attempt has left there, before anybody looks for it. Every rank calls it.

    What is not uploaded in time is said.

    Args:
        trainer: whose ranks they are.
        location: of the run.
    """
    ranks = Agreement(trainer)
    if ranks.size == 1:
        return
    places = ranks.gather(place_of(location))
    if len(set(places)) == 1:  # the local server is asked by whoever looks
        return
    leads = places.index(places[ranks.rank]) == ranks.rank
    everyones = ranks.gather(_late(location) if leads else [])
    for rank, late in enumerate(everyones if ranks.rank == 0 else ()):
        for line in late:
            text = (
                "the server on rank {rank}'s host has not uploaded all of an earlier attempt: {about}. The run resumes"
                " from storage. To use that host's snapshot, fix that and restart"
            )
            say(logging.WARNING, "not-uploaded", text, about=line, rank=rank)


def _late(location: Location) -> list[str]:
    """What the local server has not brought below in time, one line each; waited for as long as nothing fails."""
    try:
        host = attach(location.url, location.name)
    except (SpotError, OSError) as error:
        if TierReason.UNREACHABLE.caused(error) or TierReason.PROTOCOL.caused(error):  # there is one, or slots of one
            return [str(error)]
        logger.debug("no server can be had here: %s", error)
        return []
    if host is None:
        return []
    deadline_s, late = time.monotonic() + _LONGEST_S, list[str]()
    try:
        while host.owes():  # what hosts bring together is not: no host has all of it
            late = host.flush(retry.DEFAULT_POLICY.answer_s)
            if not late or time.monotonic() > deadline_s or any(tier.error for tier in host.tiers().values()):
                return late
        return []
    except SpotError as error:
        return [str(error)]
    finally:
        host.disconnect()


# -- what the user has changed since a snapshot was taken -------------------------------------------------------------


def check_model(trainer: pl.Trainer, checkpoint: dict[str, Any], snapshot: str) -> None:
    """Refuse a checkpoint of another model, before Lightning loads half of it.

    Args:
        trainer: whose model it is for.
        checkpoint: as it was saved.
        snapshot: its name and place, for the message.

    Raises:
        ModelChangedError: naming what differs.
    """
    module = trainer.lightning_module
    if not module.strict_loading or namespaces.overrides(module, "on_load_checkpoint"):
        return  # the user's own hook sees the checkpoint before it is loaded, and may mend the difference
    saved = checkpoint.get("state_dict", {})
    present = trainer.strategy.lightning_module_state_dict()
    missing, unexpected = sorted(set(present) - set(saved)), sorted(set(saved) - set(present))
    reshaped = {
        key: f"{key} {tuple(shape_of(saved[key]))}→{tuple(shape_of(value))}"
        for key, value in present.items()
        if isinstance(saved.get(key), torch.Tensor)
        and isinstance(value, torch.Tensor)
        and not is_lazy(value)  # it takes the shape that comes
        and shape_of(saved[key]) != shape_of(value)
    }
    if missing or unexpected or not all(_loads_by_itself(module, key) for key in reshaped):
        way = "set strict_loading=False in the LightningModule to load what fits, "
        raise changed(snapshot, missing=missing, unexpected=unexpected, reshaped=[*reshaped.values()], way=way)


def _loads_by_itself(module: torch.nn.Module, key: str) -> bool:
    """Whether the module that has a tensor loads it in a way of its own, and so may take the shape that comes.

    Those of torch that learn a quantisation do: what is for each channel shows in training.
    """
    owner = dict(module.named_modules()).get(key.rpartition(".")[0])
    if owner is None:
        return False
    has_hooks = bool(getattr(owner, "_load_state_dict_pre_hooks", ()))
    overridden = "_load_from_state_dict"  # where torch should have it no more, nobody overrides it
    return has_hooks or getattr(type(owner), overridden, None) is not getattr(torch.nn.Module, overridden, None)


def check_optimizers(trainer: pl.Trainer, snapshot: str, patches: Patches) -> None:
    """Have an error name both, if the optimizers of a checkpoint are not those of the program.

    Torch's own error names neither. They are compared only once torch refuses to load them: until then hooks may change
    the checkpoint, and those of an optimizer its state.

    Args:
        trainer: that resumes.
        snapshot: its name and place, for the message.
        patches: take that back, as far as nothing was loaded.
    """

    def load_optimizer_state_dict(load: Callable[[Any], None], checkpoint: Mapping[str, Any]) -> None:
        FitState.of(trainer).fixed_steps.note(trainer)
        saved, present = checkpoint["optimizer_states"], [vars(optimizer) for optimizer in trainer.optimizers]
        before, now, cause = _groups(saved), _groups(present), None
        if len(saved) == len(present):  # else Lightning leaves some out
            try:
                load(checkpoint)
                return
            except ValueError as error:
                if before == now:
                    raise
                cause = error
        raise ModelChangedError(
            f"snapshot {snapshot} has {before}, and configure_optimizers makes {now}. Make those of the snapshot there,"
            " also where training replaces or extends them; or start afresh with resume=False",
            missing=[],
            unexpected=[],
            reshaped=[],
        ) from cause

    patches.once(trainer.strategy, "load_optimizer_state_dict", load_optimizer_state_dict)


def _groups(optimizers: Sequence[Mapping[str, Any]]) -> str:
    """The sizes of the groups of parameters of each optimizer."""
    sizes = ([str(len(group["params"])) for group in each.get("param_groups", ())] for each in optimizers)
    return f"optimizers with groups of {'; '.join(map(', '.join, sizes))} parameters"


def check_limits(trainer: pl.Trainer, checkpoint: dict[str, Any], snapshot: str) -> None:
    """Refuse a checkpoint from beyond where the training is to end.

    Args:
        trainer: that resumes.
        checkpoint: that it goes on from.
        snapshot: its name and place, for the message.

    Raises:
        SettingsError: naming the limit.
    """
    epochs, steps = trainer.max_epochs, trainer.max_steps
    begun = checkpoint["epoch"] + loops.is_in_epoch(checkpoint) - builtin_callbacks.further_epochs(trainer)
    is_beyond = epochs is not None and 0 <= epochs < begun
    if not is_beyond and not 0 <= steps < checkpoint["global_step"]:
        return
    limit = f"max_epochs={epochs}" if is_beyond else f"max_steps={steps}"
    raise SettingsError(
        f"snapshot {snapshot} of epoch {checkpoint['epoch']}, step {checkpoint['global_step']} is beyond {limit}. Raise"
        f" {limit.partition('=')[0]}, name an earlier checkpoint in fit(ckpt_path=), or give this training its own"
        " dirpath"
    )


def other_hyperparameters(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> list[str]:
    """Plain ones of the model and the data module that a snapshot has otherwise, or not: ``name saved→present``."""
    found: list[str] = []
    for key, owner in ((OF_MODEL, trainer.lightning_module), (OF_DATA, trainer.datamodule)):  # type: ignore[attr-defined] # it has one
        saved = checkpoint.get(key, {})  # what stands for an object that is not loaded has no truth value
        if owner is not None and isinstance(saved, Mapping) and isinstance(owner.hparams, Mapping):
            found += _changed(saved, owner.hparams)
    return found


def _changed(saved: Mapping[str, Any], present: Mapping[str, Any]) -> Iterator[str]:
    before, now = _plain_ones(saved), _plain_ones(present)
    for name, value in now.items():
        if name not in saved:
            yield f"{name} {shown(value)} (new)"
        elif name in before and repr(before[name]) != repr(value):
            yield f"{name} {shown(before[name])}→{shown(value)}"
    for name, value in before.items():
        if name not in present:
            yield f"{name} {shown(value)} (gone)"


def _plain_ones(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in held(values) if isinstance(value, (bool, int, float, str))}


# -- others at the start ----------------------------------------------------------------------------------------------


def who_found_checkpoint(trainer: pl.Trainer, path: Any) -> str:
    """Who had Lightning go on from a checkpoint where ``fit`` was given none; ``""`` if the user named it.

    One that is passed to ``fit`` is taken for one of these, too, if it is the very file that they would take.

    Args:
        trainer: that is about to load it.
        path: of it; ``None`` if there is none.
    """
    if path is None or trainer.ckpt_path is not None:  # which only the user has set by now
        return ""
    folder, name = os.path.split(str(path))
    if _OF_SLURM.fullmatch(name) and folder == str(trainer.default_root_dir).rstrip("/") and _is_slurm_job():
        return "SLURM's requeue"
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined] # Lightning's Trainer has it
    on_exception = [each for each in callbacks if isinstance(each, _kinds("OnExceptionCheckpoint"))]
    if any(str(each.ckpt_path) == str(path) for each in on_exception):
        return "OnExceptionCheckpoint"
    for each in callbacks if on_exception else ():  # they have Lightning look for any last file
        if isinstance(each, _kinds("ModelCheckpoint")) and name.startswith(each.CHECKPOINT_NAME_LAST):
            return "OnExceptionCheckpoint"
    return ""


def _kinds(name: str) -> tuple[Any, ...]:
    return namespaces.classes("callbacks", name)


def _is_slurm_job() -> bool:
    kinds = namespaces.classes("fabric.plugins.environments", "SLURMEnvironment")
    return any(kind.detect() for kind in kinds)


def let_config_be_saved_again(trainer: pl.Trainer, *, was_started: bool) -> None:
    """Keep LightningCLI from ending a later start of the run, since the first one has saved its configuration.

    Args:
        trainer: that fits. Every rank calls it, in ``setup``.
        was_started: whether this run was started before.
    """
    for callback in _unsaved_configs(trainer):
        if not callback.already_saved:  # its setup comes after ours, also in the starts to come
            callback.overwrite = was_started
            if was_started:
                text = "this start continues its run: {about} of an earlier start may be overwritten"
                say(logging.INFO, "config-overwritten", text, about=callback.config_filename, only_rank_zero=True)
        elif trainer.logger is None or isinstance(trainer.logger.version, str):  # the same folder each time
            text = (
                "the next start of this command will fail, because {about} is in {folder} by then. Pass"
                " save_config_kwargs={{'overwrite': True}} to LightningCLI"
            )
            file, folder = callback.config_filename, trainer.log_dir
            say(logging.WARNING, "config-in-the-way", text, about=file, only_rank_zero=True, folder=folder)


def _unsaved_configs(trainer: pl.Trainer) -> Iterator[Any]:
    for callback in trainer.callbacks:  # type: ignore[attr-defined] # Lightning's Trainer has it
        names = {kind.__name__ for kind in type(callback).__mro__}  # to import it would cost each start time
        if "SaveConfigCallback" in names and callback.save_to_log_dir and not callback.overwrite:
            yield callback
