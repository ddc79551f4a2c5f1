"""How far a run has come: five counters with one writer."""

from __future__ import annotations

from dataclasses import dataclass

from nvalchemi_lightning.errors import ConfigurationError

__all__ = ["Counters"]


@dataclass
class Counters:
    """Progress of a run.

    Attributes
    ----------
    step_count : int
        Executed optimizer steps of this worker; a vetoed step does not count.
    global_step_count : int
        The same summed over all data-parallel workers.
    batch_count : int
        Completed batches of this worker.
    epoch_count : int
        How often the loader was exhausted.
    epoch_step_count : int
        Batches consumed in the epoch that is under way.

    Raises
    ------
    ConfigurationError
        If a count is not an integer >= 0.
    """

    step_count: int = 0
    global_step_count: int = 0
    batch_count: int = 0
    epoch_count: int = 0
    epoch_step_count: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigurationError(f"{name} must be an integer >= 0; got {value!r}")

    def batch_done(self, *, stepped: bool, world_size: int = 1, in_epoch: bool = True) -> None:
        """Count one completed batch and, if its optimizer step ran, one step.

        Parameters
        ----------
        stepped : bool
            Whether an optimizer stepped.
        world_size : int
            Number of data-parallel workers.
        in_epoch : bool
            Whether the batch came from a pass over a loader.
        """
        self.batch_count += 1
        if in_epoch:
            self.epoch_step_count += 1
        if stepped:
            self.step_count += 1
            self.global_step_count += world_size

    def epoch_done(self) -> None:
        """Close the epoch that is under way."""
        self.epoch_count += 1
        self.epoch_step_count = 0

    def is_before_epoch_end(self, batches_per_epoch: int) -> bool:
        """Return whether the last batch of an epoch is done, but not what happens at its end.

        Parameters
        ----------
        batches_per_epoch : int
            The length of the loader.
        """
        done = (self.epoch_count + 1) * batches_per_epoch
        return self.epoch_step_count == batches_per_epoch and self.batch_count == done

    def reconcile(self, batches_per_epoch: int) -> None:
        """Make the counters of a restart agree with a loader of known length.

        Whole epochs that were counted as batches are carried into ``epoch_count``, and a position inside an
        epoch that was counted only as progress becomes ``epoch_step_count``.

        Parameters
        ----------
        batches_per_epoch : int
            The length of the loader.

        Raises
        ------
        ConfigurationError
            If the counters contradict each other for this length.
        """
        carried, position = divmod(self.epoch_step_count, batches_per_epoch)
        epochs = self.epoch_count + carried
        progress = self.batch_count or self.step_count
        expected = epochs * batches_per_epoch + position
        if self.epoch_step_count:
            if progress not in (0, expected):
                raise ConfigurationError(self._inconsistent(progress, "does not match", expected, batches_per_epoch))
        elif progress < expected:
            raise ConfigurationError(self._inconsistent(progress, "is smaller than", expected, batches_per_epoch))
        else:
            epochs, position = divmod(progress, batches_per_epoch)
            expected = progress
        self.epoch_count, self.epoch_step_count = epochs, position
        self.batch_count = max(self.batch_count, expected)

    def _inconsistent(self, progress: int, relation: str, expected: int, length: int) -> str:
        return (
            f"restart counters are inconsistent: the progress {progress} (batch_count={self.batch_count}, "
            f"step_count={self.step_count}) {relation} epoch_count * len(dataloader) + epoch_step_count = "
            f"{self.epoch_count} * {length} + {self.epoch_step_count} = {expected}; "
            "run with the loader the counters were made with, or reset them"
        )
