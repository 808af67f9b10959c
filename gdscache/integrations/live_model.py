"""The identity of a module in memory: its configuration, weights and adapters, as far as they decide keys and values.

Weights are merged, trained, quantised and exchanged in place, without a file. So some bytes of every parameter and
every saved buffer are read. Other buffers follow from the configuration; those of ropes change with the requests.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
import weakref
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import NamedTuple

import torch
import transformers
from torch.multiprocessing.reductions import StorageWeakRef

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


class _Probe(NamedTuple):
    """A place in a tensor, whose memory it does not hold. A new storage has the address of one that is gone."""

    tensor: weakref.ref[torch.Tensor]
    storage: StorageWeakRef
    place: tuple[int, int]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> _Probe:
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        return cls(weakref.ref(tensor), storage, _place(name, tensor, PROBE))

    def view(self) -> torch.Tensor | None:
        tensor, gone = self.tensor(), self.storage.expired()  # type: ignore[no-untyped-call]
        return None if tensor is None or gone else _elements(tensor, *self.place)


class LiveModel:
    """A module whose identity is taken before each request. Thread-safe."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._facts = facts_of(model)
        self._lock = threading.Lock()
        self._stamp: list[object] | None = None
        self._probes: list[_Probe] = []
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
            stamp, views = _stamp(self._model), self._views()
            if other := stamp != self._stamp or len(views) < len(self._probes):
                self._probes = [_Probe.of(name, tensor) for name, tensor in _tensors(self._model) if _has_bytes(tensor)]
                views = self._views()
            probed = _read(views)
            if other or probed != self._probed:
                self._name = self._named()
                self._adapted = [module for _, module in _adapted(self._model)]
                self._stamp, self._probed = stamp, probed
        return self._name

    def switches(self) -> tuple[list[object], list[int]]:
        """How the adapters are switched now that were there at the last `identity`, and the number of each one's hooks.

        Asks no device. PEFT's hooks tell adapters what one call names: `adapter_names`, where an activated LoRA begins.
        """
        return [_switched(one) for one in self._adapted], [len(one._forward_pre_hooks) for one in self._adapted]

    def writes(self) -> list[int]:
        """The counts of writes in place of each tensor, at the last `identity`."""
        return [one[2] for one in self._stamp or () if isinstance(one, tuple)]

    def _views(self) -> list[torch.Tensor]:
        """What lies at the probes whose tensors are still there."""
        return [view for probe in self._probes if (view := probe.view()) is not None]

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
        pieces = [_elements(tensor, *_place(name, tensor, SAMPLE)) for name, tensor in tensors if _has_bytes(tensor)]
        samples = hashlib.blake2b(_read([piece.view(torch.uint8) for piece in pieces]), digest_size=32)
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


def _place(name: str, tensor: torch.Tensor, most: int) -> tuple[int, int]:
    """A place in a tensor's memory, drawn from its name: the first element, and the number of elements in `most`
    bytes."""
    size, first = tensor.element_size(), int(tensor.storage_offset())
    # of an expanded tensor fewer elements are there than it has
    there = min(tensor.numel(), tensor.untyped_storage().nbytes() // size - first)
    count = min(there, max(1, most // size))
    drawn = int.from_bytes(hashlib.blake2b(f"{most}:{name}".encode(), digest_size=8).digest(), "little")
    return first + drawn % (there - count + 1), count


def _elements(tensor: torch.Tensor, first: int, count: int) -> torch.Tensor:
    return tensor.as_strided((count,), (1,), first)


def _read(pieces: list[torch.Tensor]) -> bytes:
    """The bytes of all pieces, with one copy from each device of each type's."""
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for piece in pieces:
        if piece.element_size() == 1:
            piece = piece.view(torch.uint8)  # not all devices join float8
        alike.setdefault((piece.device, piece.dtype), []).append(piece)
    return b"".join(torch.cat(some).view(torch.uint8).cpu().numpy().tobytes() for some in alike.values())
