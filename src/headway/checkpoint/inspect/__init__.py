"""Looking into a checkpoint, or into files of other tools, without executing anything in them."""
