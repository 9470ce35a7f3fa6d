"""Writes to a run of MLflow from a thread: training does not wait for the server, and does not end if it fails."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from data.remote.downloads import shown, without_logins
from data.system.errors import one_line
from data.system.log import log
from recipes.engines.logs.tracking import ask_once, log_parameters, refused

if TYPE_CHECKING:  # the import takes seconds, and few runs need it
    from mlflow.entities import Metric

EVERY = 2.0  # seconds between calls, in which figures gather
AGAIN = 10.0  # seconds until a server is asked again that has failed
AT_END = 1.0  # the same when the run has ended
SAID = 60.0  # seconds between lines about it
AT_ONCE = 1000  # figures that a server accepts in one call
FIGURE = 512  # bytes of a waiting one, estimated
MOST = 256 * 2**20  # bytes that may wait
LAST = 60.0  # seconds that the end of a run waits for a server that takes nothing
LAST_IF_STOPPED = 5.0  # the same after a signal, which clusters follow by a kill after 30, or after an error


@dataclass(frozen=True)
class Item:
    """Something that waits to be written.

    Attributes:
        what: one figure, or a function that writes something else.
        count: figures and images that it is.
        size: bytes.
    """

    what: Metric | Callable[[], Any]
    count: int
    size: int

    @property
    def figure(self) -> bool:
        """Whether it is a figure, many of which are written in one call."""
        return not callable(self.what)

    @property
    def image(self) -> bool:
        """Whether it is an image, which many servers keep elsewhere than figures."""
        return callable(self.what) and self.count > 0


class MLflowWriter:
    """Writes figures, images and settings in the order in which they come.

    What a server does not take waits, up to 256 MiB, and is sent again; the oldest is given up first. Figures do not
    wait for images, whose store may be one that this machine cannot write to. What a server refuses, such as figures of
    a run that was deleted, is left out. Each is said in one line, once per minute.
    """

    def __init__(self, uri: str, run_id: str, client: Any = None) -> None:
        """
        Args:
            uri: address of the server or the database.
            run_id: of the run there, which exists.
            client: MLflow's; None: a new one.
        """
        ask_once()
        if client is None:
            from mlflow import MlflowClient

            client = MlflowClient(uri)
        self._client, self._uri, self._run_id = client, shown(uri), run_id
        self._waiting: deque[Item] = deque()  # `_changed` guards it and what follows
        self._sending: list[Item] = []  # taken from it, and not yet written
        self._images: deque[Item] = deque()  # those that were not taken
        self._images_at = 0.0  # when they are tried again
        self._size = self._written = self._lost = 0
        self._closing = self._given_up = False
        self._changed = threading.Condition()
        self._said = -SAID
        self._failing = False
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def figures(self, figures: Mapping[str, float], step: int) -> None:
        """Write figures of a batch."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._add(*(Item(Metric(name, float(value), now, step), 1, FIGURE) for name, value in figures.items()))

    def images(self, name: str, images: np.ndarray, step: int) -> None:
        """Write images (N, H, W, 3) uint8 of a batch."""

        def write(number: int, image: np.ndarray) -> Callable[[], Any]:
            return lambda: self._client.log_image(self._run_id, image, key=f"{name}_{number}", step=step)

        self._add(*(Item(write(number, image), 1, image.nbytes) for number, image in enumerate(images)))

    def settings(self, settings: Mapping[str, Any]) -> None:
        """Write settings; see `log_parameters`."""
        self._add(Item(lambda: log_parameters(self._client, self._run_id, settings), 0, FIGURE))

    def close(self, status: str) -> None:
        """Write what waits, then the status: FINISHED, FAILED, or KILLED for a run that is to be started again.

        A server that takes nothing for a minute gets no more. Where the run has not come to its end, all takes 5 s at
        most.
        """
        if self._closing:
            return
        self._add(Item(lambda: self._client.set_terminated(self._run_id, status), 0, FIGURE))
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        ended = status == "FINISHED"
        written, since = self._written, time.monotonic()
        while self._thread.is_alive() and time.monotonic() - since < (LAST if ended else LAST_IF_STOPPED):
            self._thread.join(0.1)
            if ended and self._written > written:
                written, since = self._written, time.monotonic()
        with self._changed:
            missing = self._lost + sum(item.count for item in (*self._sending, *self._images, *self._waiting))
            self._given_up = True
        if missing:
            log.warning(f"loggers: MLflow at {self._uri} has not got {missing:,} figures and images of this run")

    def _add(self, *items: Item) -> None:
        with self._changed:
            self._waiting.extend(items)
            self._size += sum(item.size for item in items)
            while self._size > MOST and len(self._waiting) > 1:
                oldest = (self._images or self._waiting).popleft()
                self._size -= oldest.size
                self._lost += oldest.count

    def _work(self) -> None:
        """The thread: write until the run is closed and nothing waits."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing, timeout=AGAIN if self._failing else EVERY)
                closing = self._closing
            done = self._write_all()
            if closing and (done or self._given_up):
                return
            if closing:
                time.sleep(AT_END)

    def _write_all(self) -> bool:
        """Write what waits; whether nothing waits any more."""
        while not self._given_up and self._take():
            try:
                self._write(self._sending)
            except Exception as error:  # of MLflow, of the network, of a database: none of them may end a run
                if not refused(error) and self._sending[0].image:
                    self._say(f"does not take an image ({one_line(error)}); training goes on, and images wait")
                    with self._changed:
                        self._images.extend(self._sending)
                        self._sending, self._images_at = [], time.monotonic() + AGAIN
                    continue
                if not refused(error):
                    self._failing = True
                    self._say(f"takes nothing ({one_line(error)}); training goes on, and what is logged waits")
                    return False
                self._say(f"refuses what is logged ({one_line(error)}); training goes on without it")
                with self._changed:
                    self._lost += sum(item.count for item in self._sending)
            else:
                if self._failing:
                    self._failing, self._said = False, -SAID
                    log.info(f"loggers: MLflow at {self._uri} takes what is logged again")
            with self._changed:
                self._size -= sum(item.size for item in self._sending)
                self._written += len(self._sending)
                self._sending = []
        return not self._images

    def _take(self) -> bool:
        """Choose what to write next, unless something could not be written before: one item, and if it is a figure, as
        many of those that follow as go into one call. Whether there is something to write now."""
        with self._changed:
            while self._images and self._waiting and self._waiting[0].image:
                self._images.append(self._waiting.popleft())
            if not self._sending and not self._waiting and self._images and time.monotonic() >= self._images_at:
                self._waiting.append(self._images.popleft())
            if not self._sending and self._waiting:
                self._sending = [self._waiting.popleft()]
                most = AT_ONCE if self._sending[0].figure else 1
                while len(self._sending) < most and self._waiting and self._waiting[0].figure:
                    self._sending.append(self._waiting.popleft())
        return bool(self._sending)

    def _write(self, items: list[Item]) -> None:
        if items[0].figure:
            self._client.log_batch(self._run_id, metrics=[item.what for item in items])
        else:
            items[0].what()

    def _say(self, text: str) -> None:
        if time.monotonic() - self._said >= SAID:
            self._said = time.monotonic()
            log.warning(f"loggers: MLflow at {self._uri} {without_logins(text)}")
