"""Methods that are replaced come back as they were, whatever else was put into their place."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_spot.patches import Patches


class Loop:
    def advance(self) -> str:
        return "loop"


def around(name: str) -> Any:
    return lambda inner: lambda: f"{name}({inner()})"


def test_nothing_is_left_of_a_method_that_was_replaced_twice() -> None:
    loop, patches = Loop(), Patches()
    patches.wrap(loop, "advance", around("first"))
    patches.wrap(loop, "advance", around("second"))
    assert loop.advance() == "second(first(loop))"
    patches.close()
    assert vars(loop) == {}
    patches.close()
    assert loop.advance() == "loop"


def test_what_the_object_had_of_its_own_comes_back() -> None:
    loop = Loop()
    own = vars(loop)["advance"] = lambda: "own"
    with Patches() as patches:
        patches.wrap(loop, "advance", around("ours"))
        assert loop.advance() == "ours(own)"
    assert vars(loop) == {"advance": own}


def test_what_others_put_there_since_is_left_alone() -> None:
    loop = Loop()
    with Patches() as patches:
        patches.wrap(loop, "advance", around("ours"))
        theirs = vars(loop)["advance"] = lambda: "theirs"
    assert vars(loop) == {"advance": theirs}


def test_an_attribute_that_is_not_there_is_not_replaced() -> None:
    loop, patches = Loop(), Patches()
    with pytest.raises(AttributeError):
        patches.wrap(loop, "retreat", around("ours"))
    assert vars(loop) == {}


def test_what_is_replaced_once_is_called_once_or_put_back() -> None:
    loop, patches = Loop(), Patches()
    patches.once(loop, "advance", lambda advance: f"ours({advance()})")
    assert [loop.advance(), loop.advance()] == ["ours(loop)", "loop"]
    patches.once(loop, "advance", lambda advance: f"ours({advance()})")
    patches.close()
    assert vars(loop) == {}
