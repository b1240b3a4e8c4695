"""Replaces methods of objects that belong to Lightning or to the user, and puts them back by one owner."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Self


class Patches(ExitStack):
    """What is replaced for as long as something lasts; :meth:`close` undoes all of it, the last one first.

    It can be used again after that. What else is to be undone then goes to ``callback``.
    """

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace an attribute of one object by what ``make`` returns of it, until :meth:`close`.

        Args:
            owner: whose attribute it is; its class stays as it is.
            name: of the attribute.
            make: returns the replacement.

        Raises:
            AttributeError: if there is no such attribute.
        """
        own = vars(owner)
        before = {name: own[name]} if name in own else {}
        replacement = make(getattr(owner, name))
        setattr(owner, name, replacement)

        def undo() -> None:
            if own.get(name) is replacement:  # or somebody else has put another one there
                del own[name]
                own.update(before)

        self.callback(undo)

    def once(self, owner: Any, name: str, instead: Callable[..., Any]) -> Self:
        """Have a method replaced until it is called, or until :meth:`close`.

        Args:
            owner: whose method it is.
            name: of the method.
            instead: is called once in its place, with the method and its arguments.

        Returns:
            what undoes it where it is called first.
        """
        once = type(self)()
        self.push(once)

        def first(method: Callable[..., Any], *arguments: Any) -> Any:
            once.close()
            return instead(method, *arguments)

        once.wrap(owner, name, partial(partial, first))
        return once
