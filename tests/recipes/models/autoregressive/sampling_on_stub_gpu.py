"""Run by test_sampler.py in a process that takes the stub for a GPU: draws tokens with a CUDA graph and without."""

import json

import torch

from benchmarks.stub_gpu.use import Counts
from recipes.models.autoregressive.masks import TokenLayout
from recipes.models.autoregressive.sampler import Choice, Drawing
from recipes.models.autoregressive.transformer import TokenTransformer
from recipes.models.kernels.device_graph import DeviceGraph, has_graphs, memory_pool

TOKENS = 12  # that are drawn after the first


def main():
    counts, device = Counts(), torch.device("cuda")
    layout = TokenLayout(8, 8, 3)
    network = TokenTransformer(layout=layout, layers=6, width=32, heads=2, text_vocabulary=9, codes=30).to(device)
    network.cast_blocks(torch.bfloat16)
    text, uniform = torch.ones(2, 8, device=device).long(), torch.rand(2, 3, layout.image, device=device)
    given = text.new_zeros(2, 5)
    for choice in (Choice(), Choice(guidance=2.0, top_k=9, top_p=0.9)):
        for graph in (None, DeviceGraph(memory_pool()) if has_graphs(device) else None):
            with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                drawing = Drawing(network, text, uniform, choice, given)
                drawing.first_token(drawing.first_logits())
                launches, waits = counts.launches, counts.waits
                drawing.next_tokens(TOKENS, graph)
            print("row:", json.dumps([counts.launches - launches, counts.waits - waits, counts.strays]))


if __name__ == "__main__":
    main()
