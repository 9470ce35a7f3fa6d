"""The base class of every model that a recipe can train."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from recipes.models.tensor_plan import TensorPlan


class Task(nn.Module):
    """A model together with its training loss: the interface that trainers, levers, callbacks and exports use.

    A task does not depend on a trainer, a config or a device. A subclass defines `eval_names`, `forward`, `evaluate`,
    `export` and `load_export`. The other members have defaults that fit a model without the feature in question.

    Example::

        class Regression(Task):
            eval_names = ("loss",)

            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(3, 1)

            def forward(self, batch):
                return {"total": self.evaluate(batch)["loss"].mean()}

            def evaluate(self, batch):
                return {"loss": (self.layer(batch["x"]) - batch["y"]).square().mean(1)}

    Attributes:
        eval_names: names of those results of `evaluate` that are averaged over a validation set and logged.
        eval_weights: name in `eval_names` -> name of the result of `evaluate`, (B,), that weighs each sample in the
            average, such as its number of tokens. Samples have equal weights by default.
        eval_sums: name in `eval_names` -> names of other results and their factors. The figure is then the sum of the
            factors times those results' averages, instead of an average of its own.
        eval_exponentials: name in `eval_names` -> name of another one, of whose average the figure is the exponential.
        entry_points: names of the methods, besides `forward` and `evaluate`, through which callers run the network,
            such as `denoise`, `sample` or `reconstruct`. FSDP gathers the parameters for calls of these methods too.
        scheduled: names of scalar buffers that the `scheduled_value` callback may set in the course of a run.
        compares_samples: whether the loss compares the samples of a microbatch with each other, as contrastive losses
            do. The size of the microbatch is then part of what is learned, and is never chosen automatically.
        counted: name of a batch's entry -> number of different tokens that it holds, for the `unigram` callback.
        counted_from: name in `counted` -> number of tokens at the beginning of each sample that are not predicted.
        codes: size of the codebook if `evaluate` also returns `codes`, the codes of each sample; otherwise None.
        exports_average_beside: whether an export holds the averaged weights in a folder beside the raw ones
            (`export_average` writes them). If False, averaged weights take the place of the raw ones.
        exported: name of the part of the task whose state dict is all that `export` writes besides what `export_config`
            writes. A model that is divided over devices is then exported tensor by tensor, without a call of `export`.
            None, the default: the first rank gathers the whole model, and `export` is called. So it is for a subclass
            that overrides `export` or `export_average`, also by a mixin, unless it defines `exported` or
            `export_config`, too.
        takes_draws: whether training draws random numbers by `data.random_numbers`, so that they may belong to samples.
        token_ids: which ids the model has in entries of a batch, by their names: data of one's own is compared.
    """

    eval_names: tuple[str, ...] | list[str] = ()
    eval_weights: Mapping[str, str] = {}
    eval_sums: Mapping[str, Mapping[str, float]] = {}
    eval_exponentials: Mapping[str, str] = {}
    entry_points: tuple[str, ...] = ()
    scheduled: tuple[str, ...] = ()
    compares_samples: bool = False
    counted: Mapping[str, int] = {}
    counted_from: Mapping[str, int] = {}
    codes: int | None = None
    exports_average_beside: bool = False
    exported: str | None = None
    takes_draws: bool = False
    token_ids: Mapping[str, range] = {}

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        writes, describes = {"export", "export_average"}, {"exported", "export_config"}
        first = next(vars(base).keys() for base in cls.__mro__ if vars(base).keys() & (writes | describes))
        if not first & describes:
            cls.exported = None  # the inherited `export_config` describes other files than its `export` writes

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The training losses of a batch.

        Args:
            batch: tensors by name, with the sample as their first dimension B, and the means that `batch_means` names.

        Returns:
            Scalars by name. `total` is minimised; the others are detached and only logged.
        """
        raise NotImplementedError

    def batch_means(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the loss must know of the whole batch: values of each sample whose means over the batch it needs.

        A batch is divided over ranks and into microbatches, and the losses of the parts are averaged by their numbers
        of samples. A loss that divides by anything else, such as the number of tokens, therefore needs it of the whole
        batch. Engines call this before they divide the batch, average the values over all samples of all ranks, and
        add the means to the batch under the same names.

        Args:
            batch: as in `forward`, on the host, and before transforms on the device.

        Returns:
            Tensors (B,) by name. By default none: the loss is a mean over samples.
        """
        return {}

    def evaluate(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The validation results of each sample, without gradients and without the global random generator.

        Args:
            batch: as in `forward`, and `weight` (B,): with which weight each sample counts in means over the set. It
                is 0 for samples that only fill up a batch.

        Returns:
            One tensor of shape (B,) per name in `eval_names`, except for exponentials. Further tensors, for callbacks,
            may have other shapes.
        """
        raise NotImplementedError

    def measure(self, batch: dict[str, Tensor]) -> Tensor:
        """Numbers of an export that belong to its weights, such as the moments of an autoencoder's latents.

        An export of averaged weights measures them on one batch with the weights of training and with the averaged
        ones, on every rank, under autocast and without gradients. Most models have none, and do not define this.

        Args:
            batch: as in `forward`, but it may be on the host.
        """
        raise NotImplementedError

    def measured(self, before: Tensor, after: Tensor) -> AbstractContextManager[None]:
        """A context in which `export` writes the numbers of other weights, on which `measure` found `after`, and not
        those of training, on which it found `before`."""
        raise NotImplementedError

    def check_scheduled(self, name: str, value: float) -> None:
        """Check a value that the `scheduled_value` callback would set.

        Args:
            name: one of those in `scheduled`.
            value: the first or the last one; those in the course of a run lie between them.

        Raises:
            ValueError: the model cannot train with it. By default every value will do.
        """

    def requirements(self) -> dict[str, Any]:
        """What the training data must have, such as the number of latent channels.

        These are fields of the manifest of an encoded set, or what `data.model_requirements.check_pictures` compares
        for models that train on images. By default nothing is required.
        """
        return {}

    def blocks(self) -> list[nn.Module]:
        """The modules that FSDP shards and `compile` compiles one by one, each called through its `forward`.

        Empty by default: FSDP can then only shard the model as a whole.
        """
        return []

    def networks(self) -> list[nn.Module]:
        """The modules that `compile` compiles as a whole if asked to, each called through its `forward` in training.

        By default those children of the task that are trained.
        """
        return [child for child in self.children() if any(p.requires_grad for p in child.parameters())]

    def recomputed_blocks(self) -> list[nn.Module]:
        """The modules whose activations activation checkpointing recomputes, one by one. By default `blocks()`."""
        return self.blocks()

    def tensor_plan(self) -> TensorPlan | None:
        """How `training.tensor_parallel` divides the model's matrices over devices; None, the default: it cannot."""
        return None

    def forward_flops(self) -> float | None:
        """FLOPs of the forward pass of one sample, counting a multiply-add as 2; None: use PyTorch's counter."""
        return None

    def export(self, folder: Path) -> None:
        """Write the weights into `folder`, which exists, in a format that other programs open without unpickling."""
        raise NotImplementedError

    def export_average(self, folder: Path) -> None:
        """Write the averaged weights beside the raw ones; called while the model holds the averaged weights.

        Only called if `exports_average_beside` is True.
        """
        raise NotImplementedError

    def export_config(self, folder: Path, averaged: bool) -> Path:
        """Write what `export` writes, or `export_average` if `averaged` is True, without the weights.

        Only called if `exported` is set. The values of parameters must not be read.

        Returns:
            The path of the safetensors file that is to hold the state dict of the part `exported`.
        """
        raise NotImplementedError

    def export_record(self) -> dict[str, Any]:
        """Entries of export.json that describe the model, so that recipes/generate.py can open the export.

        Models that generate images from captions return `family`, the name of their package in `recipes/models`, and
        `network`, the folder of the trained network in the export. The default is an empty dict.
        """
        return {}

    def check_export(self) -> None:
        """Check what a run can know at its start of whether its export can be opened. By default nothing.

        Raises:
            ValueError: it could not.
        """

    def load_export(self, folder: Path) -> None:
        """Load the weights of a folder that `export` wrote, strictly.

        Raises:
            FileNotFoundError: the folder holds no such weights.
            ValueError: the tensors are not those of this model.
        """
        raise NotImplementedError


def losses_of(task: Task, outputs: Any) -> dict[str, Tensor]:
    """What a task's `forward` returned, for an engine.

    Raises:
        ValueError: it has no `total` (Composer would minimise the sum of all that there is), or a value is no
            scalar that can be averaged over batches and ranks, such as a number of Python or an integer.
    """
    if not isinstance(outputs, Mapping) or "total" not in outputs:
        names = ", ".join(map(str, outputs)) if isinstance(outputs, Mapping) else type(outputs).__name__
        raise ValueError(
            f"model: forward of {type(task).__name__} ({type(task).__module__}) returns {names or 'an empty dict'}; "
            "return a dict of scalars, of which `total` is minimised"
        )
    for name, loss in outputs.items():
        if not isinstance(loss, Tensor) or not loss.is_floating_point() or (name == "total" and loss.numel() != 1):
            raise ValueError(
                f"model: forward of {type(task).__name__} ({type(task).__module__}) returns {described(loss)} for "
                f"`{name}`; return a scalar tensor of floating-point numbers"
            )
    return outputs


def described(value: Any) -> str:
    """What a value is, in messages about what a task returns."""
    if not isinstance(value, Tensor):
        return "nothing" if value is None else f"an instance of {type(value).__name__}"
    return f"a tensor of shape {tuple(value.shape)} and dtype {str(value.dtype).removeprefix('torch.')}"
