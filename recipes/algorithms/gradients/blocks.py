"""The parameters that 16-bit training changes: the matrices of residual blocks, and nothing else."""

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
    embeddings = {id(p) for m in task.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    seen: set[int] = set(embeddings)
    found = []
    for block in blocks:
        matrices = [p for p in block.parameters() if p.requires_grad and p.ndim >= 2 and id(p) not in seen]
        seen |= {id(p) for p in matrices}  # a matrix that two blocks share belongs to the first
        found.append(matrices)
    if not any(found):
        raise ValueError(f"{owner}: the {len(blocks)} blocks of {type(task).__name__} have no trained matrices")
    return found
