"""The traps and cases of our trainer, asked of attached stock trainers.

Traps 2, 4, 6, 10, 17, 24, 26 and cases K11, K24, K25. The others are in
`test_attached_slow`; trap 25, of the config, is in `test_config` and
`test_hook`; K09, of names that go away, is in `test_k09`.
"""

from tests import attached as attached_lib
from tests.attached import asked  # noqa: F401  (fixtures of this module)
from tests.attached import attached  # noqa: F401
from tests.cases import test_k11
from tests.cases import test_k24
from tests.cases import test_k25
from tests.traps import test_accumulation
from tests.traps import test_batches
from tests.traps import test_checkpoints
from tests.traps import test_inputs
from tests.traps import test_lora
from tests.traps import test_metrics

# A run's end detaches: what a test does with its trainer afterwards is no
# question to a stock one.
_DETACHED = "after the run the trainer is Tunix's again"
_OURS = "builds a trainer of ours, or none at all"

_LEFT_OUT = {
    (test_k11, "k11_1_weights_set_by_the_caller_between_runs"): _DETACHED,
    (test_accumulation, "optimizer_counts_updates"): _DETACHED,
    (test_batches, "dict_batch_without_any_function"): (
        "a stock trainer's own function reads attributes, which dicts lack"
    ),
    (test_checkpoints, "unwritable_folder_is_told_before_training"): (
        "Tunix's constructor opens the folder, before any hook is there"
    ),
    (test_k24, "k24_1_layer_1_is_not_10_to_19"): _OURS,
    (test_k24, "k24_1_other_selectors"): _OURS,
    (test_k24, "k24_2_gemma3"): _OURS,
    (test_checkpoints, "closing_checkpoint_carries_the_run"): _OURS,
    (
        test_checkpoints, "attached_checkpoint_carries_the_users_metadata"
    ): "attaches by itself",
    (test_inputs, "vocabulary_mismatch_that_the_configs_tell"): _OURS,
    (test_lora, "paths_of_list_items"): _OURS,
}

attached_lib.gather(
    globals(),
    (
        test_k11, test_k24, test_k25, test_accumulation, test_batches,
        test_checkpoints, test_inputs, test_lora, test_metrics,
    ),
    _LEFT_OUT,
)
