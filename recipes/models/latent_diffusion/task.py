"""Text-to-image latent diffusion as a training task: batch of latents and text in, losses out."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from data.random_numbers import draws_of
from data.system.errors import one_line
from data.system.log import log
from recipes.models.json_files import read_object
from recipes.models.latent_diffusion.denoiser import Denoiser
from recipes.models.latent_diffusion.objective import Objective, Predict, seeded_noise
from recipes.models.task import Task, described
from recipes.models.tensor_plan import TensorPlan

# The objective's folder in an export, by diffusers' name for it.
SCHEDULER = "scheduler"


class LatentDiffusion(Task):
    """Latent diffusion (Rombach et al. 2022) over precomputed, normalised latents and text embeddings."""

    entry_points = ("denoise",)
    exports_average_beside = True
    takes_draws = True

    def __init__(
        self,
        *,
        denoiser: Annotated[Denoiser, "denoiser"],
        objective: Annotated[Objective, "objective"],
    ) -> None:
        """Put the parts together.

        Args:
            denoiser: the network.
            objective: what the network is trained to predict, and how latents are sampled.
        """
        super().__init__()
        self.denoiser = denoiser
        self.objective = objective
        self.eval_names = ["loss", *(f"loss_t{t}" for t in objective.eval_times)]

    def blocks(self) -> list[nn.Module]:
        """See `Denoiser.blocks`."""
        return self.denoiser.blocks()

    def recomputed_blocks(self) -> list[nn.Module]:
        """See `Denoiser.recomputed_blocks`."""
        return self.denoiser.recomputed_blocks()

    def tensor_plan(self) -> TensorPlan | None:
        """See `Denoiser.tensor_plan`."""
        return self.denoiser.tensor_plan()

    def denoise(self, latents: Tensor, times: Tensor, text: Tensor) -> Tensor:
        """The denoiser's prediction (B, C, H, W), also while the model is sharded. See `Denoiser.forward`."""
        return self.denoiser(latents, times, text)

    def requirements(self) -> dict[str, int]:
        """The number of latent channels, what the side of the grid must be a multiple of, and the width of the text."""
        denoiser = self.denoiser
        return {
            "channels": denoiser.latent_channels,
            "grid_multiple": denoiser.grid_multiple,
            "text_width": denoiser.text_width,
        }

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The training loss, at times and with noise drawn as `data.random_numbers` says.

        Args:
            batch: `latents` (B, C, H, W) float32, normalised; `text` (B, L, D); perhaps `draws` (B,) int64.

        Returns:
            `total`: scalar.
        """
        x0 = batch["latents"]
        noise, times = self.objective.draw(x0, draws_of(batch, 1))
        self._check_shape("draw returns noise", noise, x0.shape)
        self._check_shape("draw returns times", times, x0.shape[:1])
        losses = self.objective(self._predict(batch["text"]), x0, noise, times)
        self._check_shape("forward returns losses", losses, x0.shape[:1])
        return {"total": losses.mean()}

    @torch.no_grad()
    def evaluate(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The loss of each sample at fixed times with fixed noise, so that checkpoints can be compared.

        The noise is drawn on the CPU, because each device would draw other numbers from the same seed: the host waits
        for the device once per microbatch, to read the seeds, and the noise is then copied to the device.

        Args:
            batch: as in `forward`, and `seed` (B,) int64, which fixes a sample's noise in any batch and on any rank.

        Returns:
            `loss_t<time>` and their mean `loss`: (B,) each.
        """
        x0 = batch["latents"]
        noise = seeded_noise(batch["seed"].tolist(), x0.shape[1:]).to(x0.device)
        losses = {}
        for t in self.objective.eval_times:
            times = torch.full((len(x0),), t, device=x0.device)
            losses[f"loss_t{t}"] = self.objective(self._predict(batch["text"]), x0, noise, times)
        return {"loss": torch.stack(list(losses.values())).mean(0), **losses}

    def _check_shape(self, what: str, found: Any, shape: torch.Size) -> None:
        """
        Raises:
            ValueError: what the objective has made is no tensor of that shape. Others would be stretched, such as one
                noise to all samples, or (B, 1) losses times (B,) weights to a matrix with the weights of all others.
        """
        if not isinstance(found, Tensor) or found.shape != shape:
            raise ValueError(
                f"model.objective: {self.objective.name}: {what}, {described(found)}; return a tensor of shape "
                f"{tuple(shape)}"
            )

    def _predict(self, text: Tensor) -> Predict:
        """The denoiser, given the text.

        Raises:
            ValueError: its prediction has another shape than the latents, to which the loss would stretch it.
        """

        def predict(latents: Tensor, times: Tensor) -> Tensor:
            found = self.denoiser(latents, times, text)
            if not isinstance(found, Tensor) or found.shape != latents.shape:
                shape = tuple(found.shape) if isinstance(found, Tensor) else described(found)
                raise ValueError(
                    f"model.denoiser: {self.denoiser.name} predicts {shape} for latents of {tuple(latents.shape)}; "
                    "return a tensor of the same shape"
                )
            return found

        return predict

    def export(self, folder: Path) -> None:
        """Write the denoiser's folder and scheduler/, as diffusers' `from_pretrained` opens them."""
        self.denoiser.save(folder / self.denoiser.folder)
        self.objective.save(folder / SCHEDULER)

    def export_average(self, folder: Path) -> None:
        """Write the averaged weights beside the raw ones, for instance unet_ema/ beside unet/."""
        self.denoiser.save(folder / f"{self.denoiser.folder}_ema")

    def export_record(self) -> dict[str, Any]:
        """Which denoiser and which objective sampling needs. See `Task.export_record`."""
        return {
            "family": "latent_diffusion",
            "network": self.denoiser.folder,
            "denoiser": self.denoiser.name,
            "objective": self.objective.name,
        }

    def check_export(self) -> None:
        """Whether the objective's class opens what the objective saves. See `Task.check_export`."""
        objective = self.objective
        if any(tensor.is_meta for tensor in (*objective.parameters(), *objective.buffers())):
            return  # what it saves may depend on their values
        with TemporaryDirectory() as folder:
            objective.save(Path(folder))
            try:
                type(objective).open(Path(folder))
            except (TypeError, ValueError) as error:
                kind = f"{type(objective).__name__} ({type(objective).__module__})"
                raise ValueError(
                    f"model.objective: {kind} does not open what it saves ({one_line(error)}), and exports could not "
                    "be used; let its __init__ take what its `open` gives it, with defaults for the rest, or define "
                    "`save` and `open`"
                ) from error

    def load_export(self, folder: Path) -> None:
        """See `Task.load_export`. The folder may also be a pipeline of diffusers, or its U-Net alone."""
        network = folder / self.denoiser.folder
        self.denoiser.load(network if network.is_dir() else folder)
        whole = folder if network.is_dir() else folder.parent  # as of EXPORT/unet_ema
        scheduler = whole / SCHEDULER / "scheduler_config.json"
        if scheduler.is_file():
            saved = read_object(scheduler)
            trained = prediction_of(saved)
            if trained != self.objective.prediction:
                log.warning(
                    f"{scheduler}: the weights were trained to predict {trained}, and the recipe's objective is "
                    f"{self.objective.prediction or self.objective.name}; they have to learn it anew"
                )
            elif differences := self.objective.other_noise(saved):
                log.warning(
                    f"{scheduler}: the weights were trained with other noise than the recipe's objective has: "
                    f"{'; '.join(differences)}; they have to learn it anew"
                )


def prediction_of(scheduler: dict[str, Any]) -> str:
    """What a network predicts, by the config of its scheduler: epsilon, v_prediction or flow_prediction."""
    flow = str(scheduler.get("_class_name", "")).startswith("FlowMatch")
    return "flow_prediction" if flow else scheduler.get("prediction_type", "epsilon")
