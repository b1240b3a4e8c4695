"""The snapshot at a notice: taken if there is something new and time, by all ranks, then brought to safety."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from lightning_spot.exact.dump import Dump
from lightning_spot.exact.seams import Seam
from lightning_spot.fit.agreement import Agreement
from lightning_spot.fit.together import ALONE
from lightning_spot.image.manifest import Manifest
from lightning_spot.interval.deadline import Deadline

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_spot.fit.snapshotter import Snapshotter
    from lightning_spot.fit.writing import Writing


def secure(
    trainer: pl.Trainer, snapshotter: Snapshotter, seam: Seam, deadline: Deadline, cut_short: Callable[[], bool]
) -> str:
    """Bring the training state of all ranks to safety: an urgent snapshot if there is something new and time.

    Args:
        trainer: that fits.
        snapshotter: takes its snapshots.
        seam: where training is.
        deadline: by when all has to be safe.
        cut_short: asked while waiting: whether to give up waiting at once.

    Returns:
        one line on what is safe where, on rank 0; empty on the others.
    """
    writing, ranks, step = snapshotter.writing, Agreement(trainer), trainer.global_step
    attempt = writing.attempt
    # What each rank does by itself is agreed on: where it fails on one, the others would wait in what follows.
    ranks.together(partial(_stand_still, snapshotter))
    taken = ranks.everyones(lambda: _has_taken(writing, step, deadline.left_s / 2))[0]
    differs = taken and any(ranks.everyones(lambda: _differs(writing)))
    # Of a model in shards there is one of a step: what nodes and tiers have of it would get into a second one.
    is_one = writing.in_shards is not None and writing.begun_step == step
    dump = _newest(snapshotter, ranks, seam) if (differs or not taken) and not is_one else None
    if not all(ranks.gather(dump is not None)):
        dump = None
    plan = ranks.on_rank_zero(lambda: attempt.safety.plan(deadline) if attempt is not None else None)
    take = ranks.tell(plan is not None and plan.take)
    again: Callable[[], None] | None = None
    if dump is not None and take:
        ranks.together(writing.warm)  # of a run that was resumed in front of a validation there was no step yet
        former = attempt.writer.committed if attempt is not None else None
        how = writing.together.how_last(attempt)
        # In the place of one that differs, rank 0 takes it alone: the others' shares of that name are over.
        writing.write(dump, urgent=True, wait_s=deadline.wait_s, how=ALONE if differs else how)
        writing.together.copied()
        if writing.in_shards is None and attempt is not None:
            again = partial(writing.store, dump.checkpoint, wait_s=deadline.wait_s, ranks=None)
            # A share was missing, the node was lost, or more was found that differs.
            if not _has_taken(writing, step, deadline.left_s, former):
                attempt.writer.link.wait(deadline.left_s)
                again()
    if attempt is None or plan is None:
        return ""
    return attempt.safety.bring(deadline, plan, cut_short, again)


def _stand_still(snapshotter: Snapshotter) -> None:
    snapshotter.wait_copied()
    if (iterations := snapshotter.writing.iterations) is not None:  # none comes over which to spread it
        iterations.end()


def _newest(snapshotter: Snapshotter, ranks: Agreement, seam: Seam) -> Dump | None:
    """The newest state of this rank, see :meth:`AtHand.newest`; an error of one rank is an error of all."""
    take = partial(snapshotter.at_hand.newest, seam)
    # Where ranks wait for each other within their optimizers' states, the others do not come to what would follow.
    return take() if snapshotter.writing.together.hold_their_own else ranks.together(take)


def _has_taken(writing: Writing, step: int, wait_s: float, former: Manifest | None = None) -> bool:
    """Whether a snapshot of a step is committed. One that was begun may have been skipped, or be dropped yet.

    Args:
        writing: of this rank.
        step: of the snapshot.
        wait_s: how long to wait for one that is on its way, seconds.
        former: the newest one before, in whose place it comes if it is of the same step.
    """
    attempt = writing.attempt
    if attempt is None or writing.begun_step != step:
        return False
    if writing.in_shards is not None:
        return attempt.failure(wait_s) is None
    attempt.writer.settle(wait_s)
    committed = attempt.writer.committed
    return committed is not None and committed.step == step and committed is not former


def _differs(writing: Writing) -> bool:
    """Whether the snapshot that was just taken is not as this rank's state is. It was not meant to be the last."""
    attempt = writing.attempt
    if writing.in_shards is not None:
        return writing.in_shards.newest_differs(attempt)
    writer = attempt.writer if attempt is not None else writing.together.writer
    return writer is not None and writer.newest_differs()
