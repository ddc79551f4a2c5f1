"""Measure how long a run takes from stage to stage."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch

from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError, UnknownNameError, nearest
from nvalchemi_lightning.hooks.intervals import IntervalLog, Mark, Span
from nvalchemi_lightning.stages import REPLACEMENT_STAGES, TrainingStage

__all__ = ["StageTimingHook"]

_S = TrainingStage
_PRESETS: dict[str, tuple[TrainingStage, ...]] = {
    "step": (_S.BEFORE_BATCH, _S.AFTER_BATCH),
    "detailed": (
        *(_S.BEFORE_BATCH, _S.BEFORE_FORWARD, _S.AFTER_FORWARD, _S.AFTER_LOSS, _S.AFTER_BACKWARD),
        *(_S.AFTER_OPTIMIZER_STEP, _S.AFTER_BATCH),
    ),
    "all": tuple(stage for stage in TrainingStage if stage not in REPLACEMENT_STAGES),
}


class StageTimingHook:
    """Measure the time between consecutive stages; what the batches wait for is ``AFTER_BATCH->BEFORE_BATCH``.

    Parameters
    ----------
    profiled_stages : {"step", "detailed", "all"} or iterable of TrainingStage
        Where time is taken, at two stages or more. ``"step"``: whole batches, and the time between them.
        ``"detailed"`` (default): input hooks, forward, loss, backward and update apart. ``"all"``: every stage.
    frequency : int
        Time every so many batches, >= 1; default all.
    enable_nvtx : bool
        Mark the intervals for Nsight Systems, on CUDA; default True.
    timer_backend : {"auto", "cuda_event", "perf_counter"}
        CUDA events never make the host wait; ``"auto"`` takes them for batches on CUDA. ``"perf_counter"`` measures
        the host, which on CUDA only launches the work.
    log_path : path, optional
        A CSV file with a row per interval (rank, step, stage, seconds since the hook was made, seconds). A second
        run appends. Ranks above 0 write to a file of their own, ``<name>_rank<r>.csv``.

    Raises
    ------
    UnknownNameError
        If a preset or a stage is unknown.
    ConfigurationError
        If fewer than two stages are given, a replacement stage is among them, ``frequency`` is not positive, or CUDA
        events are wanted without CUDA.

    Notes
    -----
    Hooks at a stage are called in the order of their registration; those after this one count to the next interval.
    The stages of validation batches are measured apart, under ``validation: ...``, and a validation between two
    batches is not counted as waiting for data.

    Examples
    --------
    >>> timing = StageTimingHook()
    >>> TrainingStrategy(..., hooks=[timing]).run(loader)
    >>> print(timing)
    """

    stage: Enum | None = None
    # The registry asks by step count, which changes within a batch: whole batches are chosen here.
    frequency = 1

    def __init__(
        self,
        profiled_stages: str | Iterable[TrainingStage | str] = "detailed",
        *,
        frequency: int = 1,
        enable_nvtx: bool = True,
        timer_backend: Literal["auto", "cuda_event", "perf_counter"] = "auto",
        log_path: str | Path | None = None,
    ) -> None:
        if not isinstance(frequency, int) or frequency < 1:
            raise ConfigurationError(f"StageTimingHook.frequency must be a positive integer; got {frequency!r}")
        _check_backend(timer_backend)
        self.profiled_stages = _stages(profiled_stages)
        self._every = frequency
        self._nvtx = enable_nvtx
        self._backend = timer_backend
        self._log = IntervalLog(None if log_path is None else Path(log_path))
        self._begun = time.perf_counter()
        self._last: dict[bool, Mark | None] = {True: None, False: None}
        self._pending: deque[tuple[Mark, Mark, str]] = deque()
        self._range_open = False
        self.reset()

    def reset(self) -> None:
        """Forget what was measured; the CSV file stays."""
        self._spans: dict[str, Span] = {}

    def _runs_on_stage(self, stage: TrainingStage) -> bool:
        # After a validation the interval to the next batch begins anew.
        return stage in self.profiled_stages or stage is TrainingStage.AFTER_VALIDATION

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        """Take the time."""
        last = self._last[ctx.validating]
        if stage not in self.profiled_stages:
            self._last = {True: None, False: None}
            return
        mark = self._mark(ctx, stage)
        if last is not None:
            self._pending.append((last, mark, "validation: " if ctx.validating else ""))
            self._take(wait=False)
        self._last[ctx.validating] = mark if self._chosen(ctx, stage) else None
        if stage is TrainingStage.AFTER_VALIDATION:
            self._last[True] = None

    def summary(self) -> dict[str, dict[str, float]]:
        """Return statistics of every interval.

        Returns
        -------
        dict of str to dict
            ``"A->B"``: ``mean_s``, ``std_s`` (of the population), ``min_s``, ``max_s``, ``total_s`` [s] and
            ``n_samples``, in the order of first appearance.
        """
        self._take(wait=True)
        return {name: span.statistics() for name, span in self._spans.items()}

    def __str__(self) -> str:
        """Return the statistics as a table, in milliseconds."""
        rows = [("interval", "n", "mean/ms", "std/ms", "total/s")]
        rows += [
            (
                name,
                f"{s['n_samples']:.0f}",
                f"{1e3 * s['mean_s']:.3f}",
                f"{1e3 * s['std_s']:.3f}",
                f"{s['total_s']:.3f}",
            )
            for name, s in self.summary().items()
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        aligned = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
        return "\n".join("  ".join(cells) for cells in aligned)

    def close(self) -> None:
        """Measure what is under way no further, and close the CSV file; a later run goes on in it."""
        self._take(wait=True)
        self._last = {True: None, False: None}
        if self._range_open:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
            self._range_open = False
        self._log.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _chosen(self, ctx: Any, stage: TrainingStage) -> bool:
        """Return whether the interval that begins here is to be measured."""
        batch = ctx.batch_count - (stage is TrainingStage.AFTER_BATCH)
        return bool(ctx.validating) or batch % self._every == 0

    def _mark(self, ctx: Any, stage: TrainingStage) -> Mark:
        event = None
        if self._on_cuda(ctx):
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            if self._nvtx:
                if self._range_open:
                    torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
                torch.cuda.nvtx.range_push(f"after {stage.name}")  # type: ignore[no-untyped-call]
                self._range_open = True
        return Mark(stage.name, ctx.step_count, ctx.global_rank, time.perf_counter(), event)

    def _on_cuda(self, ctx: Any) -> bool:
        if self._backend == "auto":
            return ctx.batch is not None and bool(ctx.batch.positions.is_cuda)
        return self._backend == "cuda_event"

    def _take(self, *, wait: bool) -> None:
        """Move finished intervals to the statistics and the file; only with ``wait`` does the host wait for CUDA."""
        while self._pending:
            first, second, prefix = self._pending[0]
            if not (wait or second.is_over):
                return
            self._pending.popleft()
            seconds = first.seconds_to(second)
            name = f"{prefix}{first.stage}->{second.stage}"
            self._spans.setdefault(name, Span()).add(seconds)
            self._log.write(second.rank, (second.rank, first.step, name, second.host - self._begun, seconds))


def _check_backend(backend: str) -> None:
    known = ("auto", "cuda_event", "perf_counter")
    if backend not in known:
        raise UnknownNameError(f"timer_backend={backend!r}{nearest(str(backend), known)}; there are {', '.join(known)}")
    if backend == "cuda_event" and not torch.cuda.is_available():
        raise ConfigurationError("timer_backend='cuda_event', but torch sees no CUDA device here; use 'auto'")


def _stages(given: str | Iterable[TrainingStage | str]) -> frozenset[TrainingStage]:
    if isinstance(given, str):
        if given not in _PRESETS:
            hint = nearest(given, _PRESETS)
            raise UnknownNameError(f"profiled_stages={given!r}{hint}; there are {', '.join(_PRESETS)}, or give stages")
        return frozenset(_PRESETS[given])
    stages = frozenset(_stage(each) for each in given)
    claimed = [stage.name for stage in stages if stage in REPLACEMENT_STAGES]
    if claimed:
        observed = claimed[0].removeprefix("DO_")
        raise ConfigurationError(
            f"{claimed[0]} belongs to one owner and cannot be observed; time BEFORE_{observed} and AFTER_{observed}"
        )
    if len(stages) < 2:
        raise ConfigurationError(f"time passes between two stages or more; got {sorted(s.name for s in stages)}")
    return stages


def _stage(given: TrainingStage | str) -> TrainingStage:
    if isinstance(given, TrainingStage):
        return given
    if not isinstance(given, str):
        raise ConfigurationTypeError(f"profiled_stages holds TrainingStage stages; got {given!r}")
    if given not in TrainingStage.__members__:
        raise UnknownNameError(f"no stage is called {given!r}{nearest(given, TrainingStage.__members__)}")
    return TrainingStage[given]
