"""Loaders of other packages, stopped wherever training may be: equal to an undisturbed run, or named before it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.integration.test_loaders import STOPS, WORKERS, Epochs
from tests.support import exact_models as m
from tests.support.exact_table import Case, equal_or_named

pytestmark = pytest.mark.guarantee("G5")

SHARDS = 4


def pairs(samples: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of samples that are dictionaries."""
    x, y = (torch.stack([torch.as_tensor(sample[name]) for sample in samples]) for name in ("x", "y"))
    return x.float(), y.float().reshape(len(y), -1)


def rows() -> list[dict[str, Any]]:
    data = m.Rows(noise=False)
    return [{"x": data[index][0].numpy(), "y": data[index][1].numpy()} for index in range(len(data))]


def stateful(data: Any, **more: Any) -> Any:
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader(data, m.BATCH, **more)


def hugging_face(folder: Path, shuffle: bool = False, loader: Any = stateful, **more: Any) -> Any:
    """A stream in shards, in another order in each epoch that it is told."""
    data = pytest.importorskip("datasets").Dataset.from_list(rows()).to_iterable_dataset(num_shards=SHARDS)
    return loader(data.shuffle(seed=1, buffer_size=8) if shuffle else data, collate_fn=pairs, **more)


def webdataset(folder: Path, shuffle: bool = False, resampled: bool = False, **more: Any) -> Any:
    package = pytest.importorskip("webdataset")
    if not folder.exists():
        folder.mkdir()
        with package.ShardWriter(f"{folder}/%d.tar", maxcount=5, verbose=0) as writer:
            for index, row in enumerate(rows()):
                writer.write({"__key__": str(index), "x.npy": row["x"], "y.npy": row["y"]})
    shards = sorted(map(str, folder.glob("*.tar")))
    if resampled:
        data = package.WebDataset(shards, resampled=True, shardshuffle=False)
    else:
        data = package.WebDataset(shards, shardshuffle=SHARDS if shuffle else False)
    data = (data.shuffle(8) if shuffle else data).decode().map(lambda row: {"x": row["x.npy"], "y": row["y.npy"]})
    return DataLoader(data.with_epoch(m.SAMPLES) if resampled else data, m.BATCH, collate_fn=pairs, **more)


def litdata(folder: Path, shuffle: bool = True, **more: Any) -> Any:
    package = pytest.importorskip("litdata")
    if not folder.exists():
        cache = package.streaming.cache.Cache(str(folder), chunk_size=5)
        for index, row in enumerate(rows()):
            cache[index] = row
        cache.done()
        cache.merge()
    data = package.StreamingDataset(str(folder), shuffle=shuffle, seed=1)
    return package.StreamingDataLoader(data, batch_size=m.BATCH, collate_fn=pairs, **more)


def mosaic(folder: Path, shuffle: bool = True, **more: Any) -> Any:
    package = pytest.importorskip("streaming")
    if not folder.exists():
        with package.MDSWriter(out=str(folder), columns={"x": "ndarray", "y": "ndarray"}, size_limit=400) as writer:
            for row in rows():
                writer.write(row)
    package.base.util.clean_stale_shared_memory()
    data = package.StreamingDataset(local=str(folder), shuffle=shuffle, shuffle_seed=1, batch_size=m.BATCH)
    return package.StreamingDataLoader(data, batch_size=m.BATCH, collate_fn=pairs, **more)


def torchio(folder: Path, queued: bool = False, **more: Any) -> Any:
    package = pytest.importorskip("torchio")
    data = m.Rows(noise=False)
    subjects = [
        package.Subject(x=package.ScalarImage(tensor=x.reshape(1, 2, 2, 2)), y=y)
        for x, y in map(data.__getitem__, range(len(data)))
    ]
    noisy = package.SubjectsDataset(subjects, transform=package.RandomNoise())
    if queued:
        sampler = package.data.UniformSampler(2)
        queue = package.Queue(noisy, max_length=10, samples_per_volume=2, sampler=sampler, num_workers=0)
        return package.SubjectsLoader(queue, batch_size=2 * m.BATCH, collate_fn=images, **more)
    return package.SubjectsLoader(noisy, batch_size=m.BATCH, shuffle=True, collate_fn=images, **more)


def images(subjects: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of subjects."""
    return pairs([{"x": subject["x"]["data"].flatten(), "y": subject["y"]} for subject in subjects])


LOADERS: dict[str, Callable[..., Any]] = {
    "datasets": hugging_face,
    "datasets-shuffled": partial(hugging_face, shuffle=True),
    "litdata": litdata,
    "mosaic": mosaic,
    "torchio": torchio,
    "webdataset": webdataset,
    "webdataset-shuffled": partial(webdataset, shuffle=True),
    "webdataset-resampled": partial(webdataset, shuffle=True, resampled=True),
    "torchio-queue": partial(torchio, queued=True),
}
NAMED = ("webdataset", "webdataset-shuffled", "webdataset-resampled", "torchio-queue")


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", LOADERS)
def test_equal_or_named(name: str, workers: str, stop: str, tmp_path: Path) -> None:
    case = Case(model=Epochs, loaders=lambda: LOADERS[name](tmp_path / "data", **WORKERS[workers]))
    said = equal_or_named(case, tmp_path, [stops() for stops in STOPS[stop]])
    assert name in NAMED or said == []
