"""What every interpreter that a test starts does first: it collects garbage seldom, and not at its end.

An interpreter that imports torch makes half a million objects, none of them garbage, and looks at all of them a dozen
times while it imports and again when it ends: a third of its CPU time, one second, in each of some hundred processes.
With HEADWAY_FAULTS=full they are as they come.
"""

import atexit
import gc

gc.set_threshold(50_000, 10, 10)
atexit.register(gc.freeze)  # registered first, it runs last
