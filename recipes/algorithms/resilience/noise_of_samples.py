"""Noise that belongs to samples instead of ranks, so that a run is the same on any number of ranks."""

from __future__ import annotations

from data.random_numbers import ENTRY, seeds_of
from data.system.log import log
from recipes.models.task import Task
from recipes.training.lever import Lever
from recipes.training.run import Run


class NoiseOfSamples(Lever):
    """Draws noise, times, posterior samples, flips and dropped captions by sample, whatever the number of ranks.

    The numbers depend on the sample's key, the batch's number and the seed. So a run that goes on with another number
    of ranks, or with other microbatches, learns what it would have learned, but for the order of additions. Without
    this lever each rank draws from a generator of its own. Where a set repeats samples and one comes twice in a batch,
    both have the same noise. Dropout within a network still belongs to ranks.
    """

    def __init__(self, task: Task, *, seed: int = 17) -> None:
        """
        Args:
            task: what is trained.
            seed: seed of these draws.
        """
        self.task = task
        self.seed = seed

    def change_modules(self, run: Run) -> None:
        """
        Raises:
            ValueError: the task draws nothing, or not by `data.random_numbers`.
        """
        if not self.task.takes_draws:
            raise ValueError(
                f"noise_of_samples: {type(self.task).__name__} draws no noise for samples; remove the algorithm"
            )
        log.info("noise_of_samples: noise depends on samples, not on ranks")

    def batch_start(self, run: Run) -> None:
        """Add what the samples' numbers depend on to the batch.

        Raises:
            ValueError: the data gives its samples no number.
        """
        if "seed" not in run.batch:
            raise ValueError("noise_of_samples: the batches have no `seed` for each sample; use data: {name: latents}")
        numbers = seeds_of(run.batch["seed"], self.seed, run.clock.batch)
        # As the rest of the batch, so that the host does not wait for the device when microbatches are copied to it.
        run.batch[ENTRY] = numbers.pin_memory() if run.batch["seed"].is_pinned() else numbers
