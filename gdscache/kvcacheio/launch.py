"""Shared by the kernel operations of `kvcacheio`: layouts as strides, checks of arguments, the kernels of each GPU."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch

from gdscache import arguments
from gdscache.errors import CaptureUnsupportedError, InvalidValueError, TransferArgumentError
from gdscache.kernels import jit

SOURCE = "kvcacheio.cu"
_SIDE = "PP8I"
_FORM = f"{_SIDE}0P{_SIDE}PP6IP"
FORMS = {"transfer_int32": _FORM, "transfer_int64": _FORM}
VARIANTS: tuple[dict[str, int | str], ...] = ({},)

BLOCK_QUOTA = 2
NUM_WARPS_PER_BLOCK = 32

_MOST_WARPS = 32  # of a thread block
_MOST_TOKENS = 1 << 31  # the kernel divides by the page size in 32 bits
_LIMIT = 1 << 31  # of bytes of a page, and of items
_KERNELS = {torch.int32: "transfer_int32", torch.int64: "transfer_int64"}

_building = threading.Lock()


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """One end of a transfer. Token `t` of layer `l` and head `h` begins, in bytes, at `base + t * token_stride + t //
    page_size * page_gap + l * layer_step + h * head_step`."""

    tensors: tuple[torch.Tensor, ...]  # K, or K and V: their bytes, or tables of one base a layer
    item_size: int
    layers: int
    heads: int
    tokens: int  # of the tensors, as far as known
    token_stride: int
    head_step: int
    first: int = 0  # from the beginning of a tensor to its base
    page_gap: int = 0
    layer_step: int = 0
    page_size: int = 1
    table: bool = False

    def arguments(self) -> list[Any]:
        bases = [t.data_ptr() + self.first for t in self.tensors]
        shift = 31 + (self.page_size - 1).bit_length()
        return [
            bases[0],
            bases[1] if len(bases) > 1 else 0,
            self.token_stride,
            self.page_gap,
            self.layer_step,
            self.head_step,
            -(-(1 << shift) // self.page_size),
            shift,
            self.tokens,
            self.table,
        ]


def tensor_side(
    tensors: Sequence[torch.Tensor],
    item_size: int,
    layout_dim: int | None = None,
    layers: range = range(1),
    page_size: int = 1,
    head_num: int = 1,
) -> Side:
    """A pool in one tensor (and one more for V), of which `layers` are moved.

    With heads and pages it is page-head, with neither page-first; without a `layout_dim` it is one layer of a
    layer-first pool. Raises `TransferArgumentError`.
    """
    item_size, head_num = whole("item_size", item_size), whole("head_num", head_num)
    page_size = whole("page_size", page_size)
    if item_size % 8 or item_size >= _LIMIT:
        raise TransferArgumentError(
            f"item_size is {item_size} bytes", f"give a multiple of 8 below {_LIMIT}: one token's row of one layer"
        )
    if item_size % head_num:
        raise TransferArgumentError(f"an item of {item_size} bytes has no {head_num} equal heads")
    dim = item_size if layout_dim is None else whole("layout_dim", layout_dim)
    if dim % head_num:
        raise TransferArgumentError(f"a layout_dim of {dim} bytes has no {head_num} equal heads")
    if layers.stop * item_size > dim:
        raise TransferArgumentError(
            f"layers {layers.start} ... {layers.stop - 1} of {item_size} bytes are not in a layout_dim of {dim} bytes",
            f"layout_dim is all layers' bytes of a token; this one has {dim // item_size} layers",
        )
    page_bytes = page_size * dim
    if page_bytes >= _LIMIT:
        raise TransferArgumentError(f"a page of {page_bytes} bytes is too large", f"the limit is {_LIMIT - 1} bytes")
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise TransferArgumentError(f"a pool of strides {tensor.stride()} is not contiguous")
    return Side(
        tensors=tuple(tensors),
        first=layers.start * item_size // head_num,
        token_stride=dim // head_num,
        page_gap=page_bytes - page_bytes // head_num,
        layer_step=item_size // head_num if len(layers) > 1 else 0,
        head_step=page_bytes // head_num if head_num > 1 else 0,
        page_size=page_size,
        tokens=min([_MOST_TOKENS, *(t.nbytes // page_bytes * page_size for t in tensors)]),
        item_size=item_size,
        layers=len(layers),
        heads=head_num,
    )


def table_side(tables: Sequence[torch.Tensor], item_size: int, num_layers: int, head_num: int = 1) -> Side:
    """A layer-first pool as a table of one base pointer a layer (and one more table for V).

    A table does not tell its layers' tokens. Raises `TransferArgumentError`.
    """
    layer, num_layers = tensor_side((), item_size, head_num=head_num), whole("num_layers", num_layers)
    for table in tables:
        if table.dtype is not torch.uint64 or not table.is_contiguous():
            raise TransferArgumentError(
                f"a table of layers is {table.dtype} with strides {table.stride()}",
                "give a contiguous uint64 tensor of base pointers, one a layer",
            )
        if table.numel() < num_layers:
            raise TransferArgumentError(f"a table of {table.numel()} layers is too short for {num_layers}")
    return dataclasses.replace(layer, tensors=tuple(tables), layers=num_layers, table=True)


def transfer(
    src: Side,
    dst: Side,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    block_quota: int | None,
    num_warps_per_block: int,
) -> None:
    """Queue the copy of token `src_indices[i]` to `dst_indices[i]`, for all `i`, on the device's current stream.

    Both sides have the same item size, layers and heads. `block_quota` None is 2. Raises `TransferArgumentError` before
    anything is queued.
    """
    quota = whole("block_quota", BLOCK_QUOTA if block_quota is None else block_quota)
    warps = whole("num_warps_per_block", num_warps_per_block)
    if warps > _MOST_WARPS:
        raise TransferArgumentError(f"num_warps_per_block is {warps}", f"a thread block has at most {_MOST_WARPS}")
    count = src_indices.numel()
    if src_indices.dtype not in _KERNELS or dst_indices.dtype is not src_indices.dtype:
        raise TransferArgumentError(
            f"indices are {src_indices.dtype} and {dst_indices.dtype}", "give int64 for both, or int32 for both"
        )
    if dst_indices.numel() != count or count >= _LIMIT:
        raise TransferArgumentError(f"there are {count} source and {dst_indices.numel()} destination indices")
    if not src_indices.is_contiguous() or not dst_indices.is_contiguous():
        raise TransferArgumentError("indices are not contiguous", "call .contiguous()")
    device = find_device(src, dst, src_indices, dst_indices)
    if not count:
        return
    per_warp = -(-count // (quota * warps))
    arguments = [
        *src.arguments(),
        *dst.arguments(),
        src_indices.data_ptr(),
        dst_indices.data_ptr(),
        count,
        per_warp,
        src.item_size // src.heads,
        src.layers,
        src.heads,
        len(src.tensors),
    ]
    kernels_of(device).launch(_KERNELS[src_indices.dtype], -(-count // (per_warp * warps)), warps * 32, arguments)


def find_device(src: Side, dst: Side, src_indices: torch.Tensor, dst_indices: torch.Tensor) -> torch.device:
    """The GPU that runs the copy, which has the indices. Everything else is there too, or in page-locked memory."""
    device = src_indices.device
    if device.type != "cuda" or dst_indices.device != device:
        raise TransferArgumentError(
            f"indices are on {device} and {dst_indices.device}", "the kernels read both on one GPU"
        )
    for side in (src, dst):
        for tensor in side.tensors:
            if tensor.device == device:
                continue
            if side.table or tensor.device.type != "cpu":
                raise TransferArgumentError(
                    f"a {'table of layers' if side.table else 'pool'} is on {tensor.device}, indices are on {device}"
                )
            if not tensor.is_pinned():
                raise TransferArgumentError(
                    "a pool is in pageable host memory", "page-lock it: pin_memory(), or cudaHostRegister"
                )
    return device


class TransferKernels:
    """The kernels of one GPU, and its counter of skipped indices."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kernels = jit.build(SOURCE, FORMS, device)
        with torch.cuda.device(device):
            self._skipped = torch.zeros(1, dtype=torch.int64, device=device)
            side = [0] * 10
            for name in FORMS:  # the driver loads a kernel at its first launch, and may block
                self.launch(name, 1, 32, [*side, *side, *[0] * 8])
            torch.cuda.current_stream(device).synchronize()  # other streams count too

    def launch(self, name: str, blocks: int, threads: int, arguments: Sequence[Any]) -> None:
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream(self.device)
            self._kernels[name].launch(blocks, threads, [*arguments, self._skipped.data_ptr()], stream)

    def skipped(self) -> int:
        """Indices skipped so far. Waits for the whole device."""
        torch.cuda.synchronize(self.device)
        return int(self._skipped.item())


def kernels_of(device: torch.device) -> TransferKernels:
    """The kernels of a GPU, built at the first call; see `kvcacheio.build`."""
    with _building:
        return _build(device)


@functools.cache
def _build(device: torch.device) -> TransferKernels:
    refuse_capture(device, "the kernels of kvcacheio cannot be built", "call kvcacheio.build(device) before")
    return TransferKernels(device)


def refuse_capture(device: torch.device, what: str, hint: str) -> None:
    """Raise `CaptureUnsupportedError` while a CUDA graph is recorded on the current stream of the device."""
    if torch.cuda.is_available():
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                raise CaptureUnsupportedError(f"{what} while a CUDA graph is recorded", hint)


def whole(name: str, value: int, least: int = 1) -> int:
    """`value` as an int of at least `least`; `TransferArgumentError` if it is not one."""
    try:
        return arguments.whole(value, name, least, _LIMIT)
    except InvalidValueError as error:
        raise TransferArgumentError(error.message, error.hint) from None
