"""Tells when the gradients of parameters become ready, by hooks that are there only while somebody wants to know."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch.nn.parameter import is_lazy


class GradientWatch:
    """Hooks at the parameters of a model. Copies and pickles of a parameter do not have them.

    Nothing is hooked to modules: with a hook anywhere in it, torch takes other ways through some of them.

    Args:
        parameters: of the model; numbered in their order.
        ready: told the number of a parameter each time its gradient is accumulated, in the thread that computes it.

    Attributes:
        parameters: of the model.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], ready: Callable[[int], None]) -> None:
        self.parameters = list(parameters)
        self._ready = ready
        self._hooks: dict[int, Callable[[], None]] = {}
        self._wanted: frozenset[int] | None = frozenset()

    def nbytes(self) -> list[int]:
        """Bytes of each gradient; 0 for one of a lazy module that has no shape yet, which nobody may touch."""
        return [0 if is_lazy(item) else item.numel() * item.element_size() for item in self.parameters]

    def keep(self, wanted: frozenset[int] | None) -> None:
        """Listen to these parameters only.

        Args:
            wanted: their numbers; ``None`` for all that are trained.
        """
        if wanted == self._wanted:
            return
        self._wanted = wanted
        numbers = frozenset(range(len(self.parameters))) if wanted is None else wanted
        for number in self._hooks.keys() - numbers:
            self._hooks.pop(number)()
        for number in numbers - self._hooks.keys():
            parameter = self.parameters[number]
            if parameter.requires_grad and parameter.is_leaf and not is_lazy(parameter):
                hook = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call] # torch's
                    partial(self._accumulated, number)
                )
                self._hooks[number] = hook.remove

    def close(self) -> None:
        """Listen no more."""
        self.keep(frozenset())

    def _accumulated(self, number: int, _: torch.Tensor) -> None:
        self._ready(number)
