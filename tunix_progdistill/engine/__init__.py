"""The compiled step, the optimizer and the checkpoints of a staged run."""
