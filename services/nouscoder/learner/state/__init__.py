"""What a run keeps on its disk: checkpoints, saved batches, logs, copies."""
