"""Writing a checkpoint: plan, copy to host memory, write in a helper process, commit by rename."""
