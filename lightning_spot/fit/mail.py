"""The way by which ranks that do not write into rank 0's slot send it what only they know, beside training."""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_spot.capture.attempt import Attempt
from lightning_spot.capture.mailbox import Mailbox, Sender
from lightning_spot.fit.agreement import Agreement
from lightning_spot.fit.ranks import Meeting, allow_ranks

if TYPE_CHECKING:
    import lightning.pytorch as pl

logger = logging.getLogger(__name__)


class Mail:
    """The mail of one ``fit``. Every rank makes one, at the same place.

    Args:
        trainer: that fits.
        attempt: on rank 0, whose writer gets the mailbox.

    Attributes:
        works: whether all ranks reach rank 0.
        sender: of this rank; ``None`` on rank 0.
    """

    def __init__(self, trainer: pl.Trainer, attempt: Attempt | None) -> None:
        agreement, secret, box, problem = Agreement(trainer), secrets.token_hex(32), None, ""
        self.sender: Sender | None = None
        meeting = Meeting.of(trainer)
        if attempt is not None:
            allow_ranks(agreement)
            try:
                box = attempt.writer.mailbox = Mailbox(secret, meeting.listen(), agreement.size)
            except OSError as error:
                logger.debug("no mailbox can be had: %s", error)
        mine = (meeting.listen(), box.port, secret) if box is not None else ("", 0, secret)
        listen, port, secret = agreement.tell(mine)
        if attempt is None:
            try:
                self.sender = Sender(meeting.connect(listen), port, secret, trainer.global_rank)
            except (OSError, RuntimeError) as error:  # also where no thread can be had
                problem = f"rank {trainer.global_rank} does not reach rank 0: {error}"
        problems = [each for each in agreement.gather(problem) if each]
        self.works = not problems
        if problems:
            self.close()
            rank_zero_warn(
                f"lightning_spot: where rank 0 writes a snapshot alone, ranks wait until what only one of them knows is"
                f" gathered. {problems[0]}"
            )

    def close(self) -> None:
        """Send what is left, and no more. Rank 0's writer closes its mailbox."""
        sender, self.sender = self.sender, None
        if sender is not None:
            sender.close()
