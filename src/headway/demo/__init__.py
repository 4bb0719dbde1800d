"""The tour of `headway demo`: a small training that is killed and resumed, by the commands that a user would type.

`tour` runs them. `draw.py` and `train.py` are the scripts that they run: copied to the demo's directory, to be read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.demo.tour import give_tour as give_tour

__getattr__, __dir__, __all__ = lazy.exports(__name__)
