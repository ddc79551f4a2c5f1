"""``stages``: the table, and the order of a job file's hooks, without importing or building what is foreign."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_rigs import run_here

from nvalchemi_lightning.errors import ConfigurationError, UntrustedPathError
from nvalchemi_lightning.hooks import TrainingUpdateHook
from nvalchemi_lightning.job_hooks import job_lifecycle
from nvalchemi_lightning.specs import trust
from nvalchemi_lightning.stages import STAGES, TrainingStage


@pytest.fixture(autouse=True)
def _nothing_else_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["nvalchemi_lightning.specs.trust"], "_added", {})


class Counter:
    """A hook of the user's own that must not be built."""

    stage = TrainingStage.AFTER_EPOCH
    frequency = 1

    def __init__(self) -> None:
        raise AssertionError("built")


class Policy(TrainingUpdateHook):
    """An update hook of the user's own that must not be built."""

    priority = 15

    def __init__(self) -> None:
        raise AssertionError("built")


JOB: dict[str, Any] = {
    "source": {
        "hooks": [
            {"spec": {"cls_path": "nvalchemi.training.hooks.EMAHook", "decay": 0.99}},
            {"cls_path": "nvalchemi_lightning.hooks.GradientAccumulationHook", "steps": 4},
            {
                "spec": {"cls_path": "lab.hooks.Logger", "frequency": 10},
                "stages": ["AFTER_BATCH", "TrainingStage.AFTER_EPOCH"],
            },
            {"spec": {"cls_path": "lab.hooks.Mystery"}},
        ]
    },
    "validation": {"every_n_steps": 100},
}


def written(path: Path, job: object) -> Path:
    path.write_text(json.dumps(job))
    return path


def test_the_table_lists_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(capsys, "stages")
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert [line.split()[0] for line in lines] == ["stage", *(stage.name for stage in STAGES)]
    listed = json.loads(run_here(capsys, "stages", "--json").out)
    assert listed[0] == {
        "stage": "SETUP",
        "fires": "once per run, before optimizers are built",
        "frequency counts": "run",
        "new in the context": "models, counters",
    }


def test_a_job_file_is_put_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = written(tmp_path / "job.json", JOB)
    outcome = run_here(capsys, "stages", job)
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    (step,) = [line for line in lines if line.startswith("DO_OPTIMIZER_STEP")]
    assert step.split("  ")[-1].strip() == "GradientAccumulationHook[10], EMAHook[50]"
    assert "4 times per step" in step
    assert lines[15].endswith("Logger (every 10 steps)")
    assert lines[16].endswith("Logger (every 10 epochs)")
    assert lines[19] == "validation: every 100 steps, and at the end"
    assert lines[20].startswith("not shown: lab.hooks.Mystery, whose stages the file does not tell")
    data = json.loads(run_here(capsys, "stages", job, "--json").out)
    assert data["batches_per_step"] == 4
    assert data["stages_unknown"] == ["lab.hooks.Mystery"]
    assert "lab" not in sys.modules


def test_trusted_classes_are_looked_at_but_not_built() -> None:
    paths = [f"{__name__}.Counter", f"{__name__}.Policy"]
    job = {"source": {"hooks": [{"cls_path": path} for path in paths]}}
    assert job_lifecycle(job)[1] == paths
    trust(__name__)
    order, unknown = job_lifecycle(job)
    assert not unknown
    assert [hook.name for hook in order.stages[15].hooks] == ["Counter"]
    assert [(hook.name, hook.priority) for hook in order.stages[9].hooks] == [("Policy", 15)]


def test_the_option_trusts_a_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = written(tmp_path / "job.json", {"source": {"hooks": [{"cls_path": f"{__name__}.Counter"}]}})
    assert "not shown" in run_here(capsys, "stages", job).out
    outcome = run_here(capsys, "stages", job, "--trust", __name__)
    assert "not shown" not in outcome.out
    assert "Counter" in outcome.out


def test_a_job_without_hooks_is_the_plain_loop() -> None:
    order, unknown = job_lifecycle({})
    assert not unknown
    assert all(not entry.hooks for entry in order.stages)
    assert order.validation == "none"


def test_building_our_hooks_touches_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spec = {"cls_path": "nvalchemi.training.hooks.checkpoint.CheckpointHook", "checkpoint_dir": "c", "step_interval": 5}
    order, _ = job_lifecycle({"source": {"hooks": [spec]}})
    assert [hook.name for hook in order.stages[14].hooks] == ["CheckpointHook"]
    assert not list(tmp_path.iterdir())


def test_what_is_no_class_of_hooks_is_not_called(tmp_path: Path) -> None:
    """`convert` writes a store where the file says."""
    target = tmp_path / "written.zarr"
    work = {"cls_path": "nvalchemi_lightning.data.convert", "sources": "a.xyz", "target": str(target)}
    with pytest.raises(UntrustedPathError, match="convert' is a function"):
        job_lifecycle({"source": {"hooks": [work]}})
    writer = {"cls_path": "nvalchemi_lightning.data.AtomicDataZarrWriter", "store": str(target)}
    with pytest.raises(ConfigurationError, match="is not a class of hooks"):
        job_lifecycle({"source": {"hooks": [writer]}})
    assert not target.exists()


def test_one_of_our_hooks_at_several_stages_is_one_hook_at_each() -> None:
    spec = {"cls_path": "nvalchemi_lightning.hooks.NeighborListHook", "cutoff": 4.0}
    order, _ = job_lifecycle({"source": {"hooks": [{"spec": spec, "stages": ["BEFORE_BATCH", "BEFORE_FORWARD"]}]}})
    assert [entry.stage for entry in order.stages if entry.hooks] == ["BEFORE_BATCH", "BEFORE_FORWARD"]


TRACE = "nvalchemi_lightning.hooks.TraceHook"


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ([], "a job file is an object whose source.hooks is a list of specs"),
        ({"source": []}, "a job file is an object whose source.hooks is a list"),
        ({"source": {"hooks": {}}}, "a job file is an object whose source.hooks is a list"),
        (
            {"source": {"hooks": [3]}},
            "source.hooks[0] must be a spec with cls_path, or {'spec': ..., 'stages': [names]}",
        ),
        ({"source": {"hooks": [{"spec": {}}]}}, "source.hooks[0] must be a spec with cls_path"),
        ({"source": {"hooks": [{"cls_path": "a.B", "stages": "SETUP"}]}}, "source.hooks[0] must be a spec"),
        (
            {"source": {"hooks": [{"cls_path": "a.B", "stages": ["AFTER_BACH"]}]}},
            "source.hooks[0].stages has 'AFTER_BACH'; did you mean 'AFTER_BATCH'?",
        ),
        (
            {"source": {"hooks": [{"cls_path": TRACE, "stages": ["SETUP"]}]}},
            "source.hooks[0]: TraceHook decides its stages itself; leave stages out",
        ),
        ({"source": {"hooks": [{"cls_path": TRACE, "kep": 3}]}}, "Unknown kwargs for"),
        ({"source": {"hooks": [{"cls_path": "a b.C"}]}}, "Could not resolve 'a b.C': give a dotted path"),
        (
            {"source": {"hooks": [{"cls_path": "a.B", "stages": ["SETUP"], "frequency": 0}]}},
            "Hook frequency must be a po",
        ),
    ],
)
def test_a_wrong_file_is_a_line_and_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], job: object, message: str
) -> None:
    outcome = run_here(capsys, "stages", written(tmp_path / "job.json", job))
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err


def test_a_file_that_is_no_json_or_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.json"
    assert "No such file or directory" in run_here(capsys, "stages", path).err
    path.write_text("{")
    outcome = run_here(capsys, "stages", path)
    assert outcome.code == 2
    assert "job.json is no JSON" in outcome.err
