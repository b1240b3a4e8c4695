"""Makes one plain checkpoint file of a sharded snapshot: ``python -m lightning_spot.sharded.consolidate FOLDER FILE``.

The file is what a run on one device would have saved: ``load_from_checkpoint`` reads it, and ``fit(ckpt_path=)`` of any
strategy. All of the state is in memory at once, in that of the CPU.
"""

from __future__ import annotations

import io
import os
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_spot.errors import CorruptSnapshotError, NotSerializableError, SnapshotNotFoundError, SpotError
from lightning_spot.image.manifest import MANIFEST_FILE, Manifest
from lightning_spot.image.safe_load import kind_of, placeholders_in, safe_load
from lightning_spot.sharded.metadata import REST_FILE
from lightning_spot.sharded.plan import EXTRA, State, is_extra
from lightning_spot.sharded.reader import ImageReader, load_all

_MODEL, _OPTIMIZER = "state_dict", "optimizer_"
_OWN = "lightning_spot"  # exact state, which is that of the ranks there were


def read_folder(folder: Path) -> tuple[memoryview, Manifest]:
    """Read a sharded snapshot from its directory and check every byte of it.

    Raises:
        SnapshotNotFoundError: if it is not there, or in part.
        CorruptSnapshotError: if it is damaged, or is not sharded.
    """
    try:
        manifest = Manifest.from_json((folder / MANIFEST_FILE).read_bytes())
        image = memoryview(bytearray(manifest.nbytes))
        for span in manifest.files:
            with open(folder / span.name, "rb") as file:
                if file.readinto(image[span.offset : span.stop]) != span.nbytes:
                    raise CorruptSnapshotError(f"{folder / span.name} is cut short", where=str(folder))
    except OSError as error:
        raise SnapshotNotFoundError(f"{folder} cannot be read: {error}") from error
    if not manifest.files:
        raise CorruptSnapshotError(
            f"{folder} is no sharded snapshot: its checkpoint is one file already", where=str(folder)
        )
    manifest.verify(image, str(folder))
    return image.toreadonly(), manifest


def consolidated(image: memoryview, manifest: Manifest) -> dict[str, Any]:
    """The plain checkpoint of a sharded snapshot.

    Args:
        image: of the snapshot, checked.
        manifest: of the snapshot.

    Raises:
        CorruptSnapshotError: if it cannot be read.
        NotSerializableError: if it holds objects that torch does not load safely.
    """
    state = load_all(ImageReader(image, manifest))
    checkpoint = rest_of(image, manifest)
    extra = checkpoint.pop(_OWN, {}).get(EXTRA, {})
    model = state.pop(_MODEL, {})
    checkpoint[_MODEL] = {name: value for name, value in model.items() if not is_extra(name)} | extra
    optimizers = sorted(
        (key for key in state if key.startswith(_OPTIMIZER)), key=lambda key: int(key.rpartition("_")[2])
    )
    checkpoint["optimizer_states"] = [_by_number(state[key]) for key in optimizers]
    return checkpoint


def rest_of(image: memoryview, manifest: Manifest) -> dict[str, Any]:
    """What of the checkpoint is neither the model's state nor an optimizer's."""
    span = manifest.span_of(REST_FILE)
    rest: dict[str, Any] = safe_load(io.BytesIO(image[span.offset : span.stop]))
    for where, placeholder in placeholders_in(rest):
        raise NotSerializableError(
            f"{where} in {REST_FILE} of {manifest.name} is a {kind_of(placeholder)}, which is not loaded; keep it out"
            " of hyperparameters and of on_save_checkpoint, or load the directory as it is, by your own code"
        )
    return rest


def _by_number(state: State) -> State:
    """The state of an optimizer as ``torch.optim`` has it: parameters by their number instead of by their name."""
    numbers: dict[str, int] = {}
    groups = []
    for group in state.get("param_groups", []):
        for name in group["params"]:
            numbers.setdefault(name, len(numbers))
        groups.append({**group, "params": [numbers[name] for name in group["params"]]})
    values: Mapping[str, Any] = state.get("state", {})
    return {"state": {numbers[name]: value for name, value in values.items()}, "param_groups": groups}


def write_plain(folder: Path, target: Path) -> None:
    """Make the plain file of a sharded snapshot: whole, or not there.

    Raises:
        SpotError: if that is not possible; nothing is left behind.
    """
    checkpoint = consolidated(*read_folder(folder))
    temporary = target.parent / f".{target.name}.{uuid.uuid4().hex}"
    with open(temporary, "xb") as file:  # others may read it, as far as the user's umask lets them
        try:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink()
            raise


def main() -> int:
    """The command above."""
    folder, target = map(Path, sys.argv[1:])
    try:
        write_plain(folder, target)
    except (SpotError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
