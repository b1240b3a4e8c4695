"""A file: whoever makes it says that this machine will end. The easiest source to script and to test."""

from __future__ import annotations

import time
from pathlib import Path

from lightning_spot.errors import NoticeUnavailable
from lightning_spot.notices.notice import Notice


class FileSource:
    """A notice is there when the file is.

    Args:
        path: of the file. If it holds a number, that many seconds are left.
        once: whether the file is removed when it was seen. Else whoever is started again hears of it, too.
    """

    name = "file"
    every_s = 0.5
    grace_s: float | None = None

    def __init__(self, path: str | Path, *, once: bool = False) -> None:
        self.path, self._once = Path(path), once

    def poll(self) -> Notice | None:
        """Look for the file."""
        try:
            content = self.path.read_text(encoding="utf-8", errors="replace").strip()
            if self._once:
                self.path.unlink(missing_ok=True)  # another rank may have seen it, too
        except FileNotFoundError:
            return None
        except OSError as error:
            raise NoticeUnavailable(f"notice file {self.path} cannot be read ({error.strerror})") from error
        try:
            grace_s = float(content) if content else None
        except ValueError:  # a reason in words
            grace_s = None
        text = f"notice file {self.path} is there" + (f": {content[:100]}" if content else "")
        return Notice(source=self.name, kind="stop", text=text, seen_s=time.monotonic(), grace_s=grace_s)

    def close(self) -> None:
        """See :meth:`NoticeSource.close`."""
