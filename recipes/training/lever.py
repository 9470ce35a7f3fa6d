"""Levers make training faster, smaller or more stable, independently of the engine."""

from __future__ import annotations

from recipes.training.hooks import Hooks
from recipes.training.run import Run


class Lever(Hooks):
    """The base class of levers, the components of `recipes.algorithms` and of the `training` section.

    In addition to the methods of `Hooks`, levers have methods that change the model before training, and gradients
    after the last backward pass of a batch. Each hook is called on levers before callbacks.
    `recipes.training.levers.Levers` defines the order of all levers of a run.

    Attributes:
        averages: whether the lever averages the gradients of whole copies of the model in place of
            DistributedDataParallel, which the engines then leave out.
        label_in_recipe: under `algorithms`; the engines set it. Empty for levers of the `training` section.
    """

    averages = False
    label_in_recipe = ""

    def check_run(self, run: Run) -> None:
        """Check whether the lever can work in a run of this length with this optimizer. Levers that have something to
        check call it when training begins; dry runs call it, too.

        Raises:
            ValueError: it cannot.
        """

    def check_machine(self, run: Run) -> None:
        """Check whether the device and the software of this machine support the lever. Called first, and never in dry
        runs, which may be on another machine than the run.

        Raises:
            ValueError: they do not.
        """

    def change_modules(self, run: Run) -> None:
        """Change modules of `run.task` in place, before it is sharded and before a checkpoint is loaded. With Composer,
        there is no `run.clock` yet.

        Dry runs call it with a task and a device that are meta. In divided runs, the task is meta on all ranks but the
        first, which sends the values that it then has (`recipes.algorithms.sharding.first_rank`).

        Raises:
            ValueError: there is nothing to change, or the run does not support the lever.
        """

    def shard(self, run: Run) -> None:
        """Divide or shard parameters over devices. Only levers of the `training` section override this."""

    def compile(self, run: Run) -> None:
        """Compile modules. No lever changes modules after this. Dry runs call it, too: nothing is compiled before the
        first batch."""

    def unscale_gradients(self, run: Run) -> None:
        """Divide gradients by the factor by which this lever scaled them. Called after the last backward pass."""

    def average_gradients(self, run: Run) -> None:
        """Average gradients over ranks, if neither DDP nor FSDP does."""

    def clip_gradients(self, run: Run) -> None:
        """Clip the averaged gradients."""

    def before_step(self, run: Run) -> None:
        """Called right before the optimizer's step, after gradients have been clipped."""
