"""Hooks: what they are, and the ones that come with the package."""

from __future__ import annotations

from nvalchemi_lightning._lazy import lazy_exports

# Loaded on first use: a shipped hook may need what the registry of hooks is imported by.
_HOME = {
    "CheckpointHook": "hooks.checkpoint",
    "CheckpointableHook": "hooks.protocol",
    "EMAHook": "hooks.ema",
    "GradientAccumulationHook": "hooks.gradient_accumulation",
    "GradientClipHook": "hooks.gradient_clip",
    "Hook": "hooks.protocol",
    "HookContext": "context",
    "MixedPrecisionHook": "hooks.mixed_precision",
    "NeighborListHook": "hooks.neighbor_list",
    "SpikeSkipHook": "hooks.spike_skip",
    "StageTimingHook": "hooks.stage_timing",
    "TorchProfilerHook": "hooks.torch_profiler",
    "TraceEvent": "hooks.trace",
    "TraceHook": "hooks.trace",
    "TrainContext": "context",
    "TrainingUpdateHook": "hooks.update",
    "TrainingUpdateOrchestrator": "hooks.update",
    "Window": "window",
}

__all__ = [*_HOME]  # noqa: PLE0604  the keys are the public names

__getattr__, __dir__ = lazy_exports(__name__, _HOME)
