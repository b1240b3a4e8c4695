"""Cuts what is copied for a snapshot into partitions, and says when in the next iteration each of them goes. Pure.

Two published ways, made sound (every byte once): AsymCheck's shares in proportion to idle time, and OTeaCheck's
partitions that end where gradient buckets do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_BYTES = 1024 * 1024
"""A partition is at least so large: below, handing it over costs more than copying it."""


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of an iteration.

    Attributes:
        point: number of the place that opens it; they are numbered in the order in which they are reached, from 0.
        after_s: it begins so long after that.
        idle_s: measured time in it that nobody else could use; what is no positive number counts as 0.
    """

    point: int
    after_s: float
    idle_s: float


@dataclass(frozen=True, slots=True)
class Span:
    """Some bytes of one piece.

    Attributes:
        piece: its number.
        start: first byte in it.
        nbytes: length, at least 1.
    """

    piece: int
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Partition:
    """What is copied from one place of the iteration on.

    Attributes:
        point: the place.
        after_s: so long after it was reached.
        spans: bytes to copy.
    """

    point: int
    after_s: float
    spans: tuple[Span, ...]


def by_idle_time(sizes: Sequence[int], windows: Sequence[Window], least: int = LEAST_BYTES) -> list[Partition]:
    """Give each window a share in proportion to its idle time, the pieces in their order.

    A share below ``least`` waits for the next window. Where nothing is idle, all windows count alike.

    Args:
        sizes: bytes of each piece, those that are overwritten first in front.
        windows: of the iteration, in order; at least one.
        least: bytes of the smallest partition, unless there are fewer in all.
    """
    total = sum(sizes)
    weights = [window.idle_s if 0 < window.idle_s < math.inf else 0.0 for window in windows]
    whole = sum(weights)
    if not 0 < whole < math.inf:
        weights, whole = [1.0] * len(windows), float(len(windows))
    ends, chosen, begun, so_far = [], [], 0, 0.0
    for window, weight in zip(windows, weights, strict=True):
        so_far += weight
        end = min(total, round(total * (so_far / whole)))
        if weight and end - begun >= least and total - end >= least:
            ends.append(end)
            chosen.append(window)
            begun = end
    if total > begun:  # what is left is the last one's, and large enough unless nothing was cut at all
        ends.append(total)
        chosen.append(next(window for window, weight in zip(windows[::-1], weights[::-1], strict=True) if weight))
    spans = _cut(sizes, ends)
    return [Partition(window.point, window.after_s, part) for window, part in zip(chosen, spans, strict=True)]


def by_bucket(
    sizes: Sequence[int], buckets: Sequence[int | None], points: Sequence[int], least: int = LEAST_BYTES
) -> list[Partition]:
    """Let each piece go when the gradients of its bucket are there.

    Args:
        sizes: bytes of each piece, those that are overwritten first in front.
        buckets: number of each piece's bucket, in the order in which buckets are complete; ``None`` for a piece that
            belongs to none: it goes with the first.
        points: the place where each bucket is complete, in order; at least one.
        least: bytes of the smallest partition, unless there are fewer in all; smaller ones go with the next.
    """
    members: list[list[Span]] = [[] for _ in points]
    for piece, (nbytes, bucket) in enumerate(zip(sizes, buckets, strict=True)):
        if nbytes:
            members[bucket or 0].append(Span(piece, 0, nbytes))
    made: list[Partition] = []
    waiting: list[Span] = []
    left = sum(sizes)
    for point, spans in zip(points, members, strict=True):
        waiting += spans
        nbytes = sum(span.nbytes for span in waiting)
        if waiting and nbytes >= least and (left - nbytes >= least or left == nbytes):
            made.append(Partition(point, 0.0, tuple(waiting)))
            waiting, left = [], left - nbytes
    if waiting:
        made.append(Partition(points[-1], 0.0, tuple(waiting)))
    return made


def bucket_ends(sizes: Sequence[int], limit: int, first: int = LEAST_BYTES) -> list[int]:
    """Cut gradients into buckets as DDP does: a bucket is complete with the gradient that fills it.

    Args:
        sizes: bytes of each gradient, in the order in which they become ready.
        limit: bytes that fill a bucket.
        first: bytes that fill the first one, which DDP keeps small so that communication begins early.

    Returns:
        position of each bucket's last gradient.
    """
    ends, filled, limit_here = [], 0, first
    for position, nbytes in enumerate(sizes):
        filled += nbytes
        if filled >= limit_here:
            ends.append(position)
            filled, limit_here = 0, limit
    if sizes and (not ends or ends[-1] != len(sizes) - 1):
        ends.append(len(sizes) - 1)
    return ends


def _cut(sizes: Sequence[int], ends: Sequence[int]) -> list[tuple[Span, ...]]:
    """The bytes of all pieces in a row, cut at ``ends`` (increasing, the last is their sum)."""
    cut: list[tuple[Span, ...]] = []
    piece, start, at = 0, 0, 0
    for end in ends:
        spans = []
        while at < end:
            nbytes = min(end - at, sizes[piece] - start)
            if nbytes:
                spans.append(Span(piece, start, nbytes))
            at, start = at + nbytes, start + nbytes
            if start == sizes[piece]:
                piece, start = piece + 1, 0
        cut.append(tuple(spans))
    return cut
