"""The matrices of a model: of its residual blocks, which 16-bit training changes, and all of them."""

from __future__ import annotations

from torch import nn


def block_matrices(task: nn.Module, owner: str) -> list[list[nn.Parameter]]:
    """The trained matrices of each block of a task, in the order of the blocks.

    All other parameters stay in 32 bits (Ramesh et al. 2021, appendix D): gains and biases, which have one dimension,
    and embeddings and unembeddings, which are outside of the blocks or in an `nn.Embedding`.

    Args:
        task: offers `blocks()`, the modules that are sharded and checkpointed one by one.
        owner: name of the calling component, for messages.

    Raises:
        ValueError: the task has no blocks, or no matrices in them.
    """
    blocks = list(task.blocks())
    if not blocks:
        raise ValueError(
            f"{owner}: {type(task).__name__} does not say which of its modules are blocks (a method `blocks`), so it "
            "is not known which of its parameters may have 16 bits"
        )
    left = {id(p) for p in matrices_of(task)}
    found = []
    for block in blocks:
        matrices = [p for p in block.parameters() if id(p) in left]
        left -= {id(p) for p in matrices}  # a matrix that two blocks share belongs to the first
        found.append(matrices)
    if not any(found):
        raise ValueError(f"{owner}: the {len(blocks)} blocks of {type(task).__name__} have no trained matrices")
    return found


def matrices_of(task: nn.Module) -> list[nn.Parameter]:
    """The trained parameters of two or more dimensions, in the order of the model, without those in an `nn.Embedding`.

    A parameter that an embedding shares with another module, such as the unembedding, is an embedding.
    """
    embeddings = {id(p) for m in task.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    return [p for p in task.parameters() if p.requires_grad and p.ndim >= 2 and id(p) not in embeddings]
