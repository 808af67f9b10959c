"""The operations of SGLang's `sgl_kernel.kvcacheio`, by the same names and with the same arguments.

They copy KV rows between a GPU's pool and a host's, token by token: `src_indices[i]` to `dst_indices[i]`. An engine
that uses them changes one import. The ten kernel operations are below; the three `direct` ones, by the copy engine,
come from `direct`, which describes their differences.

Layouts of a pool (K, or V, or the one tensor of MLA), where `item_size` is the bytes of one token's row of one layer:

* layer-first (`lf`): a tensor a layer, of shape (tokens, item). The operations on all layers take a table instead: a
  uint64 tensor of the layers' base pointers, in GPU memory.
* page-first (`pf`): one tensor of shape (tokens, layers, item).
* page-head (`ph`): one tensor of shape (pages, head_num, page_size, layers, item / head_num).

`layout_dim` is the bytes of one token over all layers; in page-first it is also the distance between tokens.

Pools are contiguous tensors of any dtype, in GPU memory or in page-locked host memory; source and destination do not
overlap. Indices are contiguous int64 or int32 tensors on the GPU, and no destination is named twice. The copies run on
that GPU's current stream, in at most `block_quota` thread blocks (None is 2) of `num_warps_per_block` warps. Without
synchronisation; all operations can be recorded into a CUDA graph. The caller keeps the tensors until the copies have
run.

An index that is negative, or beyond the tokens that a pool has, is not followed: its row is skipped, and `skipped`
counts it. A table does not tell its layers' tokens: there only negative indices and those from 2**31 on are found.

Raises `TransferArgumentError` for arguments that do not fit together, before anything is queued, and
`KernelUnavailableError` if the kernels cannot be built.
"""

from __future__ import annotations

import torch

from gdscache.errors import TransferArgumentError
from gdscache.kvcacheio import launch
from gdscache.kvcacheio.direct import (
    transfer_kv_all_layer_direct_lf_pf,
    transfer_kv_direct,
    transfer_kv_per_layer_direct_pf_lf,
)
from gdscache.kvcacheio.launch import NUM_WARPS_PER_BLOCK, table_side, tensor_side, whole

__all__ = [
    "build",
    "skipped",
    "transfer_kv_all_layer",
    "transfer_kv_all_layer_direct_lf_pf",
    "transfer_kv_all_layer_lf_pf",
    "transfer_kv_all_layer_lf_ph",
    "transfer_kv_all_layer_mla",
    "transfer_kv_all_layer_mla_lf_pf",
    "transfer_kv_direct",
    "transfer_kv_per_layer",
    "transfer_kv_per_layer_direct_pf_lf",
    "transfer_kv_per_layer_mla",
    "transfer_kv_per_layer_mla_pf_lf",
    "transfer_kv_per_layer_pf_lf",
    "transfer_kv_per_layer_ph_lf",
]


def build(device: torch.device | str | int) -> None:
    """Build the kernels for a GPU now instead of at their first use; waits for its current stream.

    Raises `KernelUnavailableError` (no cuda-core, driver or NVRTC), and `CaptureUnsupportedError` while a CUDA graph is
    recorded on the current stream: a graph needs the kernels built before. Repeated calls are fine.
    """
    launch.kernels_of(_device(device))


def skipped(device: torch.device | str | int) -> int:
    """Indices that were out of range and therefore skipped, in all calls on a GPU so far. Waits for the GPU."""
    return launch.kernels_of(_device(device)).skipped()


def transfer_kv_per_layer(
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    block_quota: int = 2,
    num_warps_per_block: int = NUM_WARPS_PER_BLOCK,
) -> None:
    """One layer, layer-first to layer-first."""
    source, target = tensor_side((src_k, src_v), item_size), tensor_side((dst_k, dst_v), item_size)
    launch.transfer(source, target, src_indices, dst_indices, block_quota, num_warps_per_block)


def transfer_kv_per_layer_pf_lf(
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    block_quota: int = 2,
    num_warps_per_block: int = NUM_WARPS_PER_BLOCK,
) -> None:
    """Layer `layer_id`, page-first to layer-first."""
    source = tensor_side((src_k, src_v), item_size, src_layout_dim, _one(layer_id))
    target = tensor_side((dst_k, dst_v), item_size)
    launch.transfer(source, target, src_indices, dst_indices, block_quota, num_warps_per_block)


def transfer_kv_per_layer_ph_lf(
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    page_size: int,
    head_num: int,
    block_quota: int = 2,
    num_warps_per_block: int = NUM_WARPS_PER_BLOCK,
) -> None:
    """Layer `layer_id`, page-head to layer-first."""
    source = tensor_side((src_k, src_v), item_size, src_layout_dim, _one(layer_id), page_size, head_num)
    target = tensor_side((dst_k, dst_v), item_size, head_num=head_num)
    launch.transfer(source, target, src_indices, dst_indices, block_quota, num_warps_per_block)


def transfer_kv_all_layer(
    src_k_layers: torch.Tensor,
    dst_k_layers: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v_layers: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    num_layers: int,
    block_quota: int = 2,
    num_warps_per_block: int = NUM_WARPS_PER_BLOCK,
) -> None:
    """All layers, layer-first to layer-first."""
    source = table_side((src_k_layers, src_v_layers), item_size, num_layers)
    target = table_side((dst_k_layers, dst_v_layers), item_size, num_layers)
    launch.transfer(source, target, src_indices, dst_indices, block_quota, num_warps_per_block)


def transfer_kv_all_layer_lf_pf(
    src_k_layers: torch.Tensor,
    dst_k: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    block_quota: int = 2,
    num_warps_per_block: int = NUM_WARPS_PER_BLOCK,
) -> None:
    """All layers, layer-first to page-first."""
    source = table_side((src_k_layers, src_v_layers), item_size, num_layers)
    target = tensor_side((dst_k, dst_v), item_size, dst_layout_dim, _all(num_layers))
    launch.transfer(source, target, src_indices, dst_indices, block_quota, num_warps_per_block)


def transfer_kv_all_layer_lf_ph(
    src_k_layers: torch.Tensor,
    dst_k: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    page_size: int,
    head_num: int,
    block_quota: int = 2,
    num_warps_per_block: int = NUM_WARPS_PER_BLOCK,
) -> None:
    """All layers, layer-first to page-head."""
    source = table_side((src_k_layers, src_v_layers), item_size, num_layers, head_num)
    target = tensor_side((dst_k, dst_v), item_size, dst_layout_dim, _all(num_layers), page_size, head_num)
    launch.transfer(source, target, src_indices, dst_indices, block_quota, num_warps_per_block)


def transfer_kv_per_layer_mla(
    src: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    block_quota: int | None = None,
    num_warps_per_block: int = NUM_WARPS_PER_BLOCK,
) -> None:
    """`transfer_kv_per_layer` for a pool of one tensor a layer."""
    source, target = tensor_side((src,), item_size), tensor_side((dst,), item_size)
    launch.transfer(source, target, src_indices, dst_indices, block_quota, num_warps_per_block)


def transfer_kv_per_layer_mla_pf_lf(
    src: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    block_quota: int | None = None,
    num_warps_per_block: int = NUM_WARPS_PER_BLOCK,
) -> None:
    """`transfer_kv_per_layer_pf_lf` for a pool of one tensor."""
    source, target = tensor_side((src,), item_size, src_layout_dim, _one(layer_id)), tensor_side((dst,), item_size)
    launch.transfer(source, target, src_indices, dst_indices, block_quota, num_warps_per_block)


def transfer_kv_all_layer_mla(
    src_layers: torch.Tensor,
    dst_layers: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    num_layers: int,
    block_quota: int = 2,
    num_warps_per_block: int = NUM_WARPS_PER_BLOCK,
) -> None:
    """`transfer_kv_all_layer` for a pool of one tensor a layer."""
    source, target = table_side((src_layers,), item_size, num_layers), table_side((dst_layers,), item_size, num_layers)
    launch.transfer(source, target, src_indices, dst_indices, block_quota, num_warps_per_block)


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    block_quota: int = 2,
    num_warps_per_block: int = NUM_WARPS_PER_BLOCK,
) -> None:
    """`transfer_kv_all_layer_lf_pf` for a pool of one tensor a layer."""
    source = table_side((src_layers,), item_size, num_layers)
    target = tensor_side((dst,), item_size, dst_layout_dim, _all(num_layers))
    launch.transfer(source, target, src_indices, dst_indices, block_quota, num_warps_per_block)


def _one(layer_id: int) -> range:
    number = whole("layer_id", layer_id, least=0)
    return range(number, number + 1)


def _all(num_layers: int) -> range:
    return range(whole("num_layers", num_layers))


def _device(device: torch.device | str | int) -> torch.device:
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found.type != "cuda":
        raise TransferArgumentError(f"{found} is no GPU", "name one, such as cuda:0")
    index: int | None = found.index
    if index is None:
        index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return torch.device("cuda", index)
