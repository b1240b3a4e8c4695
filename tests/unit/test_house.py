"""The house keeps its rules: public names, layers, no circles, no unpickling of what comes over the network."""

from __future__ import annotations

import ast
import functools
import graphlib
import inspect
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningCLI

import lightning_spot
from lightning_spot import errors
from lightning_spot.cli.command import COMMANDS, module_of
from lightning_spot.config import MANIFEST_VERSION, PROTOCOL_VERSION
from lightning_spot.state.dump import VERSION as EXACT_VERSION

PACKAGE = Path(lightning_spot.__file__).parent

REPOSITORY = PACKAGE.parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
MODULES = {
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCES
}
NODES = [path for path in SOURCES if path.parent.name in ("server", "protocol", "client", "http")]

MOST_LINES = 800
MOST_WORDS = 30  # of a message
# Each begins something that users name: the program, a command, a public class, a file system or store by
# the scheme of its URL; or the program that Python runs as the local server.
NAMED_BY_USERS = {
    "__main__", "callbacks.lightning_cli", "checkpoint_io", "entry_point",
    "cli.command", "client.filesystem", "http.program", "store.objects",
    *map(module_of, COMMANDS),
}  # fmt: skip


def test_public_names_are_there_and_listed() -> None:
    assert sorted(lightning_spot.__all__) == dir(lightning_spot)
    for name in lightning_spot.__all__:
        assert getattr(lightning_spot, name) is not None
    with pytest.raises(AttributeError, match="'Nothing'"):
        _ = lightning_spot.Nothing


def test_the_errors_that_public_names_raise_are_public() -> None:
    raised = set()
    for public in map(functools.partial(getattr, lightning_spot), lightning_spot.__all__):
        members = inspect.getmembers(public) if inspect.isclass(public) else []
        for documented in [public, *(member for name, member in members if not name.startswith("_"))]:
            section = re.search(r"^Raises:\n((?:    .*\n?)+)", inspect.getdoc(documented) or "", re.MULTILINE)
            raised |= set(re.findall(r"^    (\w+):", section[1], re.MULTILINE)) if section else set()
    assert raised & vars(errors).keys() == lightning_spot._HOMES.keys() & vars(errors).keys()


def test_there_are_few_errors() -> None:
    classes = [each for each in vars(errors).values() if inspect.isclass(each) and each.__module__ == errors.__name__]
    assert len([each for each in classes if issubclass(each, errors.SpotError)]) <= 14


@pytest.mark.parametrize("name", lightning_spot.__all__)
def test_docstrings_and_signatures_agree(name: str) -> None:
    """Each argument of a public class is documented once: in its own docstring, or in the one that this refers to."""
    kind = getattr(lightning_spot, name)
    if (
        not isinstance(kind, type)
        or getattr(kind, "_is_protocol", False)
        or issubclass(kind, (errors.SpotError, SystemExit, LightningCLI))
    ):
        return
    text, arguments = inspect.getdoc(kind) or "", inspect.signature(kind).parameters
    own = _described(text, "Args")
    if refers := re.search(r":class:`~lightning_spot\.(\w+)` documents the arguments", text):
        documented = getattr(lightning_spot, refers[1])
        assert own == set()
        for given in arguments.values():
            same = inspect.signature(documented).parameters[given.name]
            assert (given.annotation, given.default) == (same.annotation, same.default)
        own = _described(inspect.getdoc(documented) or "", "Args") & arguments.keys()
    assert arguments.keys() - own - _described(text, "Attributes") == set()
    assert own - arguments.keys() == set()


def test_the_help_of_lightning_cli_describes_each_argument() -> None:
    parser = pytest.importorskip("jsonargparse").ArgumentParser()
    parser.add_class_arguments(lightning_spot.SpotCheckpoint, "spot")
    helps = {action.dest: str(action.help) for action in parser._actions}
    undescribed = {
        name for name, text in helps.items() if name.startswith("spot.") and text in ("", "None", "%(default)s")
    }
    arguments = inspect.signature(lightning_spot.SpotCheckpoint).parameters
    assert {f"spot.{name}" for name in arguments} <= helps.keys() - undescribed
    assert "in which the run is stored, such as" in helps["spot.dirpath"]


def _described(text: str, section: str) -> set[str]:
    """Names before the colons of a section; several may share one description."""
    body = re.search(rf"^{section}:\n((?: .*\n|\n)*)", f"{text}\n", re.MULTILINE)
    entries = re.findall(r"^    (\w+(?:,\s+\w+)*):", body[1] if body else "", re.MULTILINE)
    return {name for entry in entries for name in re.findall(r"\w+", entry)}


def test_what_is_printed_says_what_it_is() -> None:
    spot = lightning_spot.SpotCheckpoint("s3://bucket/run-1", interval=lightning_spot.EverySteps(5))
    assert repr(spot) == "SpotCheckpoint('s3://bucket/run-1')"
    assert repr(spot.snapshots) == "RemoteSnapshot('s3://bucket/run-1')"
    assert repr(lightning_spot.AutoResume("s3://bucket/run-1")) == "AutoResume('s3://bucket/run-1')"
    assert repr(spot.interval) == "EverySteps(n=5, max_overhead=None)"
    assert "_" not in repr(lightning_spot.EverySeconds(30))


def test_the_version_is_one() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["version"] == lightning_spot.__version__


def test_files_say_what_they_are_for() -> None:
    assert [str(path.relative_to(PACKAGE)) for path in SOURCES if not ast.get_docstring(_tree(path))] == []


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_servers_never_unpickle() -> None:
    assert {path.parent.name for path in NODES} == {"server", "protocol", "client", "http"}
    forbidden = {"pickle", "torch", "marshal", "shelve", "dill", "cloudpickle"}
    assert {path.name: found for path in NODES if (found := _imported(path) & forbidden)} == {}


def _imported(path: Path) -> set[str]:
    """Packages of which a file imports anything, anywhere in it."""
    return {
        alias.name.split(".")[0]
        for node in ast.walk(_tree(path))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in ([ast.alias(node.module or "")] if isinstance(node, ast.ImportFrom) else node.names)
    }


def test_the_environment_is_read_in_one_place() -> None:
    # The others hand the environment on to a process that they start.
    may = {PACKAGE / name for name in ("config.py", "client/starting.py", "cli/drill.py", "cli/supervise.py")}
    assert [path for path in SOURCES if path not in may and re.search(r"os\.environ|getenv", path.read_text())] == []


def test_all_json_comes_in_by_one_decoder() -> None:
    found = [
        str(path.relative_to(PACKAGE)) for path in SOURCES if re.search(r"json\.loads?\b|JSONDecoder", path.read_text())
    ]
    assert found == ["untrusted.py"]


def test_no_module_imports_itself_by_others() -> None:
    graphlib.TopologicalSorter({name: _modules_imported(path) - {name} for name, path in MODULES.items()}).prepare()


def _modules_imported(path: Path, *, also_types: bool = False) -> set[str]:
    """Modules of ours that a file imports, anywhere in it; those that only type checkers need, too, if asked for."""
    found: set[str] = set()

    def look(nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not also_types:
                look(node.orelse)
            elif isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                found.update(name if name in MODULES else str(node.module) for name in inner)
            else:
                look(ast.iter_child_nodes(node))

    look([_tree(path)])
    return found & MODULES.keys()


def test_a_module_with_one_importer_joins_it_unless_they_are_big() -> None:
    importers: dict[str, list[str]] = {name: [] for name in MODULES}
    for name, path in MODULES.items():
        for imported in _modules_imported(path, also_types=True) & MODULES.keys() - {name}:
            importers[imported].append(name)
    small = {
        name.removeprefix("lightning_spot.")
        for name, path in MODULES.items()
        if path.name != "__init__.py"
        and len(importers[name]) <= 1
        and sum(len(MODULES[each].read_text().splitlines()) for each in {name, *importers[name]}) <= MOST_LINES
    }
    assert small <= NAMED_BY_USERS


def test_no_two_modules_and_no_two_classes_have_one_name() -> None:
    modules = Counter(name.rpartition(".")[2] for name, path in MODULES.items() if not path.stem.startswith("_"))
    classes = Counter(
        node.name
        for path in SOURCES
        for node in _tree(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in (modules + classes).items() if count > 1] == []


def test_messages_have_keys_and_the_docs_list_them() -> None:
    """What a file logs for people goes through :mod:`lightning_spot.say`."""
    logged = {path: _logged(path) for path in SOURCES if path.name != "say.py"}
    documented = re.findall(
        r"^\| <a id=\"([\w-]+)\"></a>`\1` \| (\w+)", (REPOSITORY / "docs/reference/messages.md").read_text(), re.M
    )
    assert sorted(documented) == sorted({found for each in logged.values() for found in each if found[0]})
    unlike = {path.parent.name for path, each in logged.items() if any(not key for key, _ in each)}
    assert unlike == set()


def test_messages_are_short() -> None:
    """What a training says, and the text of an error, has at most 30 words; what stands in braces is one."""
    long = {
        f"{path.relative_to(PACKAGE)}: {text}"
        for path in SOURCES
        for text in _texts(_tree(path))
        if len(re.sub(r"{[^}]*}", "x", text).split()) > MOST_WORDS
    }
    assert long == set()


def _texts(tree: ast.Module) -> Iterator[str]:
    """Texts of messages and of errors, as far as they stand where they are used, or in a variable there."""
    named = {
        node.targets[0].id: text
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and (text := _text(node.value))
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("say", "recovered"):
            for argument in node.args[-1:]:
                yield named.get(argument.id, "") if isinstance(argument, ast.Name) else _text(argument)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield _text(node.exc.args[0])


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _logged(path: Path) -> set[tuple[str, str]]:
    """Key and level of each message in a file; without a key, one that is logged in some other way."""
    found = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name == "say" and "lightning_spot.say" in _modules_imported(path):
                assert isinstance(node.args[1], ast.Constant)
                found.add((str(node.args[1].value), ast.unparse(node.args[0]).removeprefix("logging.")))
            elif re.fullmatch(r"logger\.(info|warning|error|exception|log)|warnings\.warn|rank_zero_(info|warn)", name):
                found.add(("", name))
    return found


def test_the_changelog_names_the_formats_that_change_together() -> None:
    """A server of an earlier protocol would refuse manifests of a later format one by one, and keep nothing."""
    table = (REPOSITORY / "CHANGELOG.md").read_text().partition("### Formats")[2]
    named = tuple(int(re.search(rf"\| {what}[^|]*\| (\d+)", table)[1]) for what in ("`manifest", "protocol", "exact"))  # type: ignore[index]
    assert named == (MANIFEST_VERSION, PROTOCOL_VERSION, EXACT_VERSION)
    assert named[1] >= {4: 7, 5: 10}[named[0]]


def test_no_test_name_is_longer_than_60_characters() -> None:
    files = (REPOSITORY / "tests").rglob("*.py")
    names = [name for path in files for name in re.findall(r"\bdef (test_\w+)", path.read_text())]
    assert [name for name in names if len(name) > 60] == []


PRIVATE_ELSEWHERE = {
    "_OMEGACONF_AVAILABLE",
    "_TENSORBOARDX_AVAILABLE",
    "_foreach_copy_",
    "_rng_tracker",
    "_swap_models",
}


def test_no_test_patches_a_private_name_of_ours() -> None:
    """What a test changes is a seam: an argument, a public name, or what lies outside of the package."""
    patched = {
        f"{path.relative_to(REPOSITORY)}:{call.lineno}: {name}"
        for path in (REPOSITORY / "tests").rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("setattr", "delattr", "object", "patch")
        for given in call.args[:2]
        if isinstance(given, ast.Constant) and isinstance(given.value, str)
        if re.match(r"_[a-zA-Z]", name := given.value.rpartition(".")[2]) and name not in PRIVATE_ELSEWHERE
    }
    assert patched == set()
