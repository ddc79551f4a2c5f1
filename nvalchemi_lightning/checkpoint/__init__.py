"""Checkpoints: folders that hold everything a run needs to go on."""

from nvalchemi_lightning.checkpoint.saving import load, restore, save

__all__ = ["load", "restore", "save"]
