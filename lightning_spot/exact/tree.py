"""The modules of a model and its state, known again from one snapshot to the next.

To walk over hundreds of modules takes longer than all that is done with them. So it is noted what there was under which
name, and seen, in rows, whether it is there still. Nothing is kept alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from itertools import chain, compress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch.nn import Module

from lightning_spot.exact import private
from lightning_spot.exact.parameter_names import clean
from lightning_spot.image.rows import Entries, kinds_of, values_in

State = dict[str, Any]
NamedModule = tuple[str, Module]

_NEEDED = (
    *(private.MODULES, private.PARAMETERS, private.BUFFERS, private.NON_PERSISTENT),
    *(private.PRE_HOOKS, private.POST_HOOKS),
)
_OF_CLASSES = ("state_dict", "_save_to_state_dict", "get_extra_state")
_FSDPS = "torch.distributed.fsdp._fully_shard"
"""Whose hooks have a module's own parameters be those in shards, and do nothing else."""


class Modules(list[NamedModule]):
    """Modules with their names, and in rows what is looked at of each of them. Of one moment: it keeps them alive.

    Args:
        modules: the modules.

    Attributes:
        names: theirs.
        parts: they.
        own: their ``vars()``.
    """

    def __init__(self, modules: Iterable[NamedModule]) -> None:
        super().__init__(modules)
        self.names = [name for name, _ in self]
        self.parts = [part for _, part in self]
        self.own: list[State] = list(map(vars, self.parts))

    @classmethod
    def of(cls, modules: Sequence[NamedModule]) -> Modules:
        """The same modules in rows."""
        return modules if isinstance(modules, cls) else cls(modules)


def modules_of(root: Module) -> Modules:
    """What ``named_modules()`` gives."""
    tree, modules = _tree_of(root)
    return Modules(compress(zip(tree.names, modules, strict=True), tree.is_first))


def state_of(root: Module) -> State | None:
    """What ``state_dict(keep_vars=True)`` gives, by clean names; ``None`` where a module has a way of its own."""
    if not all(hasattr(root, name.name) for name in _NEEDED):  # a torch of other days
        return None
    tree, modules = _tree_of(root)
    own = list(map(vars, modules))
    pre_hooks = private.PRE_HOOKS.of_each(modules, own)
    if not _are_plain(modules, own, pre_hooks):
        return None
    for name, module, hooks in compress(zip(tree.names, modules, pre_hooks, strict=True), pre_hooks):
        for hook in hooks.values():
            hook(module, f"{name}." if name else "", True)
    return tree.state(modules, own)


def _are_plain(modules: Sequence[Module], own: list[State], pre_hooks: list[State]) -> bool:
    """Whether all modules give what they have in torch's own way.

    Args:
        modules: the modules.
        own: their ``vars()``.
        pre_hooks: of each.
    """
    kinds = kinds_of(list(modules))
    if any(getattr(kind, name) is not getattr(Module, name) for kind in kinds for name in _OF_CLASSES):
        return False
    if any(["state_dict" in each or "_save_to_state_dict" in each for each in own]):
        return False
    if any(private.POST_HOOKS.of_each(modules, own)):
        return False
    hooks = chain.from_iterable([hooks.values() for hooks in pre_hooks if hooks])
    return all(getattr(hook, "__module__", "").startswith(_FSDPS) for hook in hooks)


class _Form(NamedTuple):
    """What the names in a state dict depend on, of tables one after the other.

    Attributes:
        keys: in all of them.
        lengths: of each.
        is_none: of each value, whether it is none.
    """

    keys: list[str]
    lengths: list[int]
    is_none: list[bool]


def keys_of(tables: Sequence[State]) -> list[str]:
    """The keys of all, one after the other; the tables of a scripted module cannot be iterated over themselves."""
    return list(chain.from_iterable([table.keys() for table in tables]))


class _Tree:
    """The modules of a model under all their names, in the order of its state dict.

    Args:
        root: the model.

    Attributes:
        names: of the modules.
        is_first: of each name, whether it is the module's first one.
    """

    def __init__(self, root: Module) -> None:
        named = list(root.named_modules(remove_duplicate=False))
        self.names = [name for name, _ in named]
        modules = [module for _, module in named]
        first = {id(module): number for number, module in reversed(list(enumerate(modules)))}
        self.is_first = [first[id(module)] == number for number, module in enumerate(modules)]
        self._known = list(map(weakref.ref, modules))
        self._below = Entries(private.MODULES.of_each(modules))
        self._form: _Form | None = None
        self._entries: Entries | None = None
        self._left_out: list[set[str]] = []
        self._saved: list[bool] = []
        self._saved_names: list[str] = []

    def modules(self) -> list[Module] | None:
        """The modules, if the same are under the same names; else ``None``."""
        modules = [known() for known in self._known]
        there = [module for module in modules if module is not None]
        # The root is the same. So are those below a module that is the same, if they are those that were there.
        is_still = len(there) == len(modules) and self._below.are_in(private.MODULES.of_each(there))
        return there if is_still else None

    def state(self, modules: Sequence[Module], own: list[State]) -> State:
        """Parameters and buffers of the modules that belong into a state dict.

        Args:
            modules: the modules.
            own: their ``vars()``.
        """
        buffers = private.BUFFERS.of_each(modules, own)
        tables = list(chain.from_iterable(zip(private.PARAMETERS.of_each(modules, own), buffers, strict=True)))
        values = values_in(tables)
        left_out = private.NON_PERSISTENT.of_each(list(compress(modules, buffers)))
        if self._entries is None or not self._entries.are_in(tables) or left_out != self._left_out:
            form = _Form(keys_of(tables), list(map(len, tables)), [value is None for value in values])
            if form != self._form or left_out != self._left_out:
                self._form = self._entries = None  # until all of it is known
                self._look(modules)
                self._form, self._left_out = form, list(map(set, left_out))
            self._entries = Entries(tables)
        return dict(zip(self._saved_names, compress(values, self._saved), strict=True))

    def _look(self, modules: Sequence[Module]) -> None:
        """Find the names of what is saved, and what is not."""
        self._saved, self._saved_names = [], []
        for prefix, module in zip(self.names, modules, strict=True):
            left_out = private.NON_PERSISTENT.of(module)
            entries = [(name, value, False) for name, value in private.PARAMETERS.of(module).items()]
            entries += [(name, value, name in left_out) for name, value in private.BUFFERS.of(module).items()]
            for name, value, is_left_out in entries:
                self._saved.append(value is not None and not is_left_out)
                if self._saved[-1]:
                    self._saved_names.append(clean(f"{prefix}.{name}" if prefix else name))


_trees: WeakKeyDictionary[Module, _Tree] = WeakKeyDictionary()


def _tree_of(root: Module) -> tuple[_Tree, list[Module]]:
    """The tree of a model, and its modules."""
    tree = _trees.get(root)
    modules = tree.modules() if tree is not None else None
    if tree is None or modules is None:
        tree = _trees[root] = _Tree(root)
        modules = tree.modules()
    return tree, modules if modules is not None else [
        module for _, module in root.named_modules(remove_duplicate=False)
    ]
