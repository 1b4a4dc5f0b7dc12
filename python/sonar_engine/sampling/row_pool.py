"""Wide per-request rows (a vocabulary each) that only some requests need."""

from __future__ import annotations

import numpy as np
import torch

from sonar_engine.device import to_device


class RowPool:
    """Rows of one tensor [capacity, width], lent to the slots that ask; the tensor doubles when it is full.

    A slot keeps its row until `give_back`; so memory follows the most requests that used the feature at once.
    """

    def __init__(self, max_num_seqs: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = torch.zeros((0, width), dtype=dtype, device=device)
        self._index = np.full(max_num_seqs, -1, np.int64)
        self._free: list[int] = []

    def lend(self, slot: int) -> torch.Tensor:
        """The slot's row [width], zeroed: a view that is valid until the next `lend`."""
        if self._index[slot] < 0:
            if not self._free:
                self._grow()
            self._index[slot] = self._free.pop()
        return self.rows[self._index[slot]].zero_()

    def give_back(self, slot: int) -> None:
        if self._index[slot] >= 0:
            self._free.append(int(self._index[slot]))
            self._index[slot] = -1

    def index_of(self, slots: np.ndarray) -> torch.Tensor:
        """Rows of `slots` (each must hold one), int64 on the device."""
        return to_device(self._index[slots], self.rows.device)

    def _grow(self) -> None:
        capacity, width = self.rows.shape
        larger = torch.zeros((max(2 * capacity, 1), width), dtype=self.rows.dtype, device=self.rows.device)
        larger[:capacity] = self.rows
        self._free.extend(range(larger.shape[0] - 1, capacity - 1, -1))
        self.rows = larger
