"""The identity of a module in memory: its configuration, weights and adapters, as far as they decide keys and values.

Weights are merged, trained, quantised and exchanged in place, without a file. So some bytes of every parameter and
every saved buffer are read. Other buffers follow from the configuration; those of ropes change with the requests.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
from collections.abc import Iterator, Mapping
from types import SimpleNamespace

import torch
import transformers

from gdscache.integrations.fields import plain, table_in
from gdscache.integrations.settings import digest_of
from gdscache.integrations.weights import FRESH, fresh_salt

SAMPLE, PROBE = 4096, 256  # bytes of a tensor that name it, and that are read for each request
_log = logging.getLogger("gdscache")


class TextConfig(SimpleNamespace):
    """A text model's configuration of any family, by the table's name for it."""


table = functools.partial(table_in, "gdscache.integrations", "transformers_fields.toml")


def facts_of(model: torch.nn.Module) -> dict[str, object]:
    """The facts that tell models apart, except for their tensors, by name."""
    facts: dict[str, object] = {"class": plain(type(model)), "transformers": transformers.__version__}
    config = getattr(model, "config", None)
    if config is not None:
        text = config.get_text_config(decoder=True).to_dict()
        whole = config.to_dict().get("quantization_config")
        facts |= table().facts([TextConfig(**{"quantization_config": plain(whole), **text})])
    return facts


class LiveModel:
    """A module whose identity is taken before each request. Thread-safe."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._facts = facts_of(model)
        self._lock = threading.Lock()
        self._stamp: object = None
        self._probes: list[torch.Tensor] = []
        self._probed = b""
        self._name: dict[str, object] = {}
        self._adapted: list[torch.nn.Module] = []

    def identity(self) -> dict[str, object]:
        """The model's facts by name, with a digest of its tensors, as plain data.

        Compares the tensors, their counts of writes in place, the active adapters, and `PROBE` bytes of each tensor,
        since writes through `.data` are not counted. After a difference `SAMPLE` bytes of each tensor name the weights.
        Waits for the device.
        """
        with self._lock, torch.inference_mode(mode=False), torch.no_grad():
            stamp = _stamp(self._model)
            if stamp != self._stamp:
                self._probes = [_bytes(name, tensor, PROBE) for name, tensor in _tensors(self._model)]
            probed = _read(self._probes)
            if stamp != self._stamp or probed != self._probed:
                self._name = self._named()
                self._adapted = [module for _, module in _adapted(self._model)]
                self._stamp, self._probed = stamp, probed
        return self._name

    def switches(self) -> tuple[list[object], list[int]]:
        """How the adapters are switched now that were there at the last `identity`, and the number of each one's hooks.

        Asks no device. PEFT's hooks tell adapters what one call names: `adapter_names`, where an activated LoRA begins.
        """
        return [_switched(one) for one in self._adapted], [len(one._forward_pre_hooks) for one in self._adapted]

    def _named(self) -> dict[str, object]:
        tensors = list(_tensors(self._model))
        shapes = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors]
        hidden = [name for name, tensor in tensors if not _has_bytes(tensor)]
        if hidden:
            _log.warning(
                "%d tensors have no bytes to look at (%s): nothing of this model is found after a restart",
                len(hidden),
                ", ".join(hidden[:3]),
            )
        samples = hashlib.blake2b(_read([_bytes(name, tensor, SAMPLE) for name, tensor in tensors]), digest_size=32)
        return {
            **self._facts,
            "tensors": digest_of(shapes),
            "weights": fresh_salt() if hidden else samples.hexdigest(),
            "adapters": plain([[name, *_switched(module)] for name, module in _adapted(self._model)]),
        }


def nameless(facts: Mapping[str, object]) -> bool:
    """Whether an identity's weights could not be looked at."""
    return str(facts["weights"]).startswith(FRESH)


def _stamp(model: torch.nn.Module) -> list[object]:
    """A cheap value that stays equal while no tensor is exchanged or written in place, and no adapter switched."""
    found: list[object] = []
    for module in model.modules():
        tensors: list[torch.Tensor | None] = list(module._parameters.values())
        if module._buffers:
            volatile = module._non_persistent_buffers_set
            tensors += [one for name, one in module._buffers.items() if name not in volatile]
        # tensors that were made in inference mode do not count writes in place
        writes = [0 if one is None or one.is_inference() else one._version for one in tensors]
        found += [(id(one), one.data_ptr(), n) for one, n in zip(tensors, writes, strict=True) if one is not None]
        if "_disable_adapters" in module.__dict__:
            found.append(_switched(module))
    return found


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and saved buffers, each tensor once, by name."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        volatile = module._non_persistent_buffers_set
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None and name not in volatile and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield f"{prefix}.{name}", tensor


def _adapted(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules with adapters, by name."""
    return ((name, module) for name, module in model.named_modules() if "_disable_adapters" in module.__dict__)


def _switched(module: torch.nn.Module) -> list[object]:
    names = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
    return [plain(module.__dict__.get(name)) for name in names]


def _has_bytes(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "meta" and not hasattr(tensor, "__tensor_flatten__")


def _bytes(name: str, tensor: torch.Tensor, most: int) -> torch.Tensor:
    """`most` bytes of a tensor's memory, at a place drawn from its name; a view if its memory is one run."""
    if not _has_bytes(tensor) or not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    flat = tensor.detach()
    size = flat.element_size()
    if flat.is_contiguous():
        flat = flat.reshape(-1)
    else:  # of an expanded tensor fewer elements are there than it has
        there = flat.untyped_storage().nbytes() // size - flat.storage_offset()
        flat = flat.as_strided((min(flat.numel(), there),), (1,), flat.storage_offset())
    count = max(1, min(len(flat), most // size))
    drawn = int.from_bytes(hashlib.blake2b(f"{most}:{name}".encode(), digest_size=8).digest(), "little")
    at = drawn % (len(flat) - count + 1)
    return flat[at : at + count].view(torch.uint8)


def _read(pieces: list[torch.Tensor]) -> bytes:
    """The bytes of all pieces, with one copy from each device."""
    devices: dict[torch.device, list[torch.Tensor]] = {}
    for piece in pieces:
        devices.setdefault(piece.device, []).append(piece)
    return b"".join(torch.cat(some).cpu().numpy().tobytes() for some in devices.values())
