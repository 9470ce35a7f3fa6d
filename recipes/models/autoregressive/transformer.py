"""DALL-E's decoder-only transformer over text and image tokens (Ramesh et al. 2021, section 2.2 and appendix B.1).

Letters: B batch, T text positions, N image positions, S = T + N, d width, H heads, D head width, V text vocabulary,
K image codes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from recipes.models.autoregressive.cache import Caches
from recipes.models.autoregressive.masks import TokenLayout, layer_kinds, visible_pairs
from recipes.models.autoregressive.sparse_attention import Attend, Implementation, make_attend

INITIAL = 0.125  # of weights: deviation times the root of the fan-in (Child et al. 2019, section 6)


class CausalAttention(nn.Module):
    """Layer norm, then attention; the mask, or the cache, comes with the call."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.qkv.stacked = 3  # matrices one above the other, of queries, keys and values
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """(B, S, d) -> (B, S, d)."""
        x = attend.enter(self.norm(x))  # (B, S, d)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, S, D) each
        x = attend(q, k, v).transpose(1, 2).flatten(2)  # (B, S, d)
        return attend.leave(self.out(x))


class MLP(nn.Module):
    """Layer norm, then two linear layers with a GELU between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, d) -> (B, S, d)."""
        return self.down(nn.functional.gelu(self.up(self.norm(x))))


class Residual(nn.Module):
    """x + branch(x): the unit of sharding, of activation checkpointing and of gradient scaling.

    Under autocast the branch has 16 bits and the sum, like x, 32.
    """

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor, *context: Attend) -> Tensor:
        """(B, S, d) -> (B, S, d)."""
        return x + self.branch(x, *context)


class TokenTransformer(nn.Module):
    """(text tokens, image tokens) -> a vector for each position, from which the next token is predicted."""

    def __init__(
        self,
        *,
        layout: TokenLayout,
        layers: int,
        width: int,
        heads: int,
        text_vocabulary: int,
        codes: int,
        implementation: Implementation = "auto",
    ) -> None:
        """New weights, as Child et al. (2019, section 6) draw them for the kind of transformer that DALL-E says it is.

        Weights deviate by 0.125 / sqrt(fan-in), token embeddings by 0.125 / sqrt(d), position embeddings by that over
        the root of their number at a position; the output layers of residual branches are divided by sqrt(2 layers).
        Biases and the unembedding are 0, so that training begins with the same probability for all V + K tokens.

        Args:
            layout: text positions and image grid.
            layers: attention layers, each with an MLP.
            width: of the residual stream.
            heads: attention heads.
            text_vocabulary: V.
            codes: K.
            implementation: of attention.

        Raises:
            ValueError: the width is no multiple of the heads.
        """
        super().__init__()
        if layers < 1 or width % heads:
            raise ValueError(f"transformer: {layers} layers, width {width} with {heads} heads: they do not divide")
        self.layout = layout
        self.kinds = layer_kinds(layers)
        self.text_vocabulary = text_vocabulary
        self.codes = codes
        self.implementation: Implementation = implementation
        self.text_tokens = nn.Embedding(text_vocabulary, width)
        self.text_padding = nn.Embedding(layout.text, width)
        self.text_positions = nn.Embedding(layout.text, width)
        self.image_tokens = nn.Embedding(codes, width)
        self.image_rows = nn.Embedding(layout.side, width)
        self.image_columns = nn.Embedding(layout.side, width)
        # Attention and MLP of layer i are blocks 2i and 2i + 1.
        self.blocks = nn.ModuleList(
            Residual(branch) for _ in range(layers) for branch in (CausalAttention(width, heads), MLP(width))
        )
        self.norm = nn.LayerNorm(width)
        self.unembedding = nn.Linear(width, text_vocabulary + codes, bias=False)  # one softmax over text, then image
        self._attends: dict[torch.device, list[Attend]] = {}
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        width = self.norm.normalized_shape[0]
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INITIAL / math.sqrt(module.in_features))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=INITIAL / math.sqrt(width))
        for positions in (self.image_rows, self.image_columns):
            positions.weight.div_(math.sqrt(2))
        for block in self.blocks:
            last = block.branch.out if isinstance(block.branch, CausalAttention) else block.branch.down
            last.weight.div_(math.sqrt(len(self.blocks)))
        nn.init.zeros_(self.unembedding.weight)

    def forward(self, text: Tensor | None, image: Tensor, caches: Caches | None = None) -> Tensor:
        """The vector at each position that predicts the token after it.

        Args:
            text: (B, T) int64 in [0, V), -1 where there is no token; None: the caches hold it.
            image: (B, n) int64 in [0, K). Without caches n = N; with them the tokens that come next, one of them
                unless the caches are new.
            caches: what the layers saw before, which the call adds to.

        Returns:
            (B, S, d), (B, T + n, d) for new caches, (B, 1, d) for one token more; 32-bit.
        """
        x = self.embed_image(image, 0 if caches is None else caches.image)  # (B, n, d)
        if text is not None:
            x = torch.cat([self.embed_text(text), x], dim=1)  # (B, T + n, d)
        x = x.to(torch.promote_types(x.dtype, torch.float32))  # 16-bit tables, too, begin a 32-bit identity path
        attends = self._attends_on(x.device) if caches is None else caches.layers
        for number, attend in enumerate(attends):
            x = self.blocks[2 * number](x, attend)
            x = self.blocks[2 * number + 1](x)
        if caches is not None:
            caches.image += image.shape[1]
        return self.norm(x)

    def embed_text(self, text: Tensor) -> Tensor:
        """(B, T) -> (B, T, d): token and position; without a token the padding that is learned for the position."""
        tokens = self.text_tokens(text.clamp(min=0))
        tokens = torch.where((text < 0)[..., None], self.text_padding.weight, tokens)
        return tokens + self.text_positions.weight

    def embed_image(self, image: Tensor, first: int = 0) -> Tensor:
        """(B, n) -> (B, n, d): token, row and column, of the grid positions from `first` on."""
        position = torch.arange(first, first + image.shape[1], device=image.device)
        rows, columns = position // self.layout.side, position % self.layout.side
        return self.image_tokens(image) + (self.image_rows(rows) + self.image_columns(columns))

    def image_logits(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., K), 32-bit: the part of the softmax that an image token can be."""
        weight = self.unembedding.weight[self.text_vocabulary :]
        with torch.autocast(x.device.type, enabled=False):
            return nn.functional.linear(x, weight.to(x.dtype))

    def new_caches(self, repeat: int = 1) -> Caches:
        """Empty caches.

        Args:
            repeat: sequences that will go on from each of those that the caches are begun with.
        """
        return Caches(self.kinds, self.layout, repeat)

    def _attends_on(self, device: torch.device) -> list[Attend]:
        """The attention of each layer; layers of one kind share theirs. Made once a device, outside of the blocks."""
        if device not in self._attends:
            made = {kind: make_attend(self.implementation, kind, self.layout, device) for kind in set(self.kinds)}
            self._attends[device] = [made[kind] for kind in self.kinds]
        return self._attends[device]


def forward_flops(network: TokenTransformer, sparse: bool = True) -> float:
    """FLOPs of the forward pass of a sample, a multiply-add counted as 2; the backward pass has twice as many.

    Args:
        network: the matrices of its blocks and its unembedding are counted, tables are not.
        sparse: count the pairs of a query and a key that each layer's mask shows; else all S * S.
    """
    layout, width = network.layout, network.norm.normalized_shape[0]
    matrices = sum(module.weight.numel() for module in network.modules() if isinstance(module, nn.Linear))
    pairs = {kind: visible_pairs(kind, layout) if sparse else layout.length**2 for kind in set(network.kinds)}
    return 2.0 * matrices * layout.length + 4.0 * width * sum(pairs[kind] for kind in network.kinds)
