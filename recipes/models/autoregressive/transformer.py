"""DALL-E's decoder-only transformer over text and image tokens (Ramesh et al. 2021, section 2.2 and appendix B.1).

Letters: B batch, T text positions, N image positions, S = T + N, d width, H heads, D head width, V text vocabulary,
K image codes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from data.ranges import check_least
from recipes.models.autocast import for_products
from recipes.models.autoregressive.cache import Caches
from recipes.models.autoregressive.loss import token_losses
from recipes.models.autoregressive.masks import TokenLayout, layer_kinds, visible_pairs
from recipes.models.autoregressive.sparse_attention import Attend, Implementation, make_attend
from recipes.models.tensor_plan import DividedBranch, TensorPlan

INITIAL = 0.125  # standard deviation of initial weights, times sqrt(fan-in) (Child et al. 2019, section 6)


class CausalAttention(nn.Module):
    """Layer norm, then self-attention. The mask, or the cache, is an argument of the call."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm = nn.LayerNorm(width)
        # Not one stacked matrix: a part of the rows of each of these is a number of whole heads.
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """(B, S, d) -> (B, S, d)."""
        x = self.enter(self.norm(x), attend)  # (B, S, d)
        q, k, v = (self._heads(layer(x)) for layer in (self.q, self.k, self.v))  # (B, H, S, D) each
        x = attend(q, k, v).transpose(1, 2).flatten(2)  # (B, S, d)
        return self.out(attend.leave(x))

    def enter(self, x: Tensor, attend: Attend) -> Tensor:
        """See `DividedBranch.module`: (B, S, d) -> (B, S, d)."""
        return attend.enter(for_products(x))

    def _heads(self, x: Tensor) -> Tensor:
        """(B, S, H D) -> (B, H, S, D), for as many heads as there are."""
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class MLP(nn.Module):
    """Layer norm, then two linear layers with a GELU between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, d) -> (B, S, d)."""
        return self.down(nn.functional.gelu(self.up(self.enter(self.norm(x)))))

    def enter(self, x: Tensor) -> Tensor:
        """See `DividedBranch.module`: (B, S, d) -> (B, S, d)."""
        return x


class Residual(nn.Module):
    """x + branch(x): the unit of sharding, activation checkpointing and gradient scaling.

    Under autocast the branch is computed in 16 bits, while x and the sum are float32.

    Args:
        branch: from x to what is added to it.
        dropout: share of the branch's outputs that are dropped in training.
    """

    def __init__(self, branch: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.branch = branch
        self.dropout = nn.Dropout(dropout) if dropout else None

    def forward(self, x: Tensor, *context: Attend) -> Tensor:
        """(B, S, d) -> (B, S, d)."""
        y = self.branch(x, *context)
        return x + (y if self.dropout is None else self.dropout(y))


class Unembedding(nn.Linear):
    """One softmax over all tokens: (..., d) -> logits (..., C), without a bias. Logits are never held for all rows."""

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__(width, tokens, bias=False)

    def losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The cross-entropy of each row, see `token_losses`: hidden (M, d), targets (M,) int64 -> (M,)."""
        return token_losses(hidden, self.weight, targets)

    def logits(self, hidden: Tensor, first: int) -> Tensor:
        """(..., d) -> (..., C - first): logits of the tokens from `first` on, in the dtype of `hidden`."""
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(hidden, self.weight[first:].to(hidden.dtype))


class TokenTransformer(nn.Module):
    """(text tokens, image tokens) -> one vector per position, from which the next token is predicted."""

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
        """Build it with new weights, initialised as in Child et al. (2019, 5.2 and 6), the architecture DALL-E names.

        Standard deviations: weights 0.125 / sqrt(fan-in); token embeddings 0.125 / sqrt(d); position embeddings the
        same, divided by the root of their number per position. Output layers of residual branches are divided by
        sqrt(2 layers). Biases and the unembedding are 0: training starts with equal probabilities of all V + K tokens.

        Args:
            layout: text positions and image grid.
            layers: number of attention layers, each followed by an MLP.
            width: width of the residual stream, d.
            heads: number of attention heads, H.
            text_vocabulary: size of the text vocabulary, V.
            codes: number of image codes, K.
            implementation: implementation of attention, see `make_attend`.

        Raises:
            ValueError: no layers, or a width that is not a multiple of the heads.
        """
        super().__init__()
        check_least("transformer", 1, width=width, heads=heads, text_vocabulary=text_vocabulary, codes=codes)
        if layers < 1 or width % heads:
            raise ValueError(
                f"transformer: {layers} layers, width {width}, {heads} heads: give at least 1 layer, and a width that "
                "is a multiple of the number of heads"
            )
        self.layout = layout
        self.head_width = width // heads
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
        self.stream = nn.Identity()  # the residual stream begins here
        # Attention and MLP of layer i are blocks 2i and 2i + 1.
        self.blocks = nn.ModuleList(
            Residual(branch) for _ in range(layers) for branch in (CausalAttention(width, heads), MLP(width))
        )
        self.norm = nn.LayerNorm(width)
        self.unembedding = Unembedding(width, text_vocabulary + codes)  # text and image
        self._attends: dict[torch.device, list[Attend]] = {}
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new initial weights."""
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

    def cast_blocks(self, dtype: torch.dtype, device: str | torch.device | None = None) -> None:
        """Hold the matrices of all blocks in the dtype of autocast, as which it would keep a copy of each beside them.

        What the network computes under autocast is the same in every bit. It can no longer be trained.

        Args:
            dtype: of autocast.
            device: where the matrices move, one by one, so that no second copy of all of them is held; None: they stay.
        """
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                module.to(device=device, dtype=dtype)

    def forward(self, text: Tensor | None, image: Tensor, caches: Caches | None = None) -> Tensor:
        """One vector per position, from which the token after it is predicted.

        Args:
            text: (B, T) int64 in [0, V), -1 for padding; None: the caches hold it.
            image: (B, n) int64 in [0, K). Without caches, n = N. With new caches, the image tokens that are given; with
                begun caches, the next token.
            caches: keys and values of earlier tokens, which the call extends.

        Returns:
            float32, (B, S, d); (B, T + n, d) with new caches; (B, 1, d) with begun caches.
        """
        if caches is not None:
            caches.begin(image.device) if text is not None else caches.begin_token()
        x = self.embed_image(image, 0 if text is not None else caches.image)  # (B, n, d)
        if text is not None:
            x = torch.cat([self.embed_text(text), x], dim=1)  # (B, T + n, d)
        # The identity path is float32, also with 16-bit embeddings.
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        x = self.stream(x)
        attends = self.attends_on(x.device) if caches is None else caches.layers
        for number, attend in enumerate(attends):
            x = self.blocks[2 * number](x, attend)
            x = self.blocks[2 * number + 1](x)
        if caches is not None:
            caches.image += image.shape[1]
        return self.norm(x)

    def embed_text(self, text: Tensor) -> Tensor:
        """(B, T) -> (B, T, d): token plus position. Padding has a learned embedding per position."""
        tokens = self.text_tokens(text.clamp(min=0))
        positions = torch.arange(self.layout.text, device=text.device)
        tokens = torch.where((text < 0)[..., None], self.text_padding(positions), tokens)
        return tokens + self.text_positions(positions)

    def embed_image(self, image: Tensor, first: int | Tensor = 0) -> Tensor:
        """(B, n) -> (B, n, d): token plus row plus column, for the grid positions from `first`, (1,) int64, on."""
        position = torch.arange(image.shape[1], device=image.device) + first
        rows, columns = position // self.layout.side, position % self.layout.side
        return self.image_tokens(image) + (self.image_rows(rows) + self.image_columns(columns))

    def image_logits(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., K), float32: logits of the image codes, without those of the text tokens."""
        return self.unembedding.logits(x, self.text_vocabulary)

    def new_caches(self, repeat: int = 1) -> Caches:
        """Empty caches.

        Args:
            repeat: number of sequences that continue each sequence of the first call.
        """
        return Caches(self.kinds, self.layout, repeat)

    def attends_on(self, device: torch.device) -> list[Attend]:
        """The attention of each layer, made once per device; layers of the same kind share it.

        `forward` asks for it. Before a forward that is compiled or captured, it must have been made: the compiler would
        divide its graph at FlexAttention's masks, and compile another one for the second batch, which finds them made.
        """
        if device not in self._attends:
            made = {
                kind: make_attend(self.implementation, kind, self.layout, device, self.head_width)
                for kind in set(self.kinds)
            }
            self._attends[device] = [made[kind] for kind in self.kinds]
        return self._attends[device]

    def tensor_plan(self) -> TensorPlan:
        """How tensor parallelism divides it: attention by heads, MLPs by their width, the unembedding by tokens."""
        width, length = self.norm.normalized_shape[0], self.layout.length
        return TensorPlan(
            branches=divided_branches(self.blocks),
            vocabulary=self.unembedding,
            sizes={"heads": width // self.blocks[0].branch.head_width},
            positions=length,
            predicted=length - 1,
            width=width,
            begins=self.stream,
            ends=self.norm,
        )

    def forward_flops(self) -> float:
        """FLOPs of the forward pass of one sample, counting a multiply-add as 2. The backward pass has twice as many.

        The matrices of blocks and unembedding are counted, not the embeddings, and the (query, key) pairs that each
        layer's mask shows. PyTorch's counter does not support FlexAttention.
        """
        layout, width = self.layout, self.norm.normalized_shape[0]
        matrices = sum(m.in_features * m.out_features for m in self.modules() if isinstance(m, nn.Linear))
        pairs = {kind: visible_pairs(kind, layout) for kind in set(self.kinds)}
        return 2.0 * matrices * layout.length + 4.0 * width * sum(pairs[kind] for kind in self.kinds)


def divided_branches(blocks: Iterable[Residual]) -> list[DividedBranch]:
    """Attention divided by heads, MLPs by their inner width."""
    found = []
    for branch in (block.branch for block in blocks):
        attention = isinstance(branch, CausalAttention)
        columns, rows = ((branch.q, branch.k, branch.v), branch.out) if attention else ((branch.up,), branch.down)
        found.append(DividedBranch(branch, branch.norm, columns, rows))
    return found
