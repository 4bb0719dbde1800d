"""The files of predictions: they grow row by row, and are renamed when they are complete.

.NAME.part         the rows so far                 .NAME.part.json    how many of them are on disk, and the request

A prediction that was killed resumes at that position. It is written after the rows are on disk, at most every second;
rows after it in the file are written again.
"""

from __future__ import annotations

import io
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, final

import numpy as np
import torch

from headway.checkpoint.format.dtypes import BY_NAME
from headway.checkpoint.format.manifest import ITEM_BYTES
from headway.checkpoint.format.tensor_file import header_of, table_of
from headway.errors import UsageError
from headway.run.info import read_json
from headway.system import files
from headway.system.log import logger

COMMIT_S = 1.0
"""seconds between two positions"""

Columns: TypeAlias = Mapping[str, Mapping[str, Any]]
"""name -> {"dtype": "F32", "shape": [10]}: the type and the shape of one row"""
Position: TypeAlias = dict[str, Any]


class PredictionFile(ABC):
    """A file of predictions, on rank 0."""

    def __init__(self, path: Path, request: Mapping[str, Any], total: int | None) -> None:
        self.path, self.total = path, total
        self._request = dict(request)
        self._part = path.with_name(f".{path.name}.part")
        self._position_file = path.with_name(f".{path.name}.part.json")
        self._position: Position = {"rows": 0, "batches": 0, "bytes": 0, "columns": None}
        self._fd = -1
        self._committed = time.monotonic()

    def begin(self) -> Position:
        """Opens the file and returns the position to resume at: 0 rows for a new file."""
        with files.storage(f"write {self.path}"):
            saved = read_json(self._position_file) or {}
            same = saved.get("request") == self._request and self._part.is_file()
            if saved and not same:
                logger.info(f"what was left of another prediction to {self.path} is discarded")
            if same:
                self._position = saved["position"]
                logger.info(f"continuing {self.path} after {self._position['rows']:,} rows")
            self._fd = files.open_private(self._part, os.O_RDWR | os.O_CREAT)
            os.ftruncate(self._fd, self._position["bytes"])
        return self._position

    def write(self, columns: Columns, parts: Sequence[tuple[int, bytes]]) -> None:
        """Appends the rows of one batch: for each rank, their number and their bytes."""
        with files.storage(f"write {self.path}"):
            if self._position["columns"] is None:
                self._position["columns"] = columns
                self._begin_rows(columns)
            for count, data in parts:
                if count:
                    self._append(count, data)
                    self._position["rows"] += count
            self._position["batches"] += 1
            if time.monotonic() - self._committed >= COMMIT_S:
                self._commit()

    def finish(self) -> None:
        """Renames the complete file; raises `UsageError` if it does not have one row for each sample."""
        rows = self._position["rows"]
        if self.total is not None and rows != self.total:
            raise UsageError(
                f"predict() returned {rows:,} rows for {self.total:,} samples: return one row for each sample of the "
                "batch, in its order"
            )
        with files.storage(f"write {self.path}"):
            os.fsync(self._fd)
            self._part.rename(self.path)
            files.sync_dir(self.path.parent)
            self._position_file.unlink(missing_ok=True)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @abstractmethod
    def _begin_rows(self, columns: Columns) -> None:
        """Writes the header before the first row."""

    @abstractmethod
    def _append(self, count: int, data: bytes) -> None:
        """Writes rows, and advances the position."""

    def _commit(self) -> None:
        os.fsync(self._fd)
        state = {"request": self._request, "position": self._position}
        files.write_atomic(self._position_file, json.dumps(state).encode())
        self._committed = time.monotonic()

    def _write_at(self, begin: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._fd, view, begin)
            view, begin = view[written:], begin + written


@final
class JsonLinesFile(PredictionFile):
    """A line for each sample: {"index": 0, "prediction": ...}."""

    def _begin_rows(self, columns: Columns) -> None:
        pass  # lines have no header

    def _append(self, count: int, data: bytes) -> None:  # noqa: ARG002
        self._write_at(self._position["bytes"], data)
        self._position["bytes"] += len(data)


@final
class TensorFile(PredictionFile):
    """An array, or several by name, whose first dimension is the sample: .npy or .safetensors."""

    def __init__(self, path: Path, request: Mapping[str, Any], total: int | None) -> None:
        if total is None:
            raise UsageError(
                f"{path.name}: the number of samples is not known, and a {path.suffix} file begins with it: predict to "
                "a .jsonl file, or from a loader of a dataset with a length"
            )
        super().__init__(path, request, total)

    def _begin_rows(self, columns: Columns) -> None:
        header, total = self._header(columns), sum(self._sizes(columns).values()) * (self.total or 0)
        self._write_at(0, header)
        os.ftruncate(self._fd, len(header) + total)
        self._position["bytes"] = len(header) + total
        self._position["first"] = len(header)

    def _append(self, count: int, data: bytes) -> None:
        """Writes rows to their columns; `data` has the rows of one column after those of another."""
        begin, taken, done = self._position["first"], 0, self._position["rows"]
        if done + count > (self.total or 0):
            raise UsageError(
                f"predict() returned more than {self.total:,} rows for as many samples: return one row for each"
            )
        for size in self._sizes(self._position["columns"]).values():
            self._write_at(begin + done * size, data[taken : taken + count * size])
            begin, taken = begin + size * (self.total or 0), taken + count * size

    def _sizes(self, columns: Columns) -> dict[str, int]:
        """Returns the bytes of a row of each column."""
        return {
            name: int(np.prod(c["shape"], dtype=np.int64)) * ITEM_BYTES[c["dtype"]]
            for name, c in columns.items()
        }

    def _header(self, columns: Columns) -> bytes:
        shapes = {name: (self.total or 0, *column["shape"]) for name, column in columns.items()}
        if self.path.suffix == ".safetensors":
            entries = [(name or "prediction", c["dtype"], shapes[name]) for name, c in columns.items()]
            return header_of(table_of(entries)[0], {"format": "pt"})
        if [*columns] != [""]:
            raise UsageError(
                f"predict() returned {', '.join(columns)}, and a .npy file holds one array: write to .safetensors or "
                ".jsonl"
            )
        text = io.BytesIO()
        dtype = torch.empty(0, dtype=BY_NAME[columns[""]["dtype"]]).numpy().dtype
        descr = np.lib.format.dtype_to_descr(dtype)
        np.lib.format.write_array_header_1_0(
            text, {"descr": descr, "fortran_order": False, "shape": shapes[""]}
        )
        return text.getvalue()


_KINDS: dict[str, type[PredictionFile]] = {
    ".npy": TensorFile,
    ".safetensors": TensorFile,
    ".jsonl": JsonLinesFile,
}


def kind_of(path: Path) -> type[PredictionFile]:
    """Returns the class for a file, by its name."""
    if path.suffix not in _KINDS:
        raise UsageError(
            f"{path} is not a valid name for predictions: use one that ends with {', '.join(_KINDS)}"
        )
    return _KINDS[path.suffix]
