"""The LightningModule's part that evaluates: validation, test and prediction."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn

from nvalchemi_lightning import _lightning
from nvalchemi_lightning.module_log import called_for, log_summary
from nvalchemi_lightning.optim import step_metric_schedulers
from nvalchemi_lightning.progress import RunProgress
from nvalchemi_lightning.recipe import TrainingRecipe
from nvalchemi_lightning.validation.config import ValidationConfig
from nvalchemi_lightning.validation.evaluation import Evaluation

__all__ = ["EvaluatingModule"]


class EvaluatingModule(LightningModule):
    """Evaluate the models of a recipe.

    Parameters
    ----------
    recipe : TrainingRecipe
        What is evaluated.
    """

    def __init__(self, recipe: TrainingRecipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.models = nn.ModuleDict(recipe.models)
        self._validation = recipe.validation_config
        self._progress = RunProgress(recipe)
        self._owner: Any = None
        self._evaluation: Any = None
        self._validating_by_hand = False

    @property
    def validates(self) -> bool:
        """Whether the run has validation data, of the recipe or of the Trainer."""
        return self._validation is not None

    def validate_by_hand(self) -> None:
        """Validate at the wish of a hook: a pass that steps no scheduler."""
        self._validating_by_hand = True
        try:
            _lightning.run_validation(self.trainer)
        finally:
            self._validating_by_hand = False

    def on_validation_model_eval(self) -> None:
        """Switch to evaluation mode if the configuration says so; Lightning restores every submodule's mode."""
        if self._validation is None or self._validation.set_eval:
            self.train(mode=False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: only the owner drops gradients, and Lightning calls this before every pass."""

    def on_validation_model_zero_grad(self) -> None:
        """Leave gradients alone: they may belong to an accumulation window."""

    def on_validation_start(self) -> None:
        """Open a pass."""
        config = self._validation or ValidationConfig(validation_data=())
        self._evaluation = Evaluation(self.recipe, config, self.device)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Evaluate one batch."""
        self._evaluation.add(batch, batch_idx, rank=self.global_rank)

    def on_validation_epoch_end(self) -> None:
        """Reduce the sums of all ranks and log the summary."""
        summary = self._evaluation.summary(self._owner.sum_over_ranks())
        self._evaluation = None
        if not self.trainer.sanity_checking:
            self.recipe.last_validation = summary
            self.recipe.registry.validations += 1
            self.recipe.resume.validated_at = self.recipe.step_count
            self.recipe.resume.validation_due &= self._validating_by_hand
            log_summary(self, summary, step=self.recipe.step_count)

    def step_metric_schedulers(self) -> None:
        """Hand the new summary to the schedulers that listen to validation, and do what was deferred until then."""
        if called_for(self.trainer) != "fit" or self.trainer.sanity_checking or self._validating_by_hand:
            return
        for key, pairs in self.recipe.optimizers().items():
            adapters = [config.scheduler_metric_adapter for config in self.recipe.optimizer_configs[key]]
            schedulers = [scheduler for _, scheduler in pairs]
            step_metric_schedulers(schedulers, adapters, self.recipe.last_validation or {})
        if not self._progress.at_epoch_end():
            self.recipe.requests.run_deferred()

    on_test_model_eval = on_validation_model_eval
    on_test_start = on_predict_start = on_validation_start
    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Return the detached predictions of a batch."""
        return self._evaluation.predict(batch, rank=self.global_rank)  # type: ignore[no-any-return]
