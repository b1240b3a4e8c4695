"""Gradients of a sharded model on which the next step builds, as tensor parallelism and FSDP2 hold them.

A gradient may be sharded in another way than its parameter: of one that all ranks of tensor parallelism have, it may be
a sum that is still to be taken over them. FSDP2 keeps whole gradients beside its parameters where it was told not to
add them up yet (``set_requires_gradient_sync(False)``); where ranks have copies of each other's shards, sums over some
of them (``set_requires_all_reduce(False)``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from lightning_spot.errors import NotSerializableError
from lightning_spot.state import compat
from lightning_spot.state.optimizers import names_of

Plain = list[list[Any]]
"""Placements as plain values: kind, and dimension or operation."""


def plain_placements(tensor: torch.Tensor) -> Plain | None:
    """How a tensor is sharded, as plain values; ``None`` of one that is no DTensor.

    Raises:
        NotSerializableError: if it is in a way that is not known here.
    """
    if not isinstance(tensor, DTensor):
        return None
    return [_plain(placement) for placement in tensor.placements]


def _plain(placement: Placement) -> list[Any]:
    if type(placement) is Shard:
        return ["shard", placement.dim]
    if type(placement) is Partial:
        return ["partial", placement.reduce_op]
    if type(placement) is Replicate:
        return ["replicate", ""]
    raise NotSerializableError(f"a gradient is placed as {placement}, which snapshots of mid-accumulation do not know")


def _placements(plain: Plain) -> list[Placement]:
    kinds: dict[str, Any] = {"shard": Shard, "partial": Partial, "replicate": lambda _: Replicate()}
    return [kinds[kind](how) for kind, how in plain]


def placements_apart(
    gradients: Iterable[tuple[str, torch.Tensor, torch.Tensor]],
) -> Iterator[tuple[str, Plain | None]]:
    """Names and placements of gradients that are not sharded as their parameters are.

    Args:
        gradients: name, parameter and gradient of each.
    """
    for name, parameter, gradient in gradients:
        if getattr(parameter, "placements", None) != getattr(gradient, "placements", None):
            yield name, plain_placements(gradient)


def gradient_like(parameter: torch.Tensor, local: torch.Tensor, placements: Plain | None = None) -> torch.Tensor:
    """The gradient of a parameter, of what this rank has of it.

    Args:
        parameter: whose it is.
        local: what this rank has.
        placements: of the gradient; ``None`` for those of the parameter.
    """
    local = local.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements if placements is None else _placements(placements),
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


# -- what FSDP2 keeps ------------------------------------------------------------------------------------------------


def _of_fsdp(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Name of each parameter that FSDP2 shards, and what FSDP2 keeps of it."""
    names = names_of(module)
    for *_, group in compat.fsdp_groups(module):
        for kept in group.fsdp_params:
            if (name := names.get(id(kept.sharded_param))) is not None:
                yield name, kept


def which_wait(module: torch.nn.Module, flag: compat.Name = compat.SYNCS) -> list[str]:
    """Names of the modules that FSDP2 was told not to add gradients up of; by another flag, not over copies."""
    return [name for name, _, group in compat.fsdp_groups(module) if not flag.of(group)]


def have_wait(module: torch.nn.Module, names: Collection[str], copies: Collection[str]) -> None:
    """Have gradients of these modules not be added up, and those of all others; of the latter ones, not over copies."""
    for name, owner, group in compat.fsdp_groups(module):
        if compat.SYNCS.of(group) == (name in names):
            owner.set_requires_gradient_sync(name not in names, recurse=False)  # type: ignore[operator] # FSDP2's
        if compat.ALL_REDUCES.of(group) == (name in copies):
            owner.set_requires_all_reduce(name not in copies, recurse=False)  # type: ignore[operator] # likewise


def partial_sums_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradients that are not added up over copies of a shard yet, by the number of what FSDP2 gathers together."""
    sums = ((number, compat.PARTIAL_SUM.of(group)) for number, (*_, group) in enumerate(compat.fsdp_groups(module)))
    return {str(number): each for number, each in sums if each is not None}


def keep_partial_sums(module: torch.nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Have FSDP2 add the next gradients to what :func:`partial_sums_of` found."""
    for number, (*_, group) in enumerate(compat.fsdp_groups(module)):
        if (value := saved.get(str(number))) is not None:
            # FSDP2 drops it while a stream of its own may still read it: no other stream may be given its memory then.
            is_on_gpu = group.device.type == "cuda"
            stream = torch.cuda.Stream(group.device) if is_on_gpu else None  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                kept = torch.empty_like(value, device=group.device)
            compat.PARTIAL_SUM.set(group, kept.copy_(value))


def unsynced_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradients that are not added up over ranks yet, by the names of their parameters.

    Args:
        module: whose own parameters are in place, as they are once it was asked for its state.
    """
    found: dict[str, torch.Tensor] = {}
    for name, kept in _of_fsdp(module):
        gradient = compat.ACCUMULATED.of(kept)
        if gradient is None and hasattr(kept, compat.UNSHARDED.name):
            gradient = compat.UNSHARDED.of(kept).grad
        if gradient is not None:
            found[name] = gradient
    return found


def keep_unsynced(module: torch.nn.Module, saved: Mapping[str, Any]) -> None:
    """Have FSDP2 add the next gradients to those that :func:`unsynced_of` found. Every rank calls it.

    Args:
        module: whose gradients they are.
        saved: what this rank has of each, and its placements.
    """
    for _, owner, _ in compat.fsdp_groups(module):
        # It looks at whole parameters then, also in steps that have no use for them, and makes them as it gathers them.
        owner.unshard()  # type: ignore[operator] # FSDP2's
        owner.reshard()  # type: ignore[operator] # likewise
    for name, kept in _of_fsdp(module):
        if name in saved:
            whole = compat.UNSHARDED.of(kept)
            compat.ACCUMULATED.set(kept, gradient_like(whole, saved[name]["local"], saved[name]["placements"]))
