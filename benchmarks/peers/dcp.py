"""torch.distributed.checkpoint's ``async_save``: by thread and by process, with its own staging and with torchtitan's.

torchtitan sets all four ``StagingOptions``. Without a GPU torch refuses pinned memory and non-blocking copies, so that
on the CPU the staged ones use shared memory and a staging thread only.
"""

from __future__ import annotations

import shutil
import tempfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.utils._pytree import tree_map

from benchmarks.baselines.baseline import DURABLE, HOST, Baseline


class DCP(Baseline):
    """Saves every ``every`` steps; as its documentation says, the last save is awaited before the next one.

    Args:
        folder: where it may write.
        every: optimizer steps between snapshots.
        by: thread or process.
        staged: whether with ``StagingOptions`` set, see above.
    """

    def __init__(self, folder: Path, every: int, *, by: AsyncCheckpointerType, staged: bool) -> None:
        super().__init__(folder, every)
        self._by, self._staged = by, staged
        self._stager: DefaultStager | None = None
        self._saved: Future[Any] | None = None
        self._copied: Future[Any] | None = None
        self._template: dict[str, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self._staged:
            on_gpu = pl_module.device.type == "cuda"
            self._stager = DefaultStager(StagingOptions(on_gpu, True, True, on_gpu))
        if self._by is AsyncCheckpointerType.PROCESS and not dist.is_initialized():
            meeting = Path(tempfile.mkdtemp(dir=self.folder)) / "meeting"
            dist.init_process_group("cpu:gloo", init_method=f"file://{meeting}", rank=0, world_size=1)

    def begin(self, step: int, checkpoint: dict[str, Any], trainer: pl.Trainer) -> None:
        if self._saved is not None:
            self._saved.result()
        options = {"async_stager": self._stager} if self._stager is not None else {}
        self._template = checkpoint
        path = self.folder / f"step-{step:09d}"
        response = dcp.async_save(
            checkpoint,
            checkpoint_id=path,
            async_checkpointer_type=self._by,
            no_dist=self._by is AsyncCheckpointerType.THREAD,
            **options,
        )
        if isinstance(response, Future):
            self._saved = response
            self.reached(step, HOST)
        else:
            self._copied, self._saved = response.staging_completion, response.upload_completion
            self._copied.add_done_callback(lambda _: self.reached(step, HOST))
        self._saved.add_done_callback(lambda _: self._safe_at(step))

    def _safe_at(self, step: int) -> None:
        self.reached(step, DURABLE)
        for older in sorted(self.folder.glob("step-*"))[:-2]:
            shutil.rmtree(older)

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.result()
            self._copied = None

    def settle(self) -> None:
        if self._saved is not None:
            self._saved.result()

    def let_go(self) -> None:
        if self._stager is not None:
            self._stager.close()

    def restore(self) -> tuple[int, dict[str, Any]]:
        path = max(self.folder.glob("step-*"))
        empty = tree_map(
            lambda leaf: torch.empty_like(leaf) if isinstance(leaf, torch.Tensor) else leaf, self._template
        )
        dcp.load(empty, checkpoint_id=path, no_dist=True)
        return int(path.name.removeprefix("step-")), empty
