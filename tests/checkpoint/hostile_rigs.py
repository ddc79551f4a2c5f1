"""Checkpoints that a stranger has changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RECORD = "lightning/checkpoints/0.json"
STRATEGY = "strategy/checkpoints/0.json"
STATES = ["models/main", "optimizers/main_optimizer", "schedulers/main_scheduler", "hooks", "lightning"]


def edited(folder: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Change a JSON file."""
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(change(content)))


def with_state(folder: Path, component: str, change: Callable[[Any], Any]) -> None:
    """Change a file of tensors."""
    path = folder / f"{component}/checkpoints/0.pt"
    state = torch.load(path, weights_only=True)
    changed = change(state)
    torch.save(state if changed is None or isinstance(changed, torch.Tensor) else changed, path)
