"""Each rank reads its part of a sharded checkpoint by a plan of its own."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan
from torch.distributed.checkpoint.metadata import Metadata

from recipes.engines.checkpoints.moments import check_all_asked, without_missing


class OwnLoadPlan(DefaultLoadPlanner):
    """A planner that keeps a rank's plan.

    PyTorch's loader collects the plans of all ranks on the first one, and sends each back as it was. With 1,024 ranks
    and a model of 12 billion parameters these are gigabytes, for which the other ranks wait in a collective.
    """

    def __init__(self, own: bool = True) -> None:
        """
        Args:
            own: whether the optimizer is not PyTorch's, which make all states in their first step: others that a
                checkpoint has are of settings that were changed, such as amsgrad.
        """
        super().__init__()
        self._is_own = own

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Moments that the checkpoint lacks are not asked for. Raises as `check_all_asked`."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        if self._is_own:
            check_all_asked(self.mappings, metadata)
        self.state_dict = without_missing(self.state_dict, self.mappings, metadata)

    def create_local_plan(self) -> LoadPlan:
        """What this rank reads is kept, and nothing is sent."""
        self._own = self.plan_of_rank()
        return LoadPlan([])

    def plan_of_rank(self) -> LoadPlan:
        """What this rank reads."""
        return super().create_local_plan()

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """The plan that was kept, in the place of what came back."""
        return super().finish_plan(self._own)
