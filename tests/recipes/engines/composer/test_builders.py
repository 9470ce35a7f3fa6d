"""Loggers by name: metrics and pictures of a short run arrive where they should."""

import copy
import sqlite3

import numpy as np
import pytest
import torch
from composer import Callback, Trainer
from torch.utils.data import DataLoader

from recipes.algorithms.optimizers import adamw
from recipes.config.build import build
from recipes.config.components import COMPONENTS
from recipes.config.schema import Component
from recipes.engines.composer.model import ComposerTask
from recipes.models.task import Task


class Line(Task):
    eval_names = ["loss"]

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, batch):
        return {"total": ((self.weight - batch["x"]) ** 2).mean()}

    def evaluate(self, batch):
        return {"loss": (self.weight - batch["x"]) ** 2}


class Pictures(Callback):
    def fit_end(self, state, logger):
        logger.log_images(np.zeros((2, 8, 8, 3), np.uint8), name="samples", channels_last=True, step=1, use_table=False)


def component(name, **arguments):
    return Component("logger", name, arguments, COMPONENTS["logger"][name], f"loggers.{name}")


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """A run that logs to all of them."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        loggers = [
            component("tensorboard", flush_every=1),
            component("wandb", project="test", offline=True),
            component("mlflow", experiment="test"),
        ]
        built = [build(logger, run_name="short", output=str(folder)) for logger in loggers]
        data = DataLoader([{"x": torch.tensor(float(i))} for i in range(4)], batch_size=2)
        task = Line()
        trainer = Trainer(
            model=ComposerTask(task),
            train_dataloader=data,
            eval_dataloader=data,
            max_duration="2ba",
            optimizers=torch.optim.SGD(task.parameters(), lr=0.1),
            loggers=built,
            callbacks=[Pictures()],
            run_name="short",
            progress_bar=False,
        )
        trainer.fit()
        trainer.close()
    return folder


def test_tensorboard_has_metrics_and_pictures(output):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = next((output / "tensorboard").rglob("events*")).parent
    events = EventAccumulator(str(folder))
    events.Reload()
    assert "loss/train/total" in events.Tags()["scalars"]
    assert any("samples" in tag for tag in events.Tags()["images"])


def test_wandb_writes_below_the_output(output):
    (run,) = (output / "wandb").glob("offline-run-*")
    assert next(run.glob("*.wandb")).stat().st_size > 0
    assert list(run.rglob("*.png"))


def test_mlflow_writes_a_database_below_the_output(output):
    with sqlite3.connect(output / "mlflow.db") as database:
        keys = {row[0] for row in database.execute("select key from metrics")}
    assert "loss/train/total" in keys


def test_fused_adamw_is_adamw():
    """In both memory orders, over steps whose bias correction matters, and from a state of the other kind."""

    def train(fused, load=None, steps=20):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.GroupNorm(2, 8), torch.nn.Conv2d(8, 5, 1))
        net.to(memory_format=torch.channels_last)
        optimizer = adamw(net.parameters(), lr=0.01, weight_decay=0.1, fused=fused)
        if load is not None:
            net.load_state_dict(load[0])
            optimizer.load_state_dict(copy.deepcopy(load[1]))  # it would write into what it was given
            optimizer.param_groups[0]["fused"] = fused
        generator = torch.Generator().manual_seed(1)
        for _ in range(steps):
            net(torch.randn(2, 3, 6, 6, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return net, optimizer

    assert train(fused=True)[1].param_groups[0]["fused"] and not train(fused=False)[1].param_groups[0]["fused"]
    saved = [part.state_dict() for part in train(fused=False)]
    for load in (None, saved):
        one, other = (torch.cat([p.detach().flatten() for p in train(f, load)[0].parameters()]) for f in (True, False))
        # One rounding a step of values around 1; a fifth of that is seen.
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert (
            one - torch.cat([p.detach().flatten() for p in train(True, load, 1)[0].parameters()])
        ).abs().max() > 0.01
