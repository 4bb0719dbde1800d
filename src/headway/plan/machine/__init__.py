"""What it runs on: devices and nodes from a catalog (`catalog.yaml`) or described by the user, and `Calibration`, the
constants that say which fraction of its peak a device or link reaches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.plan.machine.calibration import (
        Calibration as Calibration,
        calibration_file as calibration_file,
        load_calibration as load_calibration,
        save_calibration as save_calibration,
    )
    from headway.plan.machine.hardware import Device as Device, Node as Node, node_names as node_names

__getattr__, __dir__, __all__ = lazy.exports(__name__)
