"""Contrastive training of a text encoder and an image encoder (CLIP), with open_clip's modules."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data.loading import WEIGHT
from data.ranges import check_least
from data.tokenizers.clip_library import open_clip
from recipes.models.autocast import without_autocast
from recipes.models.json_files import object_in, read_object
from recipes.models.kl_autoencoder.task import to_signed
from recipes.models.task import Task
from recipes.models.weights import check_config, load_safetensors, save_safetensors

CONFIG, WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"
SCALE = "logit_scale"  # in files of open_clip: the logarithm, a scalar


HEAD_WIDTH = 32  # of the image transformer
LARGEST_LOG_SCALE = math.log(100)


class LogitScale(nn.Module):
    """The factor of similarities, at most 100 (section 2.5), trained by its logarithm.

    A module of its own with a tensor of one dimension: FSDP shards no scalars, and it would round the logarithm to 16
    bits with the weights around it, of which each step is 2% of the factor.
    """

    full_precision = True

    def __init__(self, log: Tensor) -> None:
        """
        Args:
            log: the logarithm at the start, a scalar.
        """
        super().__init__()
        self.log = nn.Parameter(log.detach().reshape(1))

    def forward(self) -> Tensor:
        """The factor, float32: (1,).

        At the largest factor, the logarithm keeps gradients that make it smaller: a clamped one would stay there.
        """
        log = self.log.float()
        excess = (log.detach() - LARGEST_LOG_SCALE).clamp(min=0)
        log = log - excess
        if log.requires_grad:
            log.register_hook(lambda gradient: gradient.where(excess == 0, gradient.clamp(min=0)))
        return log.exp()


class ContrastiveText(Task):
    """CLIP (Radford et al. 2021, section 2.3): captions are matched to their images within a batch, and the reverse."""

    compares_samples = True

    def __init__(
        self,
        *,
        width: int,
        layers: int,
        heads: int,
        context_length: int = 77,
        vocabulary: int = 49408,
        picture_size: int = 224,
        patch_size: int = 16,
        picture_width: int = 768,
        picture_layers: int = 12,
        embedding: int = 512,
    ) -> None:
        """Build both towers with new weights.

        Args:
            width: width of the text transformer, which becomes the text_width of a denoiser.
            layers: blocks of the text transformer.
            heads: attention heads of the text transformer.
            context_length: tokens per caption, including the start and end marks.
            vocabulary: size of the vocabulary; 49,408 is that of open_clip's byte-pair tokenizer.
            picture_size: side of the images in pixels, a multiple of patch_size.
            patch_size: side of a patch in pixels.
            picture_width: width of the image transformer, a multiple of its head width 32.
            picture_layers: blocks of the image transformer.
            embedding: width of the joint embedding space.

        Raises:
            ValueError: sizes below 1, or that do not divide.
        """
        super().__init__()
        text = {"width": width, "layers": layers, "heads": heads, "vocabulary": vocabulary, "embedding": embedding}
        pictures = {"picture_width": picture_width, "picture_layers": picture_layers, "patch_size": patch_size}
        check_least("contrastive_text", 1, **text, **pictures)
        check_least("contrastive_text", 3, context_length=context_length)  # a token between the marks
        check_least("contrastive_text", patch_size, picture_size=picture_size)
        if width % heads or picture_width % HEAD_WIDTH or picture_size % patch_size:
            raise ValueError(
                f"contrastive_text: width {width} must be a multiple of heads ({heads}), picture_width {picture_width} "
                f"of {HEAD_WIDTH}, and picture_size {picture_size} of patch_size ({patch_size})"
            )
        self.config: dict[str, Any] = {
            "embed_dim": embedding,
            "vision_cfg": {
                "image_size": picture_size,
                "patch_size": patch_size,
                "width": picture_width,
                "layers": picture_layers,
                "head_width": HEAD_WIDTH,
            },
            "text_cfg": {
                "context_length": context_length,
                "vocab_size": vocabulary,
                "width": width,
                "heads": heads,
                "layers": layers,
            },
        }
        self.network = open_clip.CLIP(**self.config)
        self.logit_scale = LogitScale(self.network.logit_scale)
        del self.network.logit_scale
        self.eval_names = ["loss", "accuracy"]
        self.eval_weights = {name: "compared" for name in self.eval_names}

    def requirements(self) -> dict[str, int]:
        """The sizes that images and captions must have."""
        text = self.config["text_cfg"]
        return {
            "picture_size": self.config["vision_cfg"]["image_size"],
            "context_length": text["context_length"],
            "caption_vocabulary": text["vocab_size"],
        }

    def networks(self) -> list[nn.Module]:
        """The image tower and the text transformer, which are called one by one."""
        return [self.network.visual, self.network.transformer]

    def _similarities(self, batch: dict[str, Tensor]) -> Tensor:
        """Logits (B, B), float32 also under autocast: images as rows, captions as columns.

        They reach 100, where neighbouring bf16 numbers are 0.5 apart.
        """
        images = self.network.encode_image(to_signed(batch["image"])).float()  # (B, E)
        captions = self.network.encode_text(batch["tokens"]).float()  # (B, E)
        with without_autocast(images.device):
            images, captions = (nn.functional.normalize(embedding, dim=-1) for embedding in (images, captions))
            return self.logit_scale() * images @ captions.T  # (B, B)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The symmetric contrastive loss over the pairs of this (micro)batch.

        Args:
            batch: `image` (B, 3, H, W) uint8, `tokens` (B, L) int64.

        Returns:
            `total` in nats: scalar.
        """
        similarities = self._similarities(batch)
        return {"total": _contrast(similarities).mean()}

    @torch.no_grad()
    def evaluate(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """`loss` in nats, and `accuracy` (1 if the image's own caption is the nearest of the batch): (B,) each.

        A sample whose weight is 0 is compared with none, so that it changes nothing of the others. One that is alone,
        such as the last of a set, is always right: `compared` (B,), the weight in means over the set, is then 0. For a
        set of one sample, engines log nan.
        """
        similarities = self._similarities(batch)
        own = torch.arange(len(similarities), device=similarities.device)
        real = batch[WEIGHT] != 0 if WEIGHT in batch else torch.ones_like(own, dtype=torch.bool)
        others = own[:, None] != own
        similarities = similarities.masked_fill(~(real[:, None] & real) & others, -torch.inf)
        accuracy = (similarities.argmax(1) == own).float()
        compared = (real.sum() > 1).float().expand(len(own))
        return {"loss": _contrast(similarities), "accuracy": accuracy, "compared": compared}

    def export(self, folder: Path) -> None:
        """Write an open_clip folder: `open_clip.create_model("local-dir:<folder>")` opens it."""
        config = {"model_cfg": self.config, "preprocess_cfg": {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
        log = self.logit_scale.log.detach().clamp(max=LARGEST_LOG_SCALE)  # as in training; open_clip has no bound
        scale = {SCALE: log.reshape(())}
        save_safetensors(self.network.state_dict() | scale, folder / WEIGHTS)

    def load_export(self, folder: Path) -> None:
        """See `Task.load_export`."""
        load_safetensors(self, folder / WEIGHTS, _of_task)
        saved = object_in(read_object(folder / CONFIG), "model_cfg", folder / CONFIG, {})
        check_config({"quick_gelu": False}, folder / CONFIG, saved)
        parts = {"vision_cfg": open_clip.CLIPVisionCfg, "text_cfg": open_clip.CLIPTextCfg}
        for part, defaults in parts.items():  # published files leave values out that are open_clip's own
            theirs = object_in(saved, part, folder / CONFIG, {})
            check_config(self.config[part], folder / CONFIG, vars(defaults()) | theirs)


def _of_task(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file of open_clip by the names of the task."""
    found = {f"network.{name}": tensor for name, tensor in tensors.items() if name != SCALE}
    return found | ({"logit_scale.log": tensors[SCALE].reshape(-1)} if SCALE in tensors else {})


def _contrast(similarities: Tensor) -> Tensor:
    own = torch.arange(len(similarities), device=similarities.device)
    image_to_caption = nn.functional.cross_entropy(similarities, own, reduction="none")
    caption_to_image = nn.functional.cross_entropy(similarities.T, own, reduction="none")
    return (image_to_caption + caption_to_image) / 2  # (B,)
