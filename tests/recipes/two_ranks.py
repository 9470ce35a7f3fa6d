"""Run by test_trainer.py on two ranks: trains the recipe at argv[1] and writes what each rank saw to argv[2].

The gradients that DDP averaged are held against those that each rank computes alone for its own batch and noise.
"""

import json
import sys
from pathlib import Path

import torch
from composer import Callback
from composer.utils import dist

from callbacks.throughput import Throughput
from recipes.config.recipe import Recipe, load_config
from recipes.engines.composer.trainer import build_trainer
from tests.recipes.engines.composer.inside import callback_of


class Watch(Callback):
    """Keeps the keys, noise, losses and gradients of this rank."""

    def __init__(self):
        self.seeds, self.losses, self.noise = [], [], []
        self.gradient_error = None

    def before_forward(self, state, logger):
        self.generator, self.batch = torch.get_rng_state(), state.batch
        self.seeds += state.batch["seed"].tolist()
        self.noise.append(torch.randn(4).tolist())
        torch.set_rng_state(self.generator)

    def after_loss(self, state, logger):
        self.losses.append(state.loss["total"].item())

    def after_train_batch(self, state, logger):
        if self.gradient_error is not None:
            return
        module = state.model.module  # inside of DDP
        averaged = [p.grad.clone() for p in module.parameters()]
        after = torch.get_rng_state()
        torch.set_rng_state(self.generator)
        own = torch.autograd.grad(module.task(self.batch)["total"], list(module.parameters()))
        torch.set_rng_state(after)
        errors, sizes = [], []
        for mean, gradient in zip(averaged, own, strict=True):
            total = gradient.clone()
            dist.all_reduce(total)
            errors.append((total / 2 - mean).abs().max().item())
            sizes.append((gradient - mean).abs().max().item())
        self.gradient_error, self.gradient_difference = max(errors), max(sizes)


def main():
    trainer = build_trainer(load_config(sys.argv[1], [], Recipe))
    initial = [p.detach().clone() for p in trainer.state.model.parameters()]
    watch = Watch()
    trainer.state.callbacks.append(watch)
    trainer.fit()
    parameters = torch.cat([p.detach().reshape(-1) for p in trainer.state.model.parameters()])
    communication = callback_of(trainer, Throughput).communication
    record = {
        "seeds": watch.seeds,
        "losses": watch.losses,
        "noise": watch.noise,
        "gradient_error": watch.gradient_error,
        "gradient_difference": watch.gradient_difference,
        "initial": sum(p.double().sum().item() for p in initial),
        "final": parameters.double().sum().item(),
        "communication": communication,
        "metrics": {name: float(value) for name, value in trainer.state.eval_metric_values.items()},
    }
    Path(sys.argv[2], f"rank{dist.get_global_rank()}.json").write_text(json.dumps(record))
    trainer.close()


if __name__ == "__main__":
    main()
