"""Many small look-ups in files at the same time: on a network file system each of them waits for a server."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item, Result = TypeVar("Item"), TypeVar("Result")

THREADS = 32
GROUP = 16  # items of a task of a thread: tasks of one item would cost more than a look-up on a local disk
AHEAD = 2 * THREADS  # tasks that are begun before their results are taken


def side_by_side(look_up: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """The results of a function of each item, in the order of the items.

    The function is called in several threads. At most AHEAD * GROUP results are held.

    Raises:
        Exception: the first error of the function, in the order of the items.
    """
    left = iter(items)
    with ThreadPoolExecutor(THREADS, "look-up") as pool:
        begun: deque[Future[list[Result]]] = deque()
        try:
            while group := list(islice(left, GROUP)):
                begun.append(pool.submit(_each, look_up, group))
                if len(begun) > AHEAD:
                    yield from begun.popleft().result()
            while begun:
                yield from begun.popleft().result()
        finally:
            for task in begun:  # after an error, or where no further result is wanted
                task.cancel()


def _each(look_up: Callable[[Item], Result], group: list[Item]) -> list[Result]:
    return [look_up(item) for item in group]
