"""Hooks: what they are, and the ones that come with the package."""

from nvalchemi_lightning.context import HookContext, TrainContext
from nvalchemi_lightning.hooks.protocol import CheckpointableHook, Hook

__all__ = ["CheckpointableHook", "Hook", "HookContext", "TrainContext"]
