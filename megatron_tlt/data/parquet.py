"""Records of Parquet files (pyarrow is slow to import, hence a file of its own)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from megatron_tlt.errors import DataError


class ArrowRecords:
    """Rows of an Arrow table as dictionaries, made when asked for."""

    def __init__(self, table: Any):
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        record: dict[str, Any] = self._table.slice(index, 1).to_pylist()[0]
        return record


def read_parquet(path: Path) -> ArrowRecords:
    """The rows of a Parquet file, or of a directory of them. Raises DataError."""
    if not path.exists():
        raise DataError(f"{path}: no such file")
    try:
        return ArrowRecords(pyarrow.parquet.read_table(path))
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: not a Parquet file: {error}") from error
