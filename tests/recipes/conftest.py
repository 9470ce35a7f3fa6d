"""One launch of two ranks for the checks of several files."""

import json
import re
from pathlib import Path

import pytest

from recipes.config.recipe import to_yaml
from tests.ranks import launch


class TwoRanks:
    """The outcome of a launch; calling it with a check's name fails if the check did, else gives the check's folder."""

    def __init__(self, folder, reports, output):
        self.folder, self.reports, self.output = folder, reports, output

    def __call__(self, check):
        results = [report.get(check, "it was not reached:\n" + self.output) for report in self.reports]
        failed = "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(results) if text != "passed")
        if failed:
            pytest.fail(failed, pytrace=False)
        return self.folder / re.sub(r"\W+", "-", check)


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory, small_recipe, quick_recipe):
    """`lever_ranks` in one launch, for averages, microbatches and sharding."""
    from tests.recipes.algorithms.sharding.fsdp_ranks import RUN, WIDER

    folder = tmp_path_factory.mktemp("two_ranks")
    recipes = {"unet": small_recipe(folder / "run", *RUN), "runs": quick_recipe(folder / "run", *RUN, WIDER)}
    for name, recipe in recipes.items():
        (folder / f"{name}.yaml").write_text(to_yaml(recipe))
    script = Path(__file__).parent / "algorithms" / "lever_ranks.py"
    done = launch(2, script, folder, folder / "report", cwd=folder)
    reports = [
        json.loads(file.read_text()) if file.is_file() else {}
        for file in (folder / f"report.{rank}.json" for rank in range(2))
    ]
    return TwoRanks(folder, reports, done.stdout[-3000:] + done.stderr[-6000:])


@pytest.fixture
def no_charts(monkeypatch):
    """Files of charts are empty: a chart takes most of a second, and tests/callbacks look at what is in them."""
    for name in ("exponents", "gradient_scales"):
        monkeypatch.setattr(f"callbacks.{name}.write_chart", lambda chart, path: path.touch())


@pytest.fixture(scope="module")
def built_once():
    """What looks at a model before a run, and changes none, gets the same one again: at real sizes, building takes
    most of its time."""
    from recipes.planning import dry_run

    made, build = {}, dry_run.build_on_meta

    def kept(component):
        key = repr(component)
        if key not in made:
            made[key] = build(component)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dry_run, "build_on_meta", kept)
        yield
