"""Small models with residual blocks, as the tests of 16-bit training share them."""

import torch
from torch import nn

from recipes.models.task import Task


class Times(nn.Module):
    """A layer scale."""

    def __init__(self, gain):
        super().__init__()
        self.gain = gain

    def forward(self, x):
        return x * self.gain


class Block(nn.Module):
    def __init__(self, branch):
        super().__init__()
        self.branch = branch

    def forward(self, x):
        return x + self.branch(x)


def network(width=32, gains=(1.0,) * 6):
    """Residual blocks, the output of each branch times its gain."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            Block(
                nn.Sequential(
                    nn.LayerNorm(width),
                    nn.Linear(width, 2 * width),
                    nn.GELU(),
                    nn.Linear(2 * width, width, bias=False),
                    Times(gain),
                )
            )
            for gain in gains
        )
    )


class Residual(Task):
    """Two blocks of two matrices between an embedding and an unembedding."""

    def __init__(self, width=16, words=11):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(
            Block(
                nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            )
            for _ in range(2)
        )
        self.head = nn.Linear(width, words)

    def blocks(self):
        return list(self.layers)

    def forward(self, words):
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class WordTask(Residual):
    """Learns a number of each word."""

    eval_names: list[str] = []

    def forward(self, batch):
        logits = super().forward(batch["words"])
        wanted = (batch["words"] * 3 + 1) % 11
        return {"total": nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())}


def loss_of(model, step):
    batch = torch.randint(11, (8, 8), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(batch).flatten(0, 1), ((batch * 3 + 1) % 11).flatten())


def train(model, optimizer, steps, start=0):
    losses = []
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def vector(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])
