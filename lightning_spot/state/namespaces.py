"""The two names of one Lightning: ``lightning.pytorch`` and ``pytorch_lightning`` hold the same classes twice.

A Trainer of one does not know the classes of the other. So ours belong to both, as far as both are imported: importing
one that nobody uses would cost every start a fifth of a second.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

from lightning_spot.errors import SettingsError

if TYPE_CHECKING:
    from lightning.fabric.plugins import TorchCheckpointIO
    from lightning.pytorch import Callback

_FABRICS = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
"""Each namespace, and where the part of it is that needs no Trainer."""


def imported() -> list[str]:
    """Namespaces that this process uses; where it uses none yet, the first that is installed is imported."""
    found = [name for name in _FABRICS if hasattr(sys.modules.get(name), "Trainer")]
    if found:
        return found
    for name in _FABRICS:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
            return [name]
    raise ImportError("lightning_spot needs lightning or pytorch_lightning: pip install lightning")


def classes(module: str, *names: str) -> tuple[Any, ...]:
    """Classes of these names in each imported namespace, for ``isinstance``; those it does not have are left out.

    Args:
        module: path below the namespace, such as ``"callbacks"``; ``""`` for the namespace itself, and ``"fabric."``
            before what lies in the other part.
        names: of the classes.
    """
    return _classes(tuple(imported()), module, names)


def overrides(module: Any, hook: str) -> bool:
    """Whether the class of a LightningModule has a hook of its own."""
    return getattr(type(module), hook) not in [getattr(kind, hook) for kind in classes("", "LightningModule")]


def of(owner: Any, module: str) -> ModuleType:
    """A module of the namespace that ``owner``, a Trainer or a class of Lightning, comes from.

    Raises:
        ImportError: if it has no such module.
    """
    kinds = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
    names = (name for kind in kinds for name in _FABRICS if kind.__module__.startswith(f"{name}."))
    return importlib.import_module(_path(next(names, imported()[0]), module))


@functools.lru_cache(maxsize=256)
def _classes(namespaces: tuple[str, ...], module: str, names: tuple[str, ...]) -> tuple[Any, ...]:
    found: list[Any] = []
    for namespace in namespaces:
        try:
            home = importlib.import_module(_path(namespace, module))
        except ImportError:
            continue
        found += [getattr(home, name) for name in names if hasattr(home, name)]
    return tuple(found)


def _path(namespace: str, module: str) -> str:
    if module.startswith("fabric."):
        return f"{_FABRICS[namespace]}.{module.removeprefix('fabric.')}"
    return f"{namespace}.{module}" if module else namespace


if not TYPE_CHECKING:
    Callback = classes("callbacks", "Callback")[0]
    TorchCheckpointIO = classes("fabric.plugins", "TorchCheckpointIO")[0]


class Copied:
    """What can be pickled and copied at any time: a copy has the settings, and nothing of a ``fit`` under way.

    It belongs to either namespace, whichever was imported first.
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Belong to what was imported since."""
        join_namespaces()
        return super().__new__(cls)

    def of_a_fit(self) -> dict[str, Any]:
        """The attributes that belong to a ``fit``, as they are before it."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """Everything else; and not what Lightning hangs on a callback, through which it would take the model along."""
        left_out = {*self.of_a_fit(), "log", "log_dict"}
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As before a ``fit``."""
        vars(self).update({**self.of_a_fit(), **state})


class SpotCallback(Copied, Callback):
    """Base of our callbacks."""

    def __init_subclass__(cls, **named: Any) -> None:
        """Have the first hook that Lightning calls say so if it is called on the class."""
        super().__init_subclass__(**named)
        if "setup" in vars(cls):
            cls.setup = _of_made_ones(cls.setup)  # type: ignore[method-assign] # it is that one, if all is well


def _of_made_ones(setup: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(setup)
    def checked(self: Any, *arguments: Any, **named: Any) -> None:
        if not isinstance(self, SpotCallback):  # it is the trainer, which would call it again to tell of this error
            self.callbacks = [item for item in self.callbacks if not isinstance(item, type)]
            kind = setup.__qualname__.partition(".")[0]
            raise SettingsError(f"callbacks= holds the class {kind} itself: write {kind}(...), with its arguments")
        setup(self, *arguments, **named)

    return checked


class SpotIO(Copied, TorchCheckpointIO):
    """Base of our plugin."""


def join_namespaces() -> None:
    """Have our classes belong to every namespace that is imported by now. Cheap, and called where they are used."""
    for base in classes("callbacks", "Callback"):
        if not issubclass(SpotCallback, base):
            SpotCallback.__bases__ = (*SpotCallback.__bases__, base)
    for base in classes("fabric.plugins", "TorchCheckpointIO"):
        if not issubclass(SpotIO, base):
            base.register(SpotIO)  # an abstract class: it can take others in
