"""Many requests at once, as arrays: what is done for each of them is numpy's work and not the interpreter's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import numpy as np

from gdscache.arrays import Int64Array
from gdscache.pages.layout import EXTENT_ALIGNMENT
from gdscache.storage.base import FileRange, IORequest, Op, address_of

if TYPE_CHECKING:
    import torch


class IOBatch(Sequence[IORequest]):
    """Requests between files and one piece of memory; to those that know nothing of it, a list of `IORequest`.

    `files` are handles, `offsets` bytes of the files, `starts` bytes of `memory` (flat), `sizes` bytes.
    All int64 of shape (requests,).
    """

    def __init__(
        self,
        files: Int64Array,
        offsets: Int64Array,
        starts: Int64Array,
        sizes: Int64Array,
        memory: memoryview | torch.Tensor,
    ) -> None:
        self.files = files
        self.offsets = offsets
        self.starts = starts
        self.sizes = sizes
        self.memory = memory

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, which: int) -> IORequest: ...

    @overload
    def __getitem__(self, which: slice) -> list[IORequest]: ...

    def __getitem__(self, which: int | slice) -> IORequest | list[IORequest]:
        if isinstance(which, slice):
            return [self[number] for number in range(*which.indices(len(self)))]
        start = int(self.starts[which])
        memory = self.memory[start : start + int(self.sizes[which])]
        return IORequest(int(self.files[which]), int(self.offsets[which]), memory)

    def is_sound(self, op: Op) -> bool:
        """Whether each is fit for I/O with host memory. Where one is not, `check_memory` says which, and why."""
        if not len(self) or not isinstance(self.memory, memoryview) or (self.memory.readonly and op is Op.READ):
            return False
        ends, everything = self.starts + self.sizes, self.offsets | self.starts | self.sizes
        return bool(
            not (int(np.bitwise_or.reduce(everything)) | address_of(self.memory)) % EXTENT_ALIGNMENT
            and self.sizes.min() > 0
            and self.offsets.min() >= 0
            and self.starts.min() >= 0
            and ends.max() <= self.memory.nbytes
        )


class Spans(Sequence[FileRange]):
    """Where the requests of a batch lie, each said only when somebody asks."""

    def __init__(self, batch: IOBatch, paths: dict[int, str]) -> None:
        self._files, self._offsets, self._sizes = batch.files, batch.offsets, batch.sizes
        self._paths = {file: paths[file] for file in set(batch.files.tolist())}

    def __len__(self) -> int:
        return len(self._sizes)

    @overload
    def __getitem__(self, which: int) -> FileRange: ...

    @overload
    def __getitem__(self, which: slice) -> list[FileRange]: ...

    def __getitem__(self, which: int | slice) -> FileRange | list[FileRange]:
        if isinstance(which, slice):
            return [self[number] for number in range(*which.indices(len(self)))]
        return FileRange(self._paths[int(self._files[which])], int(self._offsets[which]), int(self._sizes[which]))
