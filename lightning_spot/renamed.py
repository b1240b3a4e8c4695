"""Old names of settings, flags and commands: who writes one is told what to write now. To be deleted with 1.0."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import ParamSpec

from lightning_spot.errors import SettingsError

P = ParamSpec("P")

NEW = {
    # Arguments, and the values that some of them had.
    "memory=": 'servers="spot://HOST:PORT" for snapshot servers elsewhere; local_server=False for none on this host',
    "run=": "run_name=",
    "rewind=": 'data_resume="auto", "replay" or "seek"',
    "durable_every_s=": "min_upload_interval_s=",
    "flush_timeout_s=": "upload_timeout_s=",
    "idle_timeout_s=": "server_idle_timeout_s=",
    "max_stall_s=": "server_call_timeout_s=",
    "grace_s=": "grace_period_s=",
    "strict=": 'on_error="raise", or "warn"',
    "partitions=": 'copy_mode="auto", "eager", "asymmetric", "backward" or "blocking", which was "still"',
    "copy_mode='still'": 'copy_mode="blocking"',
    "compression='delta'": 'compression="always"',
    "compression=None": 'compression="off"',
    "compression='topk'": 'lossy="topk"',
    "data_resume='skip'": 'data_resume="seek"',
    "ts=": "snapshot_cost_s=",
    "theta_1=": "slope=",
    "theta_2=": "offset=",
    "ft_lambda=": "failure_rate_per_s=",
    "LIGHTNING_SPOT_GRACE_S": "LIGHTNING_SPOT_GRACE_PERIOD_S",
    # Commands and their flags.
    "node": "lightning-spot serve",
    "pull": "lightning-spot cp RUN[@STEP] DEST",
    "--memory": "--server spot://HOST:PORT; of lightning-spot serve, --memory-limit SIZE",
    "--to": "lightning-spot cp RUN[@STEP] DEST",
    "--flush-to": "--storage URL",
    "--allow": "--allow-storage PREFIX",
    "--run-memory": "--run-memory-limit SIZE",
    "--nodes": "--hosts N",
    "--state": "--snapshot-size SIZE",
    "--stall": "--blocked TIME",
    "--durable-speed": "--storage-speed SIZE/s",
    "--memory-node-speed": "--server-speed SIZE/s",
    "--memory-node-price": "--server-price PRICE",
    "--memory-node-lifetime": "--server-lifetime TIME",
    "--json": "-o json",
}


def refuse_old(*written: str) -> None:
    """Refuse what has another name now.

    Raises:
        SettingsError: naming that.
    """
    for old in written:
        if old in NEW:
            raise SettingsError(f"{old} has another name now: {NEW[old]}")


def refuse_old_words(words: Sequence[str]) -> None:
    """The same of a command line; what follows ``drill``, ``run`` or ``--`` is another program's."""
    ours = words[: [*words, "--"].index("--")]
    flags = (word.partition("=")[0] for word in ours if word.startswith("--") and ours[0] not in ("drill", "run"))
    refuse_old(*ours[:1], *flags)


def refusing_old(init: Callable[P, None]) -> Callable[P, None]:
    """Have a class refuse the old names of its arguments; its signature stays what it is."""
    known = inspect.signature(init).parameters

    @functools.wraps(init)
    def checked(*arguments: P.args, **named: P.kwargs) -> None:
        refuse_old(*(f"{name}=" for name in named if name not in known))
        init(*arguments, **named)

    return checked
