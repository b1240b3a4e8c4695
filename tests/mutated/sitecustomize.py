"""Changes a module of the package as it is imported, in every Python that finds this on its path: one mutation.

What is to be changed stands in the environment, see ``tests/soak/test_mutations.py``. Nothing on the disk is changed.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import sys
from types import CodeType
from typing import Any


class _Changed(importlib.machinery.SourceFileLoader):
    """Loads a module from its source with one text in another's place; no compiled file is read or written."""

    def __init__(self, name: str, path: str, old: str, new: str) -> None:
        super().__init__(name, path)
        self._old, self._new = old, new

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).decode()
        if source.count(self._old) != 1:
            raise ImportError(f"{self.path} has {self._old!r} {source.count(self._old)} times")
        return self.source_to_code(source.replace(self._old, self._new).encode(), self.path)


class _Finder:
    """Finds the one module that is changed."""

    def __init__(self, module: str, old: str, new: str) -> None:
        self._module, self._old, self._new = module, old, new

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._module:
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path, target)
        if found is None or found.origin is None:
            return None
        loader = _Changed(name, found.origin, self._old, self._new)
        return importlib.util.spec_from_file_location(name, found.origin, loader=loader)


if change := os.environ.get("MUTATION"):
    sys.meta_path.insert(0, _Finder(**json.loads(change)))  # type: ignore[arg-type] # which has what is called of one
