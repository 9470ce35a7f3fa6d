"""DALL-E's second stage as a training task: text and image tokens as one sequence, predicted token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from recipes.models.autoregressive.masks import TokenLayout
from recipes.models.autoregressive.sampler import Choice, sample_tokens
from recipes.models.autoregressive.sparse_attention import resolve
from recipes.models.autoregressive.transformer import TokenTransformer
from recipes.models.legacy_weights import separated
from recipes.models.network_folder import FOLDER, TransformerTask, load_network

# Letters: B batch, T text positions, N image positions, S = T + N, d width, V text vocabulary, K image codes.

TEXT_TOKENS = "text_tokens"  # predicted text tokens per sample: in training their mean over the whole batch


class Autoregressive(TransformerTask):
    """A transformer over text tokens followed by image tokens (Ramesh et al. 2021, section 2.2), all precomputed."""

    entry_points = ("sample",)
    eval_weights = {"text_loss": TEXT_TOKENS}
    upgrade = staticmethod(separated)

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        text_positions: int = 256,
        text_vocabulary: int = 16384,
        side: int = 32,
        codes: int = 8192,
        kernel: int = 11,
        image_weight: float = 0.875,
        attention: Literal["auto", "flex", "local", "masked"] = "auto",
    ) -> None:
        """Build it with new weights.

        Args:
            layers: number of attention layers, each followed by an MLP.
            width: width of the residual stream, a multiple of the number of heads.
            heads: number of attention heads.
            text_positions: text tokens per sequence, including padding.
            text_vocabulary: size of the byte-pair vocabulary.
            side: side of the grid of image tokens.
            codes: size of the image codebook.
            kernel: side of the neighbourhood of the last layer's convolutional attention, an odd number.
            image_weight: weight of the image tokens' mean loss, from 0 to 1; the text tokens' mean loss has the rest.
            attention: flex: block-sparse kernels, for a GPU and 128 positions or more; local: matrix products over the
                visible keys only, for a CPU; masked: all keys, with a mask; auto: flex on a GPU, otherwise local for a
                side of 16 or more, else masked; masked, too, for fewer than 128 positions, or heads
                narrower than 16, on a GPU.

        Raises:
            ValueError: a width that is not a multiple of the heads, a weight outside of 0 to 1, or flex for sizes that
                it does not take.
        """
        super().__init__()
        if not 0 <= image_weight <= 1:
            raise ValueError(f"autoregressive: image_weight must be from 0 to 1, got {image_weight}")
        self.sizes: dict[str, Any] = {
            "layers": layers,
            "width": width,
            "heads": heads,
            "text_positions": text_positions,
            "text_vocabulary": text_vocabulary,
            "side": side,
            "codes": codes,
            "kernel": kernel,
        }
        self.network = transformer_of(**self.sizes, attention=attention)
        if attention == "flex":  # the network would refuse it in the first batch only
            resolve(attention, self.network.layout, "cuda", self.network.head_width)
        self.image_weight = image_weight
        self.token_ids = {"text": range(-1, text_vocabulary), "image": range(codes)}
        self.counted = {"image": codes}
        self.eval_names = ["loss", "text_loss", "image_loss"]
        self.eval_sums = {"loss": {"text_loss": 1 - image_weight, "image_loss": image_weight}}

    def requirements(self) -> dict[str, int]:
        """The sizes that the data and its vocabulary must have."""
        names = ("text_positions", "text_vocabulary", "codes", "side")
        return {name: self.sizes[name] for name in names}

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The training loss: by default 1/8 of the text tokens' mean loss plus 7/8 of the image tokens'.

        Each mean is over the tokens of the whole batch, so that every text token has the same weight, however the batch
        is divided. The first text token is not predicted, because nothing precedes it; the last text position, a token
        or padding, predicts the first image token.

        Args:
            batch: `text` (B, T) int64 in [0, V), -1 for padding at the end; `image` (B, N) int64; `text_tokens` (B,),
                the mean number of predicted text tokens per sample of the whole batch (see `batch_means`). Without the
                latter, what is given is the whole batch.

        Returns:
            `total`, `text` and `image`, in nats per token: scalars.
        """
        text, image, there = self._losses(batch)
        tokens = batch.get(TEXT_TOKENS)
        if tokens is None:
            tokens = there.sum(1).float().mean()
        # A batch without any text token has text losses of 0, which may be divided by anything.
        text_mean = (text.sum(1) / tokens.clamp(min=1e-6)).mean()
        image_mean = image.mean()
        return {
            "total": self._weighted(text_mean, image_mean),
            "text": text_mean.detach(),
            "image": image_mean.detach(),
        }

    def batch_means(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The number of predicted text tokens of each sample. See `Task.batch_means`."""
        return {TEXT_TOKENS: predicted(batch["text"]).sum(1)}

    @torch.no_grad()
    def evaluate(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """`text_loss` and `image_loss` in nats per token, `loss`, their weighted sum, and `text_tokens`: (B,) each.

        A sample without text tokens has a text loss of 0. Over a validation set, the text loss is averaged over tokens
        as in training: such samples have no weight.
        """
        text, image, there = self._losses(batch)
        tokens = there.sum(1)
        text_mean = text.sum(1) / tokens.clamp(min=1)
        image_mean = image.mean(1)
        return {
            "loss": self._weighted(text_mean, image_mean),
            "text_loss": text_mean,
            "image_loss": image_mean,
            TEXT_TOKENS: tokens,
        }

    def sample(self, text: Tensor, uniform: Tensor, choice: Choice, given: Tensor | None = None) -> Tensor:
        """Image tokens for captions, also while the model is sharded. See `sample_tokens`."""
        return sample_tokens(self.network, text, uniform, choice, given)

    def _losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Losses of text (B, T - 1) and image (B, N) tokens, and a mask of the text tokens, (B, T - 1) bool."""
        text, image = batch["text"], batch["image"]
        self.network.attends_on(image.device)
        hidden = self.network(text, image)[:, :-1]  # (B, S - 1, d): nothing follows the last token
        targets = torch.cat([text, image + self.network.text_vocabulary], dim=1)[:, 1:]  # (B, S - 1)
        losses = self.network.unembedding.losses(hidden.flatten(0, 1), targets.flatten())
        of_text, of_image = losses.view_as(targets).split([text.shape[1] - 1, image.shape[1]], dim=1)
        return of_text, of_image, predicted(text)

    def _weighted(self, text: Tensor, image: Tensor) -> Tensor:
        return (1 - self.image_weight) * text + self.image_weight * image

    def export_record(self) -> dict[str, Any]:
        """See `Task.export_record`."""
        return {"family": "autoregressive", "network": FOLDER}


def predicted(text: Tensor) -> Tensor:
    """Which text tokens are predicted, (B, T - 1) bool: those of (B, T) but the first, which nothing precedes."""
    return text[:, 1:] >= 0


def transformer_of(
    *,
    text_positions: int,
    side: int,
    kernel: int,
    attention: Literal["auto", "flex", "local", "masked"] = "auto",
    **sizes: int,
) -> TokenTransformer:
    """A new network of the sizes that `Autoregressive` takes and config.json holds."""
    return TokenTransformer(layout=TokenLayout(text_positions, side, kernel), implementation=attention, **sizes)


def load_transformer(folder: Path) -> TokenTransformer:
    """The network in the folder `transformer` or `transformer_ema` of an export. Only JSON and safetensors are read.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the tensors do not have the sizes of config.json.
    """
    return load_network(folder, transformer_of, separated)
