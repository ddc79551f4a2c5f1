"""Profile a run with torch, as traces that Chrome, Perfetto and TensorBoard show."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from nvalchemi_lightning.errors import ConfigurationError, TrainingStateError, UnknownNameError, nearest
from nvalchemi_lightning.stages import TrainingStage

__all__ = ["TorchProfilerHook"]

_STAGES = (
    TrainingStage.BEFORE_TRAINING,
    TrainingStage.BEFORE_BATCH,
    TrainingStage.AFTER_BATCH,
    TrainingStage.AFTER_TRAINING,
)


class TorchProfilerHook:
    """Record where time and memory go, and write a trace per rank.

    Profiling begins at ``BEFORE_TRAINING``, in `train_batch` at its first ``BEFORE_BATCH``. The schedule advances at
    ``AFTER_BATCH``. It ends at ``AFTER_TRAINING``, or when the strategy is left, also after an exception; what was
    recorded is written. The hook can be used for any number of runs; their traces are numbered on.

    Parameters
    ----------
    output_dir : path
        Traces go to ``<output_dir>/rank_<r>/trace_<n>.pt.trace.json``.
    activities : iterable of ProfilerActivity or str, optional
        ``"cpu"``, ``"cuda"``; default: the CPU, and CUDA where it is available.
    schedule : callable, optional
        ``torch.profiler.schedule(wait=..., warmup=..., active=..., repeat=...)``, counted in batches. Without one all
        batches are recorded, which is much for more than a hundred.
    record_shapes, profile_memory, with_flops, with_stack : bool
        As in `torch.profiler.profile`; all but ``with_stack`` are on.

    Attributes
    ----------
    traces : list of Path
        The files written so far.

    Raises
    ------
    UnknownNameError
        If an activity is unknown.
    ConfigurationError
        If there is no activity, ``schedule`` cannot be called, or the strategy has another `TorchProfilerHook`.
    TrainingStateError
        In a run, if another profiler is active.

    Examples
    --------
    >>> hook = TorchProfilerHook("profiles", schedule=torch.profiler.schedule(wait=2, warmup=2, active=5, repeat=1))
    """

    stage: Enum | None = None
    frequency = 1

    def __init__(
        self,
        output_dir: str | Path,
        activities: Iterable[ProfilerActivity | str] | None = None,
        schedule: Callable[[int], ProfilerAction] | None = None,
        *,
        record_shapes: bool = True,
        profile_memory: bool = True,
        with_flops: bool = True,
        with_stack: bool = False,
    ) -> None:
        if schedule is not None and not callable(schedule):
            raise ConfigurationError(f"schedule must be callable, like torch.profiler.schedule(...); got {schedule!r}")
        self.output_dir = Path(output_dir)
        self.traces: list[Path] = []
        self._options: dict[str, Any] = {
            "activities": None if activities is None else _activities(activities),
            "schedule": schedule,
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_flops": with_flops,
            "with_stack": with_stack,
        }
        self._profile: profile | None = None
        self._rank = 0

    def _runs_on_stage(self, stage: TrainingStage) -> bool:
        return stage in _STAGES

    def on_register(self, workflow: Any) -> None:
        """Refuse a second hook of this kind."""
        if any(isinstance(hook, TorchProfilerHook) for hook in workflow.registry):
            raise ConfigurationError("the strategy has a TorchProfilerHook already; torch can profile once at a time")

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        """Start, advance or end the profile.

        Raises
        ------
        TrainingStateError
            If another profiler is active.
        """
        if stage is TrainingStage.AFTER_TRAINING:
            self.close()
        elif stage is TrainingStage.AFTER_BATCH:
            self._advance()
        elif self._profile is None:
            self._start(ctx.global_rank)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the profile, if it was not ended at ``AFTER_TRAINING``."""
        self.close()

    def close(self) -> None:
        """End the profile and write what it holds; doing so twice is harmless."""
        ended, self._profile = self._profile, None
        if ended is not None:
            ended.stop()

    def _start(self, rank: int) -> None:
        _refuse_another()
        self._rank = rank
        started = profile(on_trace_ready=self._write, **self._options)
        started.start()
        self._profile = started

    def _advance(self) -> None:
        if self._profile is None:
            return
        if self._profile.current_action is ProfilerAction.NONE:
            _refuse_another()
        # One that fails half-way must not be stopped again: torch would crash the process.
        running, self._profile = self._profile, None
        with warnings.catch_warnings():
            # Every cycle is written before the next one begins.
            warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
            running.step()
        self._profile = running

    def _write(self, finished: profile) -> None:
        folder = self.output_dir / f"rank_{self._rank}"
        folder.mkdir(parents=True, exist_ok=True)
        number = len(list(folder.glob("trace_*.json")))
        path = folder / f"trace_{number:03d}.pt.trace.json"
        finished.export_chrome_trace(str(path))
        self.traces.append(path)


def _activities(given: Iterable[ProfilerActivity | str]) -> list[ProfilerActivity]:
    known = {name.lower(): activity for name, activity in ProfilerActivity.__members__.items()}
    found = []
    for each in [given] if isinstance(given, str) else given:
        activity = known.get(each.lower()) if isinstance(each, str) else each
        if not isinstance(activity, ProfilerActivity):
            hint = nearest(each.lower(), known) if isinstance(each, str) else ""
            raise UnknownNameError(f"activities has {each!r}{hint}; there are {', '.join(map(repr, sorted(known)))}")
        found.append(activity)
    if not found:
        raise ConfigurationError("activities is empty, so nothing would be recorded; leave it out for the default")
    return found


def _refuse_another() -> None:
    # torch does not refuse a second profiler: it ends the first without a word.
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # noqa: SLF001  no public way to ask
        raise TrainingStateError(
            "another profiler is active, and torch can profile once at a time; end it, or leave out the "
            "TorchProfilerHook or the Trainer's profiler="
        )
