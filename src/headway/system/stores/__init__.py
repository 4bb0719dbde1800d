"""Stores of named objects of bytes: a local directory, or HTTP.

`base` is the interface: list, head, get a range, put if absent, abort. A local directory and HTTP, which is read-only,
implement it; object stores can be added beside them.
"""

from headway.system.stores.base import (
    ObjectInfo as ObjectInfo,
    Store as Store,
    Upload as Upload,
    check_key as check_key,
)
from headway.system.stores.http import HttpStore as HttpStore
from headway.system.stores.local import LocalStore as LocalStore
