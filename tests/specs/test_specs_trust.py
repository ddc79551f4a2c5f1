"""The trust list: what a dotted path may reach, and that refusing has no side effects."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import nvalchemi_lightning.specs
from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError, UntrustedPathError
from nvalchemi_lightning.optim import OptimizerConfig
from nvalchemi_lightning.specs import (
    create_model_spec_from_json,
    dotted_path,
    own_path,
    resolve,
    trust,
    trusted_packages,
)

TRUST = sys.modules["nvalchemi_lightning.specs.trust"]
BUILT_IN = ("nvalchemi", "nvalchemi_lightning", "torch.nn", "torch.optim")


@pytest.fixture(autouse=True)
def fresh_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TRUST, "_added", {})


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Write a package whose import is visible: it leaves a file behind."""
    folder = tmp_path / "lab_models"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path / 'imported')!r}).touch()\n"
        "import os\nfrom functools import partial\nfrom torch.nn import Linear\nfrom subprocess import Popen\n"
        "from .net import net\n"
        "class Net(Linear):\n"
        "    @classmethod\n    def small(cls): return cls(1, 1)\n"
        "    @classmethod\n    def other(cls) -> 'Pair': return Pair()\n"
        "class Pair: pass\n"
        "def make() -> Net: return Net(1, 1)\n"
        "def count() -> int: return 1\n"
        "def bare(): return Net(1, 1)\n"
        "half = partial(make)\n"
        "pair = Pair()\n"
    )
    (folder / "net.py").write_text("def net() -> 'Missing': ...\n")
    (folder / "broken.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "lab_models"
    for name in [name for name in sys.modules if name.startswith("lab_models")]:
        del sys.modules[name]


def test_trusted_packages_lists_the_built_in_ones_then_those_added() -> None:
    assert trusted_packages() == BUILT_IN
    trust("my_lab.models", "my_lab.models")
    trust("other", "torch.nn")
    assert trusted_packages() == (*BUILT_IN, "my_lab.models", "other")


@pytest.mark.parametrize("name", ["", "my lab", "a..b", "import os;", ".models"])
def test_a_package_that_is_no_dotted_name_is_refused_and_nothing_added(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"is not a package; give a dotted name such as 'my_lab\.models'"):
        trust("fine", name)
    assert trusted_packages() == BUILT_IN


def test_built_in_paths_resolve_under_defining_and_public_names() -> None:
    assert resolve("torch.optim.adamw.AdamW", kind=torch.optim.Optimizer) is torch.optim.AdamW
    assert resolve("torch.optim.AdamW") is torch.optim.AdamW
    assert resolve("torch.optim.lr_scheduler.StepLR") is torch.optim.lr_scheduler.StepLR
    assert resolve("torch.nn.modules.linear.Linear", kind=nn.Module) is nn.Linear
    assert resolve("nvalchemi_lightning.specs.trust.resolve") is resolve


def test_a_path_outside_the_list_is_refused_before_the_import(package: str, tmp_path: Path) -> None:
    with pytest.raises(UntrustedPathError, match=r"'lab_models\.Net' lies outside .*trust\(\"lab_models\"\) first"):
        resolve(f"{package}.Net")
    assert not (tmp_path / "imported").exists()
    assert package not in sys.modules
    trust(package)
    assert resolve(f"{package}.Net", kind=nn.Linear).__name__ == "Net"
    assert (tmp_path / "imported").exists()


def test_trust_of_a_module_does_not_extend_to_its_package_or_to_like_names(package: str) -> None:
    trust(f"{package}.net")
    assert callable(resolve(f"{package}.net.net"))
    with pytest.raises(UntrustedPathError, match=r"lab_models\.Net"):
        resolve(f"{package}.Net")
    with pytest.raises(UntrustedPathError, match=r"lab_models\.network"):
        resolve(f"{package}.network.Net")


@pytest.mark.parametrize(
    ("path", "match"),
    [
        ("torch.save", "lies outside"),
        ("torch.load", "lies outside"),
        ("os.system", "lies outside"),
        ("builtins.eval", "lies outside"),
        ("__main__.x", "lies outside"),
        ("torch.nn.modules.module.warnings.warn", "leads through the imported module 'warnings'"),
        ("torch.nn.modules.module.torch.save", "leads through the imported module 'torch'"),
        ("torch.optim.optimizer.torch.os.system", "leads through the imported module 'torch'"),
        ("torch.optim.AdamW.__init__", "names Python's internals"),
        ("torch.optim.AdamW.__class__", "names Python's internals"),
        ("torch.nn.Linear.__init__.__globals__", "names Python's internals"),
        ("torch.optim.AdamW.mro", "defined in no Python module"),
        ("torch.nn.modules.module.OrderedDict", "defined in collections"),
        ("torch.nn.modules.module.itertools.chain", "leads through"),
        ("torch.nn.functional.linear", "defined in torch._C"),
        ("torch.nn.modules.module.Tensor", "outside the trusted packages"),
    ],
)
def test_attribute_walks_out_of_the_list_are_refused(path: str, match: str) -> None:
    with pytest.raises(UntrustedPathError, match=match):
        resolve(path)


def test_names_that_a_trusted_package_only_imports_are_refused(package: str) -> None:
    trust(package)
    with pytest.raises(UntrustedPathError, match="leads through the imported module 'os'"):
        resolve(f"{package}.os.system")
    with pytest.raises(UntrustedPathError, match=r"defined in subprocess"):
        resolve(f"{package}.Popen")
    with pytest.raises(UntrustedPathError, match="defined in functools"):
        resolve(f"{package}.half")
    assert resolve(f"{package}.Linear") is nn.Linear


def test_a_class_method_inherited_from_outside_is_refused() -> None:
    with pytest.raises(UntrustedPathError, match="defined in pydantic"):
        resolve("nvalchemi_lightning.optim.OptimizerConfig.model_validate_json")


@pytest.mark.parametrize("path", ["", "x", "torch.nn.", "torch..nn", "torch.nn.Linear()", "torch.nn.Lin ear", 7, None])
def test_what_is_no_dotted_path_is_refused(path: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"Could not resolve .*: give a dotted path such as 'torch\.optim\.AdamW'"
    ):
        resolve(path)


def test_missing_names_and_modules_say_so(package: str) -> None:
    trust(package, "not_there")
    with pytest.raises(ConfigurationError, match=r"torch\.optim has no 'AdamWW'; did you mean 'AdamW'"):
        resolve("torch.optim.AdamWW")
    with pytest.raises(
        ConfigurationError, match=r"Could not resolve 'not_there\.X': No module named 'not_there'"
    ) as caught:
        resolve("not_there.X")
    assert isinstance(caught.value.__cause__, ImportError)
    with pytest.raises(ConfigurationError, match=r"lab_models\.pair has no 'pear'"):
        resolve(f"{package}.pair.pear")
    with pytest.raises(ConfigurationError, match="No module named 'a_package_that_is_not_there'"):
        resolve(f"{package}.broken.X")


def test_the_kind_is_required() -> None:
    with pytest.raises(ConfigurationError, match=r"StepLR'> is not a class derived from Optimizer or Module"):
        resolve("torch.optim.lr_scheduler.StepLR", kind=(torch.optim.Optimizer, nn.Module))
    with pytest.raises(ConfigurationError, match=r"is not a class$"):
        resolve("nvalchemi_lightning.specs.trust.resolve", kind=object)
    with pytest.raises(UntrustedPathError, match=r"names '_BUILT_IN', a private part of"):
        resolve("nvalchemi_lightning.specs.__all__".replace("__all__", "trust._BUILT_IN"))


def test_something_that_cannot_be_called_is_refused(package: str) -> None:
    trust(package)
    with pytest.raises(ConfigurationError, match="is not something callable"):
        resolve(f"{package}.pair")


def test_factories_count_by_what_they_say_they_return(package: str) -> None:
    trust(package)
    for name in ("make", "Net.small", "Net"):
        assert resolve(f"{package}.{name}", kind=nn.Module, factory=True)
    with pytest.raises(ConfigurationError, match=r"is not a class derived from Module$"):
        resolve(f"{package}.make", kind=nn.Module)
    for name in ("Net.other", "count", "bare", "net.net", "Pair", "pair"):
        with pytest.raises(ConfigurationError, match=r"derived from Module \(a function counts when its return"):
            resolve(f"{package}.{name}", kind=nn.Module, factory=True)


# Names of the reference ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "own"),
    [
        ("nvalchemi.training.optimizers.OptimizerConfig", "nvalchemi_lightning.optim.OptimizerConfig"),
        (
            "nvalchemi.training.optimizers.OptimizerConfig.from_spec",
            "nvalchemi_lightning.optim.OptimizerConfig.from_spec",
        ),
        ("nvalchemi.training.optimizers.stepping.zero_gradients", "nvalchemi_lightning.optim.zero_gradients"),
        ("nvalchemi.training.optimizers.config", None),
        ("nvalchemi.training.optimizers.NotHere", None),
        ("nvalchemi.dynamics.NVE", None),
        ("nvalchemistry.training.OptimizerConfig", None),
        ("torch.nn.Linear", None),
    ],
)
def test_names_of_the_reference_lead_to_their_counterparts(path: str, own: str | None) -> None:
    assert own_path(path) == own


def test_a_counterpart_is_resolved_and_its_name_in_the_file_is_kept() -> None:
    form = {"cls_path": "nvalchemi.training.optimizers.OptimizerConfig", "timestamp": "t", "lr": 0.1}
    spec = create_model_spec_from_json(form)
    assert spec.target is OptimizerConfig
    assert spec.model_dump()["cls_path"] == form["cls_path"]


def test_packages_that_are_missing_here_have_no_counterparts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRUST._COUNTERPARTS, "nvalchemi.rest", "nvalchemi_lightning.not_there")
    assert own_path("nvalchemi.rest.Thing") is None


@pytest.fixture
def reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a stand-in for the reference with one class and one class method that unpickles."""
    (tmp_path / "nvalchemi").mkdir()
    (tmp_path / "nvalchemi" / "__init__.py").touch()
    (tmp_path / "nvalchemi" / "demo.py").write_text(
        "class Demo:\n    @classmethod\n    def from_checkpoint(cls, path): raise SystemExit\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "nvalchemi"]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "nvalchemi"]:
        del sys.modules[name]


@pytest.mark.usefixtures("reference")
def test_of_the_reference_itself_only_classes_are_built_unless_it_is_trusted() -> None:
    assert resolve("nvalchemi.demo.Demo", kind=object).__name__ == "Demo"
    with pytest.raises(
        UntrustedPathError, match=r"is not a class; unless you call nvalchemi_lightning\.trust\('nvalchemi'\)"
    ):
        resolve("nvalchemi.demo.Demo.from_checkpoint")
    trust("nvalchemi")
    assert callable(resolve("nvalchemi.demo.Demo.from_checkpoint"))


# Writing a path -----------------------------------------------------------------------------------------------------


def test_dotted_path_names_the_defining_module() -> None:
    assert dotted_path(torch.optim.Adam) == "torch.optim.adam.Adam"
    assert dotted_path(resolve) == "nvalchemi_lightning.specs.trust.resolve"
    assert dotted_path(OptimizerConfig.from_spec) == "nvalchemi_lightning.optim.config.OptimizerConfig.from_spec"


@pytest.mark.parametrize("target", [lambda: 0, test_dotted_path_names_the_defining_module.__get__(3), 5, nn.ReLU()])
def test_dotted_path_refuses_what_cannot_be_imported(target: Any) -> None:
    with pytest.raises(ConfigurationTypeError, match="is not an importable callable: a spec stores a dotted path"):
        dotted_path(target)


# Hostile files ------------------------------------------------------------------------------------------------------


def specs_in(form: Any) -> Iterator[dict[str, Any]]:
    if isinstance(form, dict):
        if "cls_path" in form:
            yield form
        for item in form.values():
            yield from specs_in(item)
    elif isinstance(form, list):
        for item in form:
            yield from specs_in(item)


@pytest.mark.parametrize("name", ["evil_hook", "evil_loss", "evil_model"])
def test_hostile_samples_are_refused_and_run_nothing(
    shared: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = json.loads((shared / "samples" / "cli" / f"{name}.json").read_text())
    hostile = [spec for spec in specs_in(job) if spec["cls_path"] == "subprocess.getoutput"]
    assert hostile
    for spec in hostile:
        with pytest.raises(UntrustedPathError, match=r"'subprocess\.getoutput' lies outside the trusted packages"):
            create_model_spec_from_json(spec)
    assert list(tmp_path.iterdir()) == []


def test_a_hostile_value_deep_inside_is_refused_without_running(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    inner = {"cls_path": "pathlib.Path.touch", "self": str(mark)}
    for form in (
        {"cls_path": "torch.nn.Linear", "in_features": inner, "out_features": 1},
        {"cls_path": "torch.nn.modules.container.ModuleList", "modules": [inner]},
        {"cls_path": "torch.optim.SGD", "lr": {"__callable__": "os.system"}},
        {"cls_path": "torch.optim.SGD", "lr": {"__type__": "subprocess.Popen"}},
        {"cls_path": "torch.optim.SGD", "lr": {"__enum__": "http.HTTPStatus", "value": 200}},
    ):
        with pytest.raises(UntrustedPathError, match="lies outside"):
            create_model_spec_from_json(form)
    assert not mark.exists()


@settings(deadline=None, max_examples=200)
@given(
    path=st.lists(
        st.sampled_from(
            ["torch", "nn", "optim", "modules", "module", "os", "sys", "Linear", "system", "_C", "load", "x"]
        ),
        min_size=1,
        max_size=5,
    ).map(".".join)
)
def test_whatever_resolves_is_defined_in_a_trusted_package(path: str) -> None:
    try:
        found = resolve(path)
    except (UntrustedPathError, ConfigurationError):
        return
    assert any(found.__module__.startswith(package) for package in BUILT_IN)


def test_importing_the_specs_loads_neither_lightning_nor_the_losses() -> None:
    code = (
        "import sys, nvalchemi_lightning.specs\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('lightning', 'ase', 'zarr')])"
    )
    root = Path(nvalchemi_lightning.specs.__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
