"""Learn: the loop. Pipeline, stages, metrics, precision, parallelism."""
