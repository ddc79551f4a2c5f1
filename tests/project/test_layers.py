"""The direction of imports: lower layers know nothing of higher ones, and Lightning begins at a line."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import nvalchemi_lightning

PACKAGE = "nvalchemi_lightning"
ROOT = Path(nvalchemi_lightning.__file__).parent

LAYERS = (
    {"errors", "stages", "context", "typing"},
    {"specs", "strict_model", "runtime"},
    {"losses", "optim", "metrics", "neighbors", "data", "models"},
    {"hooks", "counters", "update", "feeding", "training_fn", "validation", "model_inputs", "recipe"}
    | {"batch_step", "checkpoint", "counted", "progress", "requests", "scalars", "strategy_spec"},
    # Lightning begins here.
    {"_lightning", "second_owners", "owner", "callbacks", "module", "datamodule"},
    {"strategy"},
    {"cli"},
)
"""The parts of the package from the bottom to the top; a part may import its own layer and those below."""

LIGHTNING_BEGINS = 4
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}


class Import(NamedTuple):
    """One imported name: where it stands, what it names, and whether only a type checker executes it."""

    line: int
    name: str
    for_types: bool


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports(node: ast.AST, for_types: bool = False) -> Iterator[Import]:
    """Yield every import below ``node``, those inside functions too; ``from a import b`` names ``a.b``."""
    if isinstance(node, ast.Import):
        yield from (Import(node.lineno, alias.name, for_types) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (Import(node.lineno, f"{node.module}.{alias.name}", for_types) for alias in node.names)
    elif is_type_checking(node):
        yield from (found for child in node.body for found in imports(child, True))
        yield from (found for child in node.orelse for found in imports(child, for_types))
    else:
        yield from (found for child in ast.iter_child_nodes(node) for found in imports(child, for_types))


def layer(module: str) -> int:
    """Return the layer of a module by the first part of its name below the package, or -1 if it has none."""
    part = module.split(".", maxsplit=2)[1]
    return next((number for number, parts in enumerate(LAYERS) if part in parts), -1)


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
    lines = [
        found.line for found in found_in(module) if found.name.partition(".")[0] in LIGHTNING and not found.for_types
    ]
    assert not lines, f"{module} imports Lightning at lines {lines}, but stands below the line where it begins"


def test_no_cycles() -> None:
    graph = {
        module: {own_target(name) for _, name, for_types in found_in(module) if not for_types} - {None}
        for module in LAYERED
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_every_module_has_a_layer() -> None:
    strays = [module for module in LAYERED if layer(module) < 0]
    assert not strays, f"give these modules their place in LAYERS of {Path(__file__).name}: {strays}"


def test_the_table_has_no_stale_parts() -> None:
    parts = {module.split(".")[1] for module in LAYERED}
    stale = set().union(*LAYERS) - parts - {"cli", "typing"}  # their place is reserved
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
        Import(2, "lightning.pytorch", False),
        Import(3, "typing.TYPE_CHECKING", False),
        Import(5, "nvalchemi_lightning.strategy.TrainingStrategy", True),
        Import(7, "zarr", False),
        Import(9, "nvalchemi_lightning.losses", False),
    ]
