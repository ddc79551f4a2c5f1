"""What lies in a folder of checkpoints, and what comes back from it."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import checkpoint_rigs as rigs
import numpy as np
import pytest
import torch
from checkpoint_rigs import (
    Counting,
    Net,
    Strategy,
    adam,
    assert_same,
    contents,
    named_strategy,
    rebuilt,
    run,
    state_of,
    strategy,
)
from torch import nn

from nvalchemi_lightning.checkpoint import load, restore, save
from nvalchemi_lightning.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    LabelNotFoundError,
    StoreError,
    UntrustedPathError,
)
from nvalchemi_lightning.optim import OptimizerConfig
from nvalchemi_lightning.strategy import TrainingStrategy


class Stateful:
    """A hook that says what it is told to say."""

    stage = None
    frequency = 1

    def __init__(self, state: Any) -> None:
        self.state = state

    def _runs_on_stage(self, stage: Any) -> bool:
        return False

    def __call__(self, ctx: Any, stage: Any) -> None: ...

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_the_layout_is_that_of_the_reference(root: Path) -> None:
    assert save(run(strategy(hooks=[Counting()])), root) == 0
    assert sorted(contents(root)) == [
        "hooks/checkpoints/0.pt",
        "lightning/checkpoints/0.json",
        "lightning/checkpoints/0.pt",
        "manifest.json",
        "models/main/checkpoints/0.pt",
        "models/main/spec.json",
        "optimizers/main_optimizer/checkpoints/0.pt",
        "optimizers/main_optimizer/spec.json",
        "schedulers/main_scheduler/checkpoints/0.pt",
        "schedulers/main_scheduler/spec.json",
        "strategy.json",
        "strategy/checkpoints/0.json",
    ]
    manifest = json.loads((root / "manifest.json").read_text())
    assert manifest == {
        "schema_version": 1,
        "checkpoint_index": 0,
        "models": ["main"],
        "optimizers": ["main_optimizer"],
        "schedulers": ["main_scheduler"],
        "associations": {
            "main": {
                "optimizers": ["main_optimizer"],
                "schedulers": ["main_scheduler"],
                "scheduler_optimizers": {"main_scheduler": "main_optimizer"},
                "optimizer_parameter_names": {
                    "main_optimizer": [
                        "main.layers.0.weight",
                        "main.layers.0.bias",
                        "main.layers.2.weight",
                        "main.layers.2.bias",
                    ]
                },
            }
        },
    }
    assert (root / "strategy.json").read_text() == (root / "strategy/checkpoints/0.json").read_text()


def test_names_with_several_optimizers_and_models(root: Path) -> None:
    save(run(named_strategy()), root)
    manifest = json.loads((root / "manifest.json").read_text())
    assert manifest["models"] == ["student", "teacher"]
    assert manifest["optimizers"] == ["student_optimizer_0", "student_optimizer_1"]
    assert manifest["schedulers"] == ["student_scheduler_0"]
    assert manifest["associations"]["student"]["scheduler_optimizers"] == {"student_scheduler_0": "student_optimizer_0"}


def test_names_of_the_reference_are_written_and_ours_are_read(root: Path) -> None:
    save(strategy(cls=TrainingStrategy), root)
    recipe = json.loads((root / "strategy.json").read_text())
    assert recipe["strategy_cls"] == "nvalchemi.training.strategy.TrainingStrategy"
    assert recipe["training_fn"] == "nvalchemi.training.strategy.default_training_fn"
    assert recipe["loss_fn_spec"]["cls_path"] == "nvalchemi.training.losses.composition.ComposedLossFunction"
    assert recipe["loss_fn_spec"]["components"][0]["cls_path"] == "nvalchemi.training.losses.terms.EnergyMSELoss"
    assert recipe["optimizer_configs"]["main"][0]["cls_path"] == "nvalchemi.training.optimizers.OptimizerConfig"
    assert json.loads((root / "optimizers/main_optimizer/spec.json").read_text())["cls_path"] == "torch.optim.adam.Adam"


def test_the_record_lists_every_file_with_its_hash(root: Path) -> None:
    save(strategy(), root)
    record = json.loads((root / "lightning/checkpoints/0.json").read_text())
    assert record["manifest"] == json.loads((root / "manifest.json").read_text())
    assert record["version"]
    for name, digest in record["files"].items():
        assert hashlib.sha256((root / name).read_bytes()).hexdigest() == digest


def test_b08_every_tensor_file_is_safe_to_load(root: Path) -> None:
    """B08: no file needs anything beyond ``weights_only=True``."""
    save(run(named_strategy(hooks=[Counting()])), root)
    files = sorted(root.rglob("*.pt"))
    assert len(files) == 7
    for path in files:
        assert torch.load(path, weights_only=True)


@pytest.mark.parametrize("make", [strategy, named_strategy], ids=["single", "named"])
def test_round_trip_of_everything(root: Path, make: Any) -> None:
    hook = Counting()
    what = run(make(hooks=[hook]))
    save(what, root)
    again_hook = Counting()
    again = rebuilt(root, hooks=[again_hook])
    assert_same(state_of(again), state_of(what))
    assert again_hook.seen == hook.seen == 3
    live_hook = Counting()
    live = make(seed=5, hooks=[live_hook]) if make is strategy else make(hooks=[live_hook])
    found = restore(live, root)
    assert_same(state_of(live), state_of(what))
    assert live_hook.seen == 3
    assert found["checkpoint_index"] == 0
    assert found["source"] == {"format": "native", "path": str(root)}
    assert found["strategy"] is live


def test_the_methods_of_a_strategy_lead_here(root: Path) -> None:
    what = run(strategy())
    assert what.save_checkpoint(root) == 0
    assert what.save_checkpoint(root, checkpoint_index=4) == 4
    again = Strategy.load_checkpoint(root, 4, num_steps=5)
    assert again.num_steps == 5
    assert_same(state_of(again), state_of(what))
    live = strategy(seed=3)
    assert live.restore_checkpoint(root)["checkpoint_index"] == 4
    assert_same(state_of(live), state_of(what))


@pytest.mark.parametrize("resume", ["load", "restore"])
def test_an_unshuffled_run_resumes_bit_for_bit(root: Path, resume: str) -> None:
    """Steps 1 to 3, a checkpoint, and steps 4 to 8 in another object equal steps 1 to 8."""
    whole = run(strategy(num_steps=8))
    save(run(strategy(num_steps=3)), root)
    again = rebuilt(root, num_steps=8) if resume == "load" else strategy(seed=9, num_steps=8)
    if resume == "restore":
        restore(again, root)
    assert again.step_count == 3
    assert_same(state_of(run(again)), state_of(whole))


def test_optimizers_that_were_never_used_are_saved_too(root: Path) -> None:
    save(strategy(), root)
    assert rebuilt(root).optimizers()["main"][0][0].param_groups[0]["lr"] == 0.01


def test_parameters_that_train_only_during_a_run_are_saved_and_restored(root: Path) -> None:
    def frozen() -> Any:
        what = strategy(models=Net())
        what.models["main"].requires_grad_(False)
        what.set_force_trainable_parameter_filter(["main.layers.2.weight"])
        return what

    save(frozen(), root)
    names = json.loads((root / "manifest.json").read_text())["associations"]["main"]["optimizer_parameter_names"]
    assert names == {"main_optimizer": ["main.layers.2.weight"]}
    live = frozen()
    restore(live, root)
    assert not any(parameter.requires_grad for parameter in live.models["main"].parameters())


def test_dtypes_come_from_the_checkpoint(root: Path) -> None:
    class_default = Net().float()
    save(strategy(models=class_default), root)
    assert rebuilt(root).models["main"].layers[0].weight.dtype == torch.float32


def test_indices_count_on_and_older_slots_can_be_filled(root: Path) -> None:
    what = strategy()
    assert [save(what, root) for _ in range(3)] == [0, 1, 2]
    run(what)
    assert save(what, root, checkpoint_index=1) == 1
    assert json.loads((root / "manifest.json").read_text())["checkpoint_index"] == 2
    assert json.loads((root / "strategy.json").read_text())["runtime_state"]["step_count"] == 0
    assert [rebuilt(root, index).step_count for index in (0, 1, 2, -1)] == [0, 3, 0, 0]
    assert save(what, root) == 3
    assert save(what, root, checkpoint_index=7) == 7
    assert rebuilt(root).step_count == 3
    assert save(what, root) == 8


def test_overwriting_a_slot_removes_what_is_no_longer_part_of_it(root: Path) -> None:
    save(strategy(hooks=[Counting()]), root)
    save(strategy(), root, checkpoint_index=0)
    assert not (root / "hooks/checkpoints/0.pt").exists()
    assert rebuilt(root).hooks == []


@pytest.mark.parametrize("index", [-2, 1.0, True, "0"])
def test_wrong_indices(root: Path, index: Any) -> None:
    with pytest.raises(ConfigurationError, match="checkpoint_index must be an integer >= 0, or -1"):
        save(strategy(), root, checkpoint_index=index)
    assert not root.exists()
    with pytest.raises(ConfigurationError, match="checkpoint_index must be an integer >= 0, or -1"):
        rebuilt(root, index)


def test_a_changed_learning_rate_does_not_block_saving(root: Path) -> None:
    save(run(strategy()), root)
    first = (root / "models/main/spec.json").read_bytes()
    save(strategy(optimizer_configs=adam(lr=0.5)), root)
    assert json.loads((root / "optimizers/main_optimizer/spec.json").read_text())["lr"] == 0.5
    assert (root / "models/main/spec.json").read_bytes() == first
    assert rebuilt(root, 0).optimizer_configs["main"][0].lr == 0.01
    assert rebuilt(root, 1).optimizer_configs["main"][0].lr == 0.5


def test_another_architecture_in_the_same_folder_leaves_older_ones_loadable(root: Path) -> None:
    save(strategy(models=Net(2)), root)
    save(strategy(models=Net(3)), root)
    assert [rebuilt(root, index).models["main"].hidden for index in (0, 1)] == [2, 3]


def test_restore_brings_back_the_learning_rate_of_the_checkpoint(root: Path) -> None:
    save(run(strategy()), root)
    live = strategy(optimizer_configs=adam(lr=0.5))
    restore(live, root)
    assert live.optimizers()["main"][0][0].param_groups[0]["lr"] == 0.005


def test_a_new_optimizer_config_at_load_time_wins(root: Path) -> None:
    what = run(strategy())
    save(what, root)
    same = rebuilt(root, optimizer_configs=adam())
    assert_same(state_of(same), state_of(what))
    faster = rebuilt(root, optimizer_configs=adam(lr=0.5))
    optimizer, scheduler = faster.optimizers()["main"][0]
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert scheduler.last_epoch == 0
    assert_same(state_of(faster)["main0"]["moments"], state_of(what)["main0"]["moments"])
    two = rebuilt(root, optimizer_configs=[adam(), adam()])
    assert not two.optimizers()["main"][0][0].state
    other = rebuilt(root, optimizer_configs=OptimizerConfig(optimizer_cls=torch.optim.SGD, lr=0.1))
    assert not other.optimizers()["main"][0][0].state


def test_map_location_replaces_the_devices(root: Path) -> None:
    save(strategy(), root)
    recipe = root / "strategy/checkpoints/0.json"
    (root / "lightning/checkpoints/0.json").unlink()
    recipe.write_text(recipe.read_text().replace('"cpu"', '"cuda:7"'))
    assert rebuilt(root, map_location="cpu").devices == [torch.device("cpu")]


def test_live_models_get_the_weights(root: Path) -> None:
    save(run(strategy()), root)
    model = Net()
    again = rebuilt(root, models=model)
    assert again.models["main"] is model
    assert_same(state_of(again), state_of(rebuilt(root)))
    with pytest.raises(ConfigurationError, match=r"models= has the models \['other'\], the checkpoint \['main'\]"):
        rebuilt(root, models={"other": model})


def test_what_cannot_be_rebuilt_is_not_saved(root: Path) -> None:
    """B38: nothing is written for a model without a recipe."""
    model = Net()
    del model.hidden
    with pytest.raises(
        ConfigurationError,
        match=r"Cannot save strategy checkpoint because model spec generation failed for .*\['main'\]: .*hidden",
    ):
        save(strategy(models=model), root)
    assert not root.exists()


def test_model_names_must_be_folder_names(root: Path) -> None:
    what = strategy(models={"../x": Net()}, training_fn=rigs.named_training_fn, optimizer_configs={"../x": [adam()]})
    with pytest.raises(ConfigurationError, match=r"the model name '../x' cannot be a folder name"):
        save(what, root)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"path": Path("x")}}, r"hook Stateful:0\['a'\]\['path'\] is a (Posix|Windows)Path.*weights_only=True"),
        ({"a": [np.zeros(2)]}, r"hook Stateful:0\['a'\]\[0\] is a ndarray"),
        ({"a": OrderedDict(f=len)}, r"hook Stateful:0\['a'\]\['f'\] is a builtin_function_or_method"),
        ({Path("x"): 1}, r"hook Stateful:0 has the key"),
    ],
)
def test_b12_state_that_safe_loading_refuses_is_refused_at_save(root: Path, state: Any, message: str) -> None:
    """B-12 of the reference: it saves such state and can never load the checkpoint again."""
    with pytest.raises(ConfigurationTypeError, match=message):
        save(strategy(hooks=[Stateful(state)]), root)
    assert not root.exists()


def test_safe_state_of_every_kind_comes_back(root: Path) -> None:
    state = {
        "numbers": [1, 2.5, True, None, 1j],
        "numpy": np.float64(0.1),
        "nested": {"tuple": (1, (2,)), 3: "three", "set": {1}},
        "torch": [torch.float64, torch.device("cpu"), torch.Size([1, 2])],
        "bytes": b"x",
        "half": torch.ones(2, dtype=torch.bfloat16, requires_grad=True),
    }
    save(strategy(hooks=[Stateful(state)]), root)
    hook = Stateful({})
    rebuilt(root, hooks=[hook])
    assert hook.state["half"].dtype == torch.bfloat16
    del state["half"], hook.state["half"]
    assert hook.state == state


def test_hook_states_are_matched_by_class_and_occurrence(root: Path) -> None:
    save(strategy(hooks=[Stateful({"n": 1}), Counting(), Stateful({"n": 2})]), root)
    keys = torch.load(root / "hooks/checkpoints/0.pt", weights_only=True)
    assert set(keys) == {
        "test_checkpoint_folder.Stateful:0",
        "test_checkpoint_folder.Stateful:1",
        "checkpoint_rigs.Counting:0",
    }
    hooks = [Stateful({}), Counting(), Stateful({})]
    rebuilt(root, hooks=hooks)
    assert [hooks[0].state, hooks[2].state] == [{"n": 1}, {"n": 2}]


def test_b96_hooks_may_come_and_go_with_a_word(root: Path) -> None:
    """B96: a hook without saved state begins anew; saved state without a hook is named."""
    save(strategy(hooks=[Counting()]), root)
    with pytest.warns(UserWarning, match=r"states of hooks that are not there: \['checkpoint_rigs.Counting:0'\]"):
        rebuilt(root)
    save(strategy(), root)
    with pytest.warns(UserWarning, match=r"no state of the hook checkpoint_rigs.Counting:0, which begins anew"):
        rebuilt(root, hooks=[Counting()])


def test_a_hook_inside_a_hook_keeps_its_state(root: Path) -> None:
    outer = Stateful({})
    outer.hooks = [Counting()]  # type: ignore[attr-defined]
    outer.hooks[0].seen = 4  # type: ignore[attr-defined]
    save(strategy(hooks=[outer]), root)
    assert "checkpoint_rigs.Counting:0" in torch.load(root / "hooks/checkpoints/0.pt", weights_only=True)


def test_compiled_submodules_leave_no_mark(root: Path) -> None:
    plain, compiled = Net(), Net()
    compiled.layers[0] = torch.compile(compiled.layers[0], backend="eager")
    compiled.load_state_dict({k.replace("layers.0", "layers.0._orig_mod"): v for k, v in plain.state_dict().items()})
    save(strategy(models=compiled), root)
    state = torch.load(root / "models/main/checkpoints/0.pt", weights_only=True)
    assert_same(dict(state), dict(plain.state_dict()))
    restore(strategy(models=compiled), root)
    restore(strategy(models=plain), root)


def test_a_sharded_model_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Net, "__module__", "torch.distributed.fsdp")
    with pytest.raises(ConfigurationError, match="not an importable callable"):
        save(strategy(), root)
    from nvalchemi_lightning.checkpoint.states import model_state

    with pytest.raises(NotImplementedError, match=r"Net is sharded .* torch.distributed.checkpoint"):
        model_state(Net())


def test_step_epoch_and_final_are_looked_up(root: Path) -> None:
    for counters in (
        {"step_count": 2, "batch_count": 2, "epoch_step_count": 2},
        {"step_count": 4, "batch_count": 4, "epoch_step_count": 4},
        {"step_count": 5, "batch_count": 5, "epoch_count": 1},
        {"step_count": 7, "batch_count": 7, "epoch_count": 1, "epoch_step_count": 2},
    ):
        save(strategy(**counters), root)
    assert rebuilt(root / "step_4").epoch_step_count == 4
    assert rebuilt(root / "epoch_1").step_count == 5
    assert rebuilt(root / "final").step_count == 7
    live = strategy()
    assert restore(live, root / "step_2")["checkpoint_index"] == 0
    save(strategy(step_count=2, batch_count=9), root)
    assert rebuilt(root / "step_2").batch_count == 9
    with pytest.raises(
        FileNotFoundError, match=r"no checkpoint step_3; it has step_2, step_4, step_5, epoch_1, step_7"
    ):
        rebuilt(root / "step_3")
    with pytest.raises(FileNotFoundError, match=r"no checkpoint epoch_2"):
        rebuilt(root / "epoch_2")
    with pytest.raises(ConfigurationError, match=r"names a checkpoint already, so checkpoint_index=0 contradicts it"):
        rebuilt(root / "step_2", 0)


def test_a_folder_may_be_called_final(tmp_path: Path) -> None:
    assert save(strategy(), tmp_path / "final") == 0
    assert rebuilt(tmp_path / "final").step_count == 0


def test_missing_folders_and_indices(root: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"No manifest.json found in .*checkpoints"):
        rebuilt(root)
    with pytest.raises(FileNotFoundError, match=r"No manifest.json found in"):
        rebuilt(root / "final")
    with pytest.raises(FileNotFoundError, match=r"no checkpoint step_1; it has none"):
        rebuilt(root / "step_1")
    save(strategy(), root)
    with pytest.raises(FileNotFoundError, match=r"has no checkpoint 4; it has \[0\]"):
        rebuilt(root, 4)


def test_a_newer_schema_is_refused_for_reading_and_writing(root: Path) -> None:
    save(strategy(), root)
    manifest = json.loads((root / "manifest.json").read_text())
    (root / "manifest.json").write_text(json.dumps({**manifest, "schema_version": 2}))
    for act in (lambda: rebuilt(root), lambda: save(strategy(), root)):
        with pytest.raises(ConfigurationError, match=r"schema version 2 is newer than supported \(1\)"):
            act()
    del manifest["schema_version"]
    (root / "manifest.json").write_text(json.dumps(manifest))
    assert rebuilt(root).step_count == 0


def unchanged(live: TrainingStrategy, root: Path, error: type[Exception], message: str) -> None:
    """Restoring fails and leaves the strategy as it was."""
    before = state_of(live)
    with pytest.raises(error, match=message):
        restore(live, root)
    assert_same(state_of(live), before)


def test_components_that_the_live_strategy_lacks_are_named(root: Path) -> None:
    save(run(named_strategy()), root)
    unchanged(
        strategy(), root, LabelNotFoundError, r"model\(s\) not present .*: \['student', 'teacher'\]; .*\['main'\]"
    )
    fewer = named_strategy(optimizer_configs={"student": [adam()]})
    unchanged(
        fewer, root, LabelNotFoundError, r"optimizer\(s\) not present in the live strategy: \['student_optimizer_0'"
    )
    plain = [adam(scheduler_cls=None, scheduler_kwargs={}), OptimizerConfig(lr=1e-3)]
    unscheduled = named_strategy(optimizer_configs={"student": plain})
    unchanged(unscheduled, root, LabelNotFoundError, r"scheduler\(s\) not present .*: \['student_scheduler_0'\]")


def test_damaged_counters_are_refused_before_anything_changes(root: Path) -> None:
    save(run(strategy()), root)
    tampered(root, lambda r: r.update(runtime_state={"step_count": -1}))
    unchanged(strategy(), root, ConfigurationError, "runtime_state: step_count must be an integer >= 0")


def test_a_hook_without_anything_to_say_is_left_alone(root: Path) -> None:
    save(strategy(), root)
    rebuilt(root, hooks=[Stateful({})])


def test_further_live_models_are_left_alone(root: Path) -> None:
    save(run(named_strategy()), root)
    models = {"student": Net(3), "teacher": Net(2), "third": Net(1)}
    before = {key: value.clone() for key, value in models["third"].state_dict().items()}
    restore(named_strategy(models=models), root)
    assert_same(dict(models["third"].state_dict()), before)


def test_models_that_do_not_fit_are_refused_before_anything_changes(root: Path) -> None:
    save(run(strategy()), root)
    wider = r"models\['main'\] does not fit: layers.0.weight has shape \(5, 3\), in the checkpoint shape \(4, 3\)"
    unchanged(strategy(models=Net(5)), root, ConfigurationError, wider)
    extended = Net()
    extended.head = nn.Linear(1, 1)
    unchanged(
        strategy(models=extended), root, ConfigurationError, r"the checkpoint lacks \['head.bias', 'head.weight'\]"
    )


def test_moments_never_land_on_another_parameter(root: Path) -> None:
    save(run(strategy()), root)
    partly = strategy()
    partly.models["main"].layers[0].weight.requires_grad_(False)
    message = (
        r"main_optimizer does not train the parameters of the checkpoint \(added: \[\], removed: \['main.layers.0.w"
    )
    unchanged(partly, root, ConfigurationError, message)
    manifest = json.loads((root / "manifest.json").read_text())
    manifest["associations"]["main"]["optimizer_parameter_names"]["main_optimizer"].reverse()
    (root / "manifest.json").write_text(json.dumps(manifest))
    (root / "lightning/checkpoints/0.json").unlink()
    unchanged(strategy(), root, ConfigurationError, r"the same parameters in another order")
    del manifest["associations"]
    (root / "manifest.json").write_text(json.dumps(manifest))
    unchanged(partly, root, ConfigurationError, r"parameter groups of \[3\] parameters, in the checkpoint \[4\]")


def test_a_folder_of_components_is_no_strategy(shared: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"requires a checkpoint saved from a TrainingStrategy"):
        rebuilt(shared / "samples/ckpt_components")
    with pytest.raises(ConfigurationError, match=r"requires a checkpoint saved from a TrainingStrategy"):
        restore(strategy(), shared / "samples/ckpt_components")


def tampered(root: Path, change: Any) -> None:
    """Change the recipe of checkpoint 0, as whoever can write files could."""
    path = root / "strategy/checkpoints/0.json"
    recipe = json.loads(path.read_text())
    change(recipe)
    path.write_text(json.dumps(recipe))
    (root / "lightning/checkpoints/0.json").unlink()


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["model_specs"].update(main={"cls_path": "os.mkdir", "path": "evil"}),
        lambda r: r["model_specs"].update(
            main={"cls_path": "nvalchemi_lightning.checkpoint.files.os.mkdir", "path": "evil"}
        ),
        lambda r: r["model_specs"]["main"].update(hidden={"cls_path": "os.mkdir", "path": "evil"}),
        lambda r: r.update(strategy_cls="os.mkdir"),
        lambda r: r.update(training_fn="os.mkdir"),
        lambda r: r.update(loss_fn_spec={"cls_path": "os.mkdir", "path": "evil"}),
        lambda r: r["optimizer_configs"]["main"][0].update(optimizer_cls="os.mkdir"),
        lambda r: r["optimizer_configs"].update(main=[{"cls_path": "os.mkdir", "path": "evil"}]),
    ],
)
def test_evil_recipes_never_run(root: Path, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """B-27 of the reference: a recipe may name any callable there."""
    save(strategy(), root)
    tampered(root, change)
    monkeypatch.chdir(root.parent)
    with pytest.raises((UntrustedPathError, ConfigurationError), match=r"os\.mkdir|trusted|imported module"):
        rebuilt(root)
    assert not (root.parent / "evil").exists()


def test_a_model_outside_the_trusted_packages_needs_trust_or_a_live_model(root: Path) -> None:
    save(strategy(), root)
    tampered(root, lambda r: r["model_specs"]["main"].update(cls_path="my_lab.Net"))
    with pytest.raises(
        UntrustedPathError, match=r'model_specs\[.main.\]: .*trust\("my_lab"\).*models=\{.main.: model\}'
    ):
        rebuilt(root)
    assert rebuilt(root, models=Net()).step_count == 0


def test_a_record_cannot_lead_out_of_the_folder(root: Path) -> None:
    save(strategy(), root)
    path = root / "lightning/checkpoints/0.json"
    record = json.loads(path.read_text())
    for name in ("../outside.pt", "/outside.pt"):
        path.write_text(json.dumps({**record, "files": {name: "0"}}))
        with pytest.raises(StoreError, match="is no file of checkpoint 0"):
            rebuilt(root, 0)


def test_a_saved_class_that_is_not_asked_for_is_refused(root: Path) -> None:
    save(strategy(cls=TrainingStrategy), root)
    with pytest.raises(ConfigurationError, match=r"strategy_cls: .*is not a class derived from Strategy"):
        load(Strategy, root)


def test_a_recipe_without_its_weights_is_refused(root: Path) -> None:
    save(named_strategy(), root)
    (root / "models/teacher/checkpoints/0.pt").unlink()
    (root / "lightning/checkpoints/0.json").unlink()
    manifest = json.loads((root / "manifest.json").read_text())
    (root / "manifest.json").write_text(json.dumps({**manifest, "models": ["student"]}))
    with pytest.raises(ConfigurationError, match=r"the recipe has the models \['student', 'teacher'\], the checkpoint"):
        rebuilt(root)


def test_every_name_of_the_reference_leads_to_ours_and_back() -> None:
    from nvalchemi_lightning.checkpoint.reference_names import _REFERENCE_NAMES, in_own_names, in_reference_names

    for own, reference in _REFERENCE_NAMES.items():
        path = f"nvalchemi_lightning.{own}"
        assert in_reference_names([{"cls_path": path}]) == [{"cls_path": reference}]
        found = in_own_names(reference)
        assert found in (path, reference) or own == "recipe.TrainingRecipe"
        if own.startswith(("losses", "optim", "strategy", "training_fn")):
            assert found == path
    assert in_own_names("nvalchemi.data.FIELDS") == "nvalchemi.data.FIELDS"
    assert in_own_names("my_lab.Hook") == "my_lab.Hook"
    assert in_own_names("nvalchemi.training.hooks.nothing") == "nvalchemi.training.hooks.nothing"


def test_a_model_must_not_leave_its_folder(root: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"the model name '\.\.' cannot be a folder name"):
        save(strategy(models={"..": Net()}, optimizer_configs={"..": adam()}, training_fn=parent_training_fn), root)
    assert not root.exists()


def parent_training_fn(models: Any, batch: Any) -> Any:
    """Train the model of an odd name."""
    return {"predicted_energy": models[".."](batch)["energy"]}
