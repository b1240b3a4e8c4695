"""What a command line gives is checked in its own words: an error names the flag, not an argument of Python."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_spot.config import check_number, check_run_name, why_no_place, without_password
from lightning_spot.errors import SettingsError
from lightning_spot.run.location import AUTO, Location, node_url


def check_given(url: str, nodes: Sequence[str], run: str | None) -> None:
    """Refuse what names no place, no memory node or no run.

    Raises:
        SettingsError: naming the flag.
    """
    if why := why_no_place(url):
        raise SettingsError(f"{without_password(url)!r}: {why}")
    for node in nodes:
        try:
            node_url(node)
        except SettingsError as error:
            raise SettingsError(f"--memory {error}") from error
    if twice := [node for node in nodes if nodes.count(node) > 1]:
        raise SettingsError(f"--memory names {twice[0]} twice")
    if run is not None:
        try:
            check_run_name(run)
        except SettingsError as error:
            raise SettingsError(f"--run: {error}") from error


def location_of(url: str, nodes: Sequence[str], run: str | None) -> Location:
    """Where a run is.

    Args:
        url: its directory or URL.
        nodes: memory nodes that are asked, too.
        run: its name, if that is not the last part of ``url``.

    Raises:
        SettingsError: in words of the command line.
    """
    if url.startswith("spot:"):
        raise SettingsError(f"{url} is a memory node: give a directory or URL, and the node by --memory")
    check_given(url, nodes, run)
    place = Location.of(url, nodes or AUTO, run or "run")
    if run is not None:
        return place
    try:
        return Location.of(url, nodes or AUTO, None)
    except SettingsError:  # all else was good
        raise SettingsError(f"{url!r} does not end with a name of a run: give it by --run") from None


def check_replicas_given(replicas: int, nodes: Sequence[str]) -> None:
    """Refuse a number of replicas for which too few nodes are named.

    Raises:
        SettingsError: naming both flags.
    """
    check_number("--replicas", replicas, 1, whole=True)
    if replicas > max(1, len(nodes)):
        raise SettingsError(
            f"--replicas={replicas}: each replica is at a node of its own, and --memory names {len(nodes)} of them"
        )
