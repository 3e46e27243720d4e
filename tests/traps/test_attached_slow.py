"""What `test_attached` leaves to the slow tests.

Trap 9, cases K10, K14 and K32, the engine's own tests, and more.
"""

import pytest

from tests import attached as attached_lib
from tests import test_engine
from tests.attached import asked  # noqa: F401  (fixtures of this module)
from tests.attached import attached  # noqa: F401
from tests.cases import test_k05
from tests.cases import test_k10
from tests.cases import test_k14
from tests.cases import test_k22
from tests.cases import test_k23
from tests.cases import test_k26
from tests.cases import test_k29
from tests.cases import test_k30
from tests.cases import test_k32
from tests.traps import test_evaluation
from tests.traps import test_freezing
from tests.traps import test_graph
from tests.traps import test_scalars

pytestmark = pytest.mark.slow

_DETACHED = "after the run the trainer is Tunix's again"
_OURS = "builds a trainer of ours, or none at all"

_LEFT_OUT = {
    (test_k14, "k14_1_teacher_changed_between_runs"): _DETACHED,
    (test_k10, "k10_1_strategy_in_a_stock_trainer"): _OURS,
    (test_k14, "k14_1_labels_only"): _OURS,
    (test_k14, "k14_1_labels_that_the_student_cannot_give"): _OURS,
    (test_graph, "both_calls_of_the_step"): _OURS,
    (test_k23, "k23_1_nothing_moves_after_the_freeze"): _DETACHED,
    (test_k23, "k23_3_frozen_leaves_cost_nothing"): _DETACHED,
    (test_engine, "a_step_that_cannot_have_its_memory_takes_nothing"): _OURS,
    (test_engine, "bfloat16_student_keeps_its_types"): _OURS,
    (test_k22, "k22_1_the_toy_does_drop"): _OURS,
    (test_k22, "k22_1_strategy"): _OURS,
    (test_k22, "k22_1_stock_trainer"): _OURS,
    (test_scalars, "loss_by_hand"): _OURS,
    (test_scalars, "schedule_in_an_unmodified_trainer"): _OURS,
    (test_scalars, "schedule_counts_updates_in_an_unmodified_trainer"): _OURS,
    (
        test_scalars,
        "evaluation_does_not_move_the_count_of_an_unmodified_trainer",
    ): _OURS,
}

attached_lib.gather(
    globals(),
    (
        test_engine, test_k05, test_k10, test_k14, test_k22, test_k23,
        test_k26, test_k29, test_k30, test_k32, test_evaluation,
        test_freezing, test_graph, test_scalars,
    ),
    _LEFT_OUT,
)
