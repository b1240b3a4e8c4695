"""What the ranks of one host write of an image in shards, as it lies in a slot that holds this host's portion only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_spot.errors import ShareMissing
from lightning_spot.image.files import FILE_ALIGNMENT_BYTES, FileSpan
from lightning_spot.image.layout import Entry, Layout
from lightning_spot.image.notes import Own
from lightning_spot.image.portion import Portion, Portions, joined
from lightning_spot.sharded.places import Places, aligned, state_file, tensors_file


def portions_of(files: Sequence[FileSpan], hosts: Sequence[Sequence[int]]) -> Portions:
    """What each host but the first brings: the files of its ranks, with the zeros behind them.

    Args:
        files: into which the image is cut.
        hosts: the ranks of each host, those of the first, which brings the rest, among them.
    """
    spans = {file.name: file for file in files}

    def ranges(ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
        for rank in ranks:
            for name in (tensors_file(rank), state_file(rank)):
                if (span := spans.get(name)) is not None:  # a rank may have no tensors to write
                    yield span.offset, aligned(span.stop, FILE_ALIGNMENT_BYTES) - span.offset

    return Portions(tuple(joined(ranges(ranks)) for ranks in hosts[1:]), tuple(map(len, hosts[1:])))


def own_of(places: Places, ranks: Sequence[int]) -> Own:
    """What one host writes by itself, as far as its size is fixed.

    Args:
        places: in the image.
        ranks: of the host.
    """
    names = {name for rank in ranks for name in (tensors_file(rank), state_file(rank))}
    return Own(tuple(file for file in places.files if file.name in names))


def fitting(layout: Layout, nbytes: int) -> Layout:
    """The layout, if what it places lies in a slot of so many bytes.

    Raises:
        ShareMissing: if it does not.
    """
    frame_end = max([at + len(data) for at, data in layout.frame], default=0)
    end = max([frame_end, *[piece.offset + piece.nbytes for piece in layout.pieces]])
    if end > nbytes:
        raise ShareMissing(f"what it writes ends at {end} bytes, and the slot for it at {nbytes}")
    return layout


class Portioned:
    """Moves layouts from their places in an image to those in a slot for one host's portion of it."""

    def __init__(self) -> None:
        self._portion = Portion(())
        self._frame: dict[int, tuple[Entry, Entry]] = {}

    def moved(self, layout: Layout, told: str, nbytes: int, host: int) -> Layout:
        """The same content in the slot. Entries of the frame that stay the same objects do so here, too.

        Args:
            layout: of what this rank writes into the image.
            told: what all ranks know of the image.
            nbytes: where it ends.
            host: number of this one.
        """
        portions = Portions.read(told, nbytes)
        ranges = portions.ranges[host - 1] if host else portions.rest(nbytes)
        if self._portion.ranges != ranges:
            self._portion, self._frame = Portion(ranges), {}
        place = self._portion.place
        frame, known = [], self._frame
        self._frame = {}
        for entry in layout.frame:
            at, data = entry
            before = known.get(at)
            kept = before if before is not None and before[0] is entry else (entry, (place(at), data))
            self._frame[at] = kept
            frame.append(kept[1])
        pieces = tuple([piece._replace(offset=place(piece.offset)) for piece in layout.pieces])
        return Layout(self._portion.nbytes, tuple(frame), pieces)
