"""Weights: random ones, or those of a folder in Hugging Face's layout (config.json and *.safetensors)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gdscache.commands.toy_engine.model import Transformer
from gdscache.commands.toy_engine.shape import CheckpointError, ModelShape, shape_of_config
from gdscache.errors import MissingPackageError

_SAMPLED = 256  # elements of a tensor that its fingerprint looks at


def random_model(shape: ModelShape, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Transformer:
    """A model with seeded random weights, scaled so that its logits differ by about one."""
    model = _empty(shape, device, dtype)
    draw = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                parameter.normal_(std=parameter.shape[1] ** -0.5, generator=draw)
    return model


def load_checkpoint(folder: Path, device: torch.device, dtype: torch.dtype | None = None) -> Transformer:
    """The model of a folder, in `dtype` (None: as the checkpoint says).

    Raises `CheckpointError` when the folder is missing or incomplete, or holds a model of another kind.
    """
    config = read_config(folder)
    shape = shape_of_config(config, str(folder))
    model = _empty(shape, device, dtype or getattr(torch, shape.dtype))
    missing = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in _tensors(folder, device):
            name = name.removeprefix("model.")
            if name.endswith("rotary_emb.inv_freq") or (shape.tied and name == "lm_head.weight"):
                continue  # computed here; a copy of the embedding
            target = missing.pop(name, None)
            if target is None:
                raise CheckpointError(f"{folder} has a tensor {name!r} that {config['architectures'][0]} does not have")
            if tensor.shape != target.shape:
                raise CheckpointError(
                    f"{folder}: {name} is {tuple(tensor.shape)}, config.json makes it {tuple(target.shape)}"
                )
            target.copy_(tensor)
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} tensors, {next(iter(missing))!r} among them", "is every shard there?"
        )
    return model


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint's folder, as plain data."""
    hint = "a checkpoint is a local folder with config.json and *.safetensors; nothing is downloaded"
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}", hint)
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} has no config.json that can be read: {error}", hint) from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder}/config.json holds {type(config).__name__}, not a mapping", hint)
    return config


def fingerprint(model: Transformer) -> str:
    """What goes into gdscache's namespace as the version of the weights: a digest of the shape and of some elements of
    each tensor. Two models that differ in every element of a tensor, or in kind, never share pages."""
    digest = hashlib.blake2b(repr(model.shape).encode(), digest_size=16)
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        some = flat[:: max(1, len(flat) // _SAMPLED)].contiguous().view(torch.uint8).cpu()
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode() + some.numpy().tobytes())
    return digest.hexdigest()


def _empty(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> Transformer:
    """A model whose weights are yet to be filled in."""
    with torch.device("meta"):
        model = Transformer(shape)
    return model.to(dtype).to_empty(device=device).eval().requires_grad_(False)


def _tensors(folder: Path, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise MissingPackageError("safetensors is not installed", 'pip install "gdscache[hf]"') from error
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} has no *.safetensors", "other formats of weights are not read")
    for path in files:
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                for name in file.keys():  # noqa: SIM118
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{path} cannot be read: {error}", "is the download complete?") from error
