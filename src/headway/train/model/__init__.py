"""Models: parallel wrappers, precision, EMA, parameter groups by mesh, learning-rate schedules."""
