"""A sharded snapshot as a ``fit`` goes on from it: weights and optimizers as this rank has them, the rest as it was."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch

from lightning_spot.errors import SettingsError
from lightning_spot.exact.dump import KEY, read_checkpoint
from lightning_spot.exact.loadability import check_resumable
from lightning_spot.exact.rank_states import states_in_files
from lightning_spot.exact.sharded import is_sharded, put_back
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.portion import Image
from lightning_spot.sharded.items import EXTRA
from lightning_spot.sharded.metadata import REST_FILE

if TYPE_CHECKING:
    import lightning.pytorch as pl


def load_shards(trainer: pl.Trainer, image: Image, manifest: Manifest, *, trusts: bool) -> dict[str, Any]:
    """Load a sharded snapshot on this rank.

    Args:
        trainer: whose model and optimizers are set up.
        image: of the snapshot, checked.
        manifest: of the snapshot.
        trusts: whether to load objects of any class.

    Returns:
        the checkpoint without the states of the model and its optimizers.

    Raises:
        SettingsError: if the strategy of this trainer has no shards.
        ModelChanged: if it is the snapshot of another model.
        NotSerialisable: if a module's extra state was not loaded.
    """
    if not is_sharded(trainer):
        raise SettingsError(
            f"snapshot {manifest.name} is sharded, and {type(trainer.strategy).__name__} is not: make one plain file of"
            " it (`lightning-spot pull DIRPATH --consolidate --to FILE`) for fit(ckpt_path=FILE), or go on with"
            " ModelParallelStrategy or FSDPStrategy(state_dict_type='sharded')"
        )
    data = io.BytesIO(_file(image, manifest, REST_FILE))
    rest: dict[str, Any] = torch.load(data, "cpu", weights_only=False) if trusts else read_checkpoint(data)
    shared = rest.get(KEY)
    extra = shared.get(EXTRA, {}) if shared is not None else {}
    check_resumable(trainer, {KEY: {EXTRA: extra}})  # the rest, once hooks have their own objects
    put_back(trainer, image, manifest, extra)
    if shared is not None:
        shared["ranks"] = states_in_files(trainer, shared, lambda name: _file(image, manifest, name))
    return rest


def _file(image: Image, manifest: Manifest, name: str) -> memoryview:
    span = manifest.span_of(name)
    return image[span.offset : span.stop]
