"""Every private name of Lightning, torch and torchmetrics that this package uses, and what depends on it.

They may be gone, or be something else, in another version. So each belongs to a part of the work, and is probed once,
at ``setup``: a part that misses one is off, which is said once, and training goes on without it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_spot.patches import Patches
from lightning_spot.say import say
from lightning_spot.state import namespaces

if TYPE_CHECKING:
    import lightning.pytorch as pl

T = TypeVar("T")

RESUME = "the resume"
SNAPSHOTS = "Lightning's checkpoint for a snapshot"
BOUNDARIES = "the ends of batches"
PROGRESS = "the loops' progress"
LOGGED = "logged values"
METRICS = "metric states"
LOADERS = "the position in the data"
REQUESTS = "requests for loaders"
WORKERS = "workers that persist"
HOOKED = "what hooks changed"
LOGGERS = "loggers"
SIGNALS = "Lightning's signal handlers"
STORE = "the ranks' store"
ENVIRONMENT = "the job's scheduler"
BUCKETS = "DDP's buckets"
SHARING = "DDP's sharing of buffers"
TUNERS = "the tuners"
TOGGLES = "toggled optimizers"
UNSYNCED = "gradients that FSDP2 has not added up"
SHARED_RANDOM = "random numbers of DTensors on GPUs"

WITHOUT = {
    RESUME: "no run is resumed by itself; name a snapshot in fit(ckpt_path=)",
    SNAPSHOTS: "snapshots are taken in the way of Trainer.save_checkpoint",
    BOUNDARIES: "snapshots are taken before what follows a batch: a resume from them is not exact",
    SIGNALS: "with several ranks, a signal to one of them may hang the others",
    STORE: "the ranks agree on no place to stop: after a notice, the run resumes from its last snapshot",
    ENVIRONMENT: "SLURM is not asked to queue a job again after a notice",
}
"""What is lost with a part, where it is more than that a resume is not exact."""

RESULT_MODULE = "trainer.connectors.logger_connector.result"
"""Where Lightning keeps what is logged in an epoch."""

ALL: list[Name] = []


@dataclass(frozen=True, slots=True)
class Name:
    """One private name.

    Attributes:
        part: that cannot do without it.
        name: of the attribute; one of an attribute's attribute is ``"attribute.name"``.
        sample: finds an object that has it, by a trainer at ``setup``; ``None`` if there is none in use.
        kind: what the value is there.
    """

    part: str
    name: str
    sample: Callable[[pl.Trainer], Any]
    kind: Any = object
    _get: Callable[[Any], Any] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_get", attrgetter(self.name))  # made once: some are asked of every module
        ALL.append(self)

    def of(self, owner: Any) -> Any:
        """The value in ``owner``.

        Raises:
            AttributeError: if it has none.
        """
        return self._get(owner)

    def set(self, owner: Any, value: Any) -> None:
        """Set it in ``owner``."""
        setattr(*self._place(owner), value)

    def wrap(self, patches: Patches, owner: Any, make: Callable[[Any], Any]) -> None:
        """Replace it in ``owner`` by what ``make`` returns of it, see :meth:`Patches.wrap`."""
        self.of(owner)
        patches.wrap(*self._place(owner), make)

    def _place(self, owner: Any) -> tuple[Any, str]:
        within, _, name = self.name.rpartition(".")
        return attrgetter(within)(owner) if within else owner, name

    def problem(self, trainer: pl.Trainer) -> str | None:
        """What is wrong with it; ``None`` if nothing is, or nothing that has it is in use."""
        try:
            owner = self.sample(trainer)
            value = self.of(owner) if owner is not None else None
        except Exception as error:  # whatever a Lightning of other days makes of it
            return f"{type(error).__name__}: {error}"
        is_right = owner is None or isinstance(value, self.kind)
        return None if is_right else f"{type(owner).__name__}.{self.name} is of type {type(value).__name__} here"


def problems(trainer: pl.Trainer) -> dict[str, str]:
    """Parts that cannot do their work with this Lightning and torch, each with the reason. At ``setup``."""
    found: dict[str, str] = {}
    for name in ALL:
        if name.part not in found and (problem := name.problem(trainer)) is not None:
            found[name.part] = problem
    return found


class Switches:
    """Which parts of this module do their work in one ``fit``; all, until one fails."""

    def __init__(self) -> None:
        self._off: set[str] = set()

    def probe(self, trainer: pl.Trainer) -> None:
        """Turn off what misses a name, or finds something else by it."""
        for part, reason in problems(trainer).items():
            self._turn_off(part, reason)

    def is_on(self, part: str) -> bool:
        """Whether a part can do its work."""
        return part not in self._off

    def run(self, part: str, do: Callable[[], T], errors: tuple[type[Exception], ...] = (Exception,)) -> T | None:
        """Do something of a part; ``None`` if that is off, or fails now. Training goes on without it.

        Args:
            part: of this module.
            do: what.
            errors: that may be the part's; others are raised: they come from what it calls.

        Raises:
            MemoryError: the part works, and this time there is not enough memory for it.
        """
        if part in self._off:
            return None
        try:
            return do()
        except (MemoryError, torch.cuda.OutOfMemoryError):
            raise  # there may be enough the next time; what is missing here would be missing in every later snapshot
        except errors as error:
            self._turn_off(part, f"{type(error).__name__}: {error}")
            return None

    def _turn_off(self, part: str, reason: str) -> None:
        self._off.add(part)
        without = WITHOUT.get(part, "a resume is not exact there")
        text = "{about} is off: {without} ({reason}). Report it with the versions of Lightning and torch."
        say(logging.WARNING, "part-off", text, about=part, only_rank_zero=True, without=without, reason=reason)


_fit_loop = attrgetter("fit_loop")
_epoch_loop = attrgetter("fit_loop.epoch_loop")
_val_loop = attrgetter("fit_loop.epoch_loop.val_loop")
_module = attrgetter("lightning_module")


def _trainer(trainer: pl.Trainer) -> Any:
    return trainer


def _first(home: str, *names: str) -> Callable[[pl.Trainer], Any]:
    """The first of the trainer's callbacks, or loggers, that is of one of these kinds."""

    def find(trainer: pl.Trainer) -> Any:
        kinds = namespaces.classes(home, *names)
        return next((item for item in getattr(trainer, home) if isinstance(item, kinds)), None)

    return find


def _ddp(trainer: pl.Trainer) -> Any:
    """DDP is there from ``on_train_start`` on only: it is looked for in a model that has it already."""
    return trainer.model if hasattr(trainer.model, "reducer") else None


def _metric(_: pl.Trainer) -> Any:
    return MeanMetric()


def _of_results(trainer: pl.Trainer) -> Any:
    return namespaces.of(trainer, RESULT_MODULE)


# -- the trainer and its connectors -----------------------------------------------------------------------------------

DUMP_CHECKPOINT = Name(SNAPSHOTS, "_checkpoint_connector.dump_checkpoint", _trainer, Callable)
RESUME_START = Name(RESUME, "_checkpoint_connector.resume_start", _trainer, Callable)
LOADED_CHECKPOINT = Name(RESUME, "_checkpoint_connector._loaded_checkpoint", _trainer, dict)
MIGRATE = Name(RESUME, "migrate_checkpoint", lambda t: namespaces.of(t, "utilities.migration"), Callable)
REGISTER_HANDLERS = Name(SIGNALS, "_signal_connector.register_signal_handlers", _trainer, Callable)
RESTORE_HANDLERS = Name(SIGNALS, "_signal_connector.teardown", _trainer, Callable)
DEFAULT_STORE = Name(STORE, "_get_default_store", lambda _: distributed_c10d, Callable)
CLONE_STORE = Name(
    STORE, "clone", lambda t: DEFAULT_STORE.of(distributed_c10d)() if t.world_size > 1 else Store, Callable
)
CLUSTER_ENVIRONMENT = Name(ENVIRONMENT, "_accelerator_connector.cluster_environment", _trainer)

# -- the loops --------------------------------------------------------------------------------------------------------

ADVANCE_END = Name(BOUNDARIES, "on_advance_end", _epoch_loop, Callable)
SHOULD_VALIDATE = Name(BOUNDARIES, "_should_check_val_fx", _epoch_loop, Callable)
SKIP_NEXT_VAL = Name(BOUNDARIES, "_skip_next_val", _epoch_loop, bool)
RESTARTING = Name(PROGRESS, "_restarting", _fit_loop, bool)
ADVANCE = Name(PROGRESS, "advance", _fit_loop, Callable)
ADVANCE_IN_EPOCH = Name(PROGRESS, "advance", _epoch_loop, Callable)
HAS_VALIDATED = Name(PROGRESS, "_has_run", _val_loop, bool)
SHOULD_ACCUMULATE = Name(PROGRESS, "_should_accumulate", _epoch_loop, Callable)
NO_MORE_BATCHES = Name(LOADERS, "_num_ready_batches_reached", _epoch_loop, Callable)
BATCH_PROGRESS = Name(PROGRESS, "batch_progress", _epoch_loop)
VAL_BATCH_PROGRESS = Name(PROGRESS, "batch_progress", _val_loop)
BATCHES_THAT_STEPPED = Name(LOGGERS, "_batches_that_stepped", _epoch_loop, int)

# -- loaders ----------------------------------------------------------------------------------------------------------

PROCESS_DATALOADER = Name(LOADERS, "process_dataloader", attrgetter("strategy"), Callable)
COMBINED_LOADER = Name(LOADERS, "_combined_loader", _fit_loop)
VAL_COMBINED_LOADER = Name(LOADERS, "_combined_loader", _val_loop)
DATA_FETCHER = Name(LOADERS, "_data_fetcher", _fit_loop)
LAST_RELOAD = Name(LOADERS, "_last_train_dl_reload_epoch", _fit_loop, (int, float))
LAST_VAL_RELOAD = Name(LOADERS, "_last_val_dl_reload_epoch", _val_loop, (int, float))
LOADER_STATES = Name(LOADERS, "_combined_loader_states_to_load", _fit_loop, list)
REQUEST_LOADER = Name(REQUESTS, "_data_source.dataloader", _fit_loop, Callable)
EPOCH_PROGRESS = Name(REQUESTS, "epoch_progress", _fit_loop)
WORKERS_ITERATOR = Name(WORKERS, "_iterator", lambda _: DataLoader(TensorDataset(torch.zeros(1))))

# -- logged values and metrics ----------------------------------------------------------------------------------------

CALLBACK_METRICS = Name(LOGGED, "_logger_connector._callback_metrics", _trainer, dict)
LOGGED_METRICS = Name(LOGGED, "_logger_connector._logged_metrics", _trainer, dict)
BAR_METRICS = Name(LOGGED, "_logger_connector._progress_bar_metrics", _trainer, dict)
FIRST_ITERATION = Name(LOGGED, "_logger_connector._first_loop_iter", _trainer, (bool, type(None)))
RESULTS = Name(LOGGED, "_results", _epoch_loop, dict)
METADATA = Name(LOGGED, "_Metadata", _of_results, type)
SYNC = Name(LOGGED, "_Sync", _of_results, type)
RESULT_METRIC = Name(LOGGED, "_ResultMetric", _of_results, type)
DEFAULTS = Name(METRICS, "_defaults", _metric, dict)
UPDATE_COUNT = Name(METRICS, "_update_count", _metric, int)
FORWARD_CACHE = Name(METRICS, "_forward_cache", _metric)
COMPUTED = Name(METRICS, "_computed", _metric)
SHOULD_SYNC = "_should"  # of a _Sync, which has it as an argument

# -- modules and DDP --------------------------------------------------------------------------------------------------

NON_PERSISTENT = Name(HOOKED, "_non_persistent_buffers_set", _module, set)
PARAMETERS = Name(HOOKED, "_parameters", _module, dict)
BUFFERS = Name(HOOKED, "_buffers", _module, dict)
COMM_HOOKS = Name(BUCKETS, "_comm_hooks", _ddp)
REDUCER = Name(BUCKETS, "reducer", _ddp)
SHARES_BUFFERS = Name(SHARING, "require_forward_param_sync", _ddp, bool)
TOGGLED = Name(TOGGLES, "_param_requires_grad_state", _module, dict)

# The model is not sharded yet.
FSDP_STATE = Name(UNSYNCED, "_get_fsdp_state", lambda _: FSDPModule, Callable)
SYNCS = Name(UNSYNCED, "reduce_grads", lambda _: None, bool)
ALL_REDUCES = Name(UNSYNCED, "all_reduce_grads", lambda _: None, bool)
PARTIAL_SUM = Name(UNSYNCED, "_partial_reduce_output", lambda _: None)
UNSHARDED = Name(UNSYNCED, "_unsharded_param", lambda _: None, torch.Tensor)  # only once it was gathered
ACCUMULATED = Name(UNSYNCED, "unsharded_accumulated_grad", lambda _: None)

RNG_TRACKER = Name(SHARED_RANDOM, "_random._rng_tracker", lambda _: torch.distributed.tensor)
MAKE_TRACKER = Name(SHARED_RANDOM, "_random.OffsetBasedRNGTracker", lambda _: torch.distributed.tensor, type)

COMPOSABLE = "__composable_api_state_key_"
"""How the names of attributes begin in which torch keeps, at a module, what FSDP2 and its like do with it."""

# -- callbacks and loggers that Lightning ships -----------------------------------------------------------------------

BATCH_SIZE_NAME = Name(TUNERS, "_batch_arg_name", _first("callbacks", "BatchSizeFinder"), str)
ENDS_EARLY = Name(TUNERS, "_early_exit", _first("callbacks", "BatchSizeFinder", "LearningRateFinder"), bool)
RATE_NAME = Name(TUNERS, "_attr_name", _first("callbacks", "LearningRateFinder"), (str, type(None)))
EXPERIMENT = Name(LOGGERS, "_experiment", _first("loggers", "TensorBoardLogger", "CSVLogger"))
VERSION = Name(LOGGERS, "_version", _first("loggers", "TensorBoardLogger", "CSVLogger"))
TENSORBOARD_OPTIONS = Name(LOGGERS, "_kwargs", _first("loggers", "TensorBoardLogger"), dict)


def fsdp_groups(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, Any]]:
    """Of the parameters that FSDP2 gathers together: the module that gathers them, its name, and what FSDP2 keeps."""
    seen = set[int]()
    for name, part in module.named_modules():
        state = FSDP_STATE.of(part)() if hasattr(part, FSDP_STATE.name) else None
        if state is None or id(state) in seen:  # of several modules that gather together
            continue
        seen.add(id(state))
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13 has several
        for group in groups if groups is not None else filter(None, [state._fsdp_param_group]):
            yield name, part, group


def writes_of(tensor: torch.Tensor) -> int:
    """Torch's count of the writes to a tensor. One made in inference mode has none, and counts as written to."""
    return tensor._version if not tensor.is_inference() else next(_UNCOUNTED)


_UNCOUNTED = itertools.count(-1, -1)  # like no count, and no two alike
