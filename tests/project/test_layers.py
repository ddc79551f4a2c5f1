"""The direction of imports: lower layers know nothing of higher ones, and Lightning begins at a line."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from enum import Enum
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import nvalchemi_lightning

PACKAGE = "nvalchemi_lightning"
ROOT = Path(nvalchemi_lightning.__file__).parent

LAYERS = (
    {"_keywords", "_lazy", "errors", "stages", "context", "typing", "window"},
    {"specs", "strict_model", "runtime"},
    {"losses", "optim", "metrics", "neighbors", "data", "models"},
    {"hooks", "counters", "update", "feeding", "training_fn", "validation", "model_inputs", "recipe"}
    | {"batch_step", "checkpoint", "counted", "hooked", "progress", "random_states", "requests", "resume", "scalars"}
    | {"job_hooks", "lifecycle", "rehearsal", "strategy_extras", "strategy_spec", "stop_signals", "windowing"},
    # Lightning begins here.
    {
        "_lightning",
        "second_owners",
        "owner",
        "callbacks",
        "module",
        "module_checkpoint",
        "module_connection",
        "module_evaluation",
        "module_log",
        "datamodule",
    },
    {"strategy"},
    {"cli", "__main__"},
)
"""The parts of the package from the bottom to the top; a part may import its own layer and those below."""

LIGHTNING_BEGINS = 4
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}


class When(Enum):
    """When an import is executed."""

    LOADING = "when the module is loaded"
    CALLING = "when a function is called"
    CHECKING = "by type checkers alone"


class Import(NamedTuple):
    """One imported name."""

    line: int
    name: str
    when: When


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports(node: ast.AST, when: When = When.LOADING) -> Iterator[Import]:
    """Yield every import below ``node``; ``from a import b`` names ``a.b``."""
    if isinstance(node, ast.Import):
        yield from (Import(node.lineno, alias.name, when) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (Import(node.lineno, f"{node.module}.{alias.name}", when) for alias in node.names)
    elif is_type_checking(node):
        yield from (found for child in node.body for found in imports(child, When.CHECKING))
        yield from (found for child in node.orelse for found in imports(child, when))
    else:
        inside = When.CALLING if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else when
        yield from (found for child in ast.iter_child_nodes(node) for found in imports(child, inside))


def part(module: str) -> str:
    """Return the first part of a module's name below the package."""
    return module.split(".", maxsplit=2)[1]


def layer(module: str) -> int:
    """Return the layer of a module by the first part of its name below the package, or -1 if it has none."""
    return next((number for number, parts in enumerate(LAYERS) if part(module) in parts), -1)


def own_target(name: str) -> str | None:
    """Return the module of ours that an imported name belongs to, or None for other packages."""
    while name.partition(".")[0] == PACKAGE:
        if name in MODULES:
            return name
        name = name.rpartition(".")[0]
    return None


def found_in(module: str) -> list[Import]:
    return list(imports(ast.parse(MODULES[module].read_text(encoding="utf-8"))))


LAYERED = [module for module in MODULES if module != PACKAGE]


@pytest.mark.parametrize("module", LAYERED)
def test_imports_point_down(module: str) -> None:
    here = layer(module)
    for line, name, _ in found_in(module):
        target = own_target(name)
        if target is None:
            continue
        assert target != PACKAGE, f"{module}:{line} imports {name} from the public face; import it where it is defined"
        assert layer(target) <= here, f"{module}:{line} in layer {here} imports {target} of layer {layer(target)}"


@pytest.mark.parametrize("module", [module for module in LAYERED if layer(module) < LIGHTNING_BEGINS])
def test_no_lightning_below_the_line(module: str) -> None:
    runtime = [found for found in found_in(module) if found.when is not When.CHECKING]
    lines = [found.line for found in runtime if found.name.partition(".")[0] in LIGHTNING]
    assert not lines, f"{module} imports Lightning at lines {lines}, but stands below the line where it begins"


def cycle(graph: dict[str, set[str]]) -> str:
    """Return a cycle of a graph as text, or "" if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " -> ".join(error.args[1])
    return ""


def needs(module: str) -> set[str]:
    """Return the modules that a module imports; those that its functions import only if they are of another part."""
    found = [(own_target(name), when) for _, name, when in found_in(module)]
    return {
        target
        for target, when in found
        if target not in (None, PACKAGE)
        and (when is When.LOADING or (when is When.CALLING and part(target) != part(module)))
    }


def test_no_cycles() -> None:
    assert not cycle({module: needs(module) for module in LAYERED})


def test_a_cycle_is_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}).count("->") == 3
    assert cycle({"a": {"b"}, "b": {"c"}}) == ""


def test_every_module_has_a_layer() -> None:
    strays = [module for module in LAYERED if layer(module) < 0]
    assert not strays, f"give these modules their place in LAYERS of {Path(__file__).name}: {strays}"


def test_the_table_has_no_stale_parts() -> None:
    parts = {part(module) for module in LAYERED}
    stale = set().union(*LAYERS) - parts - {"typing"}  # its place is reserved
    assert not stale, f"LAYERS names parts that do not exist: {sorted(stale)}"


SAMPLE = """
import lightning.pytorch as pl
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from nvalchemi_lightning.strategy import TrainingStrategy
else:
    import zarr
def later():
    from nvalchemi_lightning import losses
"""


def test_the_parser_sees_every_kind_of_import() -> None:
    assert list(imports(ast.parse(SAMPLE))) == [
        Import(2, "lightning.pytorch", When.LOADING),
        Import(3, "typing.TYPE_CHECKING", When.LOADING),
        Import(5, "nvalchemi_lightning.strategy.TrainingStrategy", When.CHECKING),
        Import(7, "zarr", When.LOADING),
        Import(9, "nvalchemi_lightning.losses", When.CALLING),
    ]
