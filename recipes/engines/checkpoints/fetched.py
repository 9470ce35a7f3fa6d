"""Checkpoints of a bucket in the run's folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from data.system.files import point_to, write_text
from data.system.log import log
from recipes.engines.checkpoints.bucket import Bucket
from recipes.engines.record import RECORD, keep_texts
from recipes.training.checkpoint_names import batch_of, newest_of_all
from recipes.training.ranks import by_first_rank


def fetch_newest(bucket: Bucket, output: Path, check: Callable[[dict[str, str]], None] = lambda texts: None) -> None:
    """Fetch the newest checkpoint and the record, unless the run's folder has one that is as new.

    Only the first rank calls this, before it looks for checkpoints.

    Args:
        bucket: with copies of the run's checkpoints, or empty.
        output: folder of the run.
        check: called with the texts of the record, by names of files, before anything is fetched; it raises if the
            bucket has another run's checkpoints.

    Raises:
        ValueError: the store refuses it, or does not answer; or from `check`.
    """
    latest = bucket.latest()
    if latest is None:
        return
    texts = {name: text for name, text in latest.get("record", {}).items() if name in RECORD}
    check(texts)
    folder, name = output / "checkpoints", Path(latest["checkpoint"]).name
    newest = newest_of_all(folder)
    if newest is not None and batch_of(newest.name) >= batch_of(name):
        return
    log.info(f"checkpoints: fetches {name} from {bucket.address}")
    keep_texts(output, folder / name, texts)
    bucket.fetch(name, folder / name)
    for record in set(texts) - {file.name for file in output.iterdir()}:
        write_text(output / record, texts[record])
    point_to(folder / Path(latest["link"]).name, folder / name)


def fetched(address: str, output: Path) -> Path:
    """The path of a checkpoint of a bucket in the run's folder, into which the first rank fetches it. Every rank must
    call it.

    Raises:
        ValueError: there is no such checkpoint, the store refuses it, or it does not answer.
    """
    folder, _, name = address.rstrip("/").rpartition("/")
    path = output / "fetched" / name
    by_first_rank(lambda: Bucket(folder).fetch(name, path))
    return path.resolve()

