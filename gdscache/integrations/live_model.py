"""The identity of a module in memory: what decides keys and values of its configuration, tensors, adapters and hooks.

Weights are merged, trained, quantised and exchanged in place, without a file. So every parameter and every buffer is
read after each change. Buffers that are not saved change with the requests where a rope depends on the length: of those
the types alone count. Code and numbers are exchanged too: a module's forward, its scale, its number of experts.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
import secrets
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import CellType, CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any, TypeGuard

import torch
import transformers
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as torch_module

from gdscache.integrations.fields import plain, table_in
from gdscache.integrations.ropes import rope_limit
from gdscache.integrations.settings import digest_of
from gdscache.integrations.weights import FRESH, fresh_salt

SAMPLE, PROBE = 4096, 256  # bytes: tensors up to the first size are read whole; the second is read for each request
COLUMNS, PIECE = 4096, 16 << 20  # words of 8 bytes; bytes whose sums are taken at once
_PROCESS = secrets.token_hex(16)  # hooks have no names, but numbers in their process
# Hooks that leave keys and values alone, or are looked at elsewhere (`LiveModel.switches`), by their modules' names.
_KNOWN = (
    *("accelerate.", "peft.", "gdscache.", "transformers.utils.output_capturing", "transformers.modeling_utils"),
    *("compressed_tensors.", "torch.utils.module_tracker"),  # follows the held quantization_config; counts alone
)
_EVERY = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)  # of all modules
_RANDOM = re.compile("drop|jitter|noise|^p$")  # a module's numbers by which it draws at random while it is trained
_VALUES = {bool, int, float, str}  # the types of a module's attributes that name it, but for:
# Modes that are looked at elsewhere, and what calls set: the tokens that a rope has seen, bitsandbytes' first call.
_IDLE = {"training", "gradient_checkpointing", "name_or_path", "compute_type_is_set"}
_TOKENS = "seq_len_cached"
_LIBRARIES = {"builtins", "torch", "transformers"}  # their versions or names tell their code
_PRECISION = "accelerate.utils.operations"  # its forward is within autocast, of a type that it does not tell
_ROUNDING = ("eager", "grouped_mm", "batched_mm")  # of experts: `generate` exchanges them for a while
_log = logging.getLogger("gdscache")
_Settings = tuple[dict[str, object], dict[str, Any] | None]


class TextConfig(SimpleNamespace):
    """A text model's configuration of any family, by the table's name for it."""


table = functools.partial(table_in, "gdscache.integrations", "transformers_fields.toml")


def _settings(model: torch.nn.Module) -> _Settings:
    """What facts are made of, as it is now: facts beside the configuration, and its fields."""
    facts: dict[str, object] = {"class": plain(type(model)), "transformers": transformers.__version__}
    facts["autocast"] = _autocast()
    if (config := getattr(model, "config", None)) is None:
        return facts, None
    text = config.get_text_config(decoder=True)
    fields = text.to_dict()
    whole = fields if text is config else config.to_dict()
    experts = getattr(text, "_experts_implementation", None)
    facts["attention"] = getattr(text, "_attn_implementation", None)
    facts["experts"] = _ROUNDING[0] if experts in _ROUNDING else experts
    facts["kernels"] = bool(getattr(model, "use_kernels", False))
    return facts, plain({"quantization_config": whole.get("quantization_config"), **fields})  # arrays do not compare


def _facts(facts: dict[str, object], fields: dict[str, Any] | None) -> dict[str, object]:
    return facts if fields is None else facts | table().facts([TextConfig(**fields)])


def _autocast() -> list[str]:
    """The types of autocast in this thread, of each kind of device that has it on."""
    return [f"{kind}: {torch.get_autocast_dtype(kind)}" for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]


class LiveModel:
    """A module whose identity is taken before each request. Thread-safe."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._settings: _Settings | None = None
        self._stamp: list[object] | None = None
        # Places in tensors, whose memory is not held. A new storage has the address of one that is gone.
        self._probes: list[tuple[weakref.ref[torch.Tensor], StorageWeakRef, tuple[int, int]]] = []
        self._probed = b""
        # By `id`: a tensor, its address, its count of writes in place, and its sums.
        self._summed: dict[int, tuple[weakref.ref[torch.Tensor], int, int, torch.Tensor]] = {}
        self._name: dict[str, object] = {}
        self._adapted: list[torch.nn.Module] = []
        self._random: list[tuple[torch.nn.Module, torch.nn.Module, str]] = []
        self._drawn = False
        self._hooks: list[Mapping[int, object]] = []
        self._modules: list[torch.nn.Module] = []
        self._forwards: list[object] = []
        self._forwards_name = ""
        self._read_settings()

    def identity(self) -> dict[str, object]:
        """The model's facts by name, with a digest of its tensors, as plain data.

        Compares the configuration, the tensors, their counts of writes in place, the active adapters, hooks, the
        modules' attributes, and `PROBE` bytes of each tensor, since writes through `.data` are not counted. After a
        difference sums over each tensor name the weights. A model that draws at random, in training, has another name
        each time. Waits for the device.
        """
        with self._lock, torch.inference_mode(mode=False), torch.no_grad():
            self._read_settings()
            steady = self.rope is None
            stamp, views = _stamp(self._model, steady), self._views()
            if other := stamp != self._stamp or len(views) < len(self._probes):
                self._probes = [
                    (weakref.ref(one), StorageWeakRef(one.untyped_storage()), _place(name, one))  # type: ignore[no-untyped-call]
                    for name, one in _tensors(self._model, steady)
                    if _has_bytes(one)
                ]
                views = self._views()
                self._look_at_modules()
            probed, drawn = _read(views), self._draws()
            if other or drawn != self._drawn or probed != self._probed:
                if probed != self._probed:  # other writes may be where no probe is
                    self._summed.clear()
                self._name = self._named(drawn)
                self._adapted = [module for _, module in _adapted(self._model)]
                self._stamp, self._probed, self._drawn = stamp, probed, drawn
            elif drawn:
                self._name = {**self._name, "weights": fresh_salt()}
        return self._name

    def switches(self) -> tuple[list[object], list[int]]:
        """How the model is switched now: its adapters, whether it draws at random, its hooks and modules' own forwards,
        and autocast. And the number of each adapter's hooks. Of the modules that were there at the last `identity`.

        Asks no device. PEFT's hooks tell adapters what one call names: `adapter_names`, where an activated LoRA begins.
        """
        switched = [*map(_switched, self._adapted), self._draws(), _numbers(self._hooks), _forwards(self._modules)]
        return [*switched, _autocast()], [len(one._forward_pre_hooks) for one in self._adapted]

    def writes(self) -> list[int]:
        """The counts of writes in place of each tensor, at the last `identity`."""
        return [one[2] for one in self._stamp or () if isinstance(one, tuple)]

    def _views(self) -> list[torch.Tensor]:
        """The elements at the probes whose tensors are still there."""
        return [
            one.as_strided((count,), (1,), first)
            for tensor, storage, (first, count) in self._probes
            if (one := tensor()) is not None and not storage.expired()  # type: ignore[no-untyped-call]
        ]

    def _read_settings(self) -> None:
        if (settings := _settings(self._model)) != self._settings:
            self._facts, self._stamp = _facts(*settings), None
            config = getattr(self._model, "config", None)
            self.rope = None if config is None else rope_limit(config.get_text_config(decoder=True))
            self._settings = settings

    def _look_at_modules(self) -> None:
        self._modules = list(self._model.modules())
        self._hooks = [*_EVERY, *(table for one in self._modules for table in _hooks(one))]
        self._random = [(one, *number) for one in self._modules for number in _random(one)]
        if (forwards := _forwards(self._modules)) != self._forwards:
            self._forwards, self._forwards_name = forwards, fresh_salt() if forwards else ""

    def _draws(self) -> bool:
        """Whether the model draws at random now."""
        return any(one.training and (vars(owner).get(name) or 0) > 0 for one, owner, name in self._random)

    def _named(self, drawn: bool) -> dict[str, object]:
        steady = self.rope is None
        tensors = list(_tensors(self._model, steady))
        shapes = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors]
        if not steady:
            shapes += [[name, str(buffer.dtype)] for name, buffer in self._model.named_buffers()]
        numbers = _numbers(self._hooks)
        modules = list(self._model.named_modules())
        hidden = [name for name, tensor in tensors if not _has_bytes(tensor)]
        hidden += [name for name, one in modules if _is_packed(one)]
        if hidden:
            _log.warning(
                "%d tensors or modules have no bytes to look at (%s): nothing of this model is found after a restart",
                len(hidden),
                ", ".join(hidden[:3]),
            )
        if drawn and not self._drawn:
            _log.warning("the model is in training and draws at random (dropout): none of its pages is found again")
        pieces = self._sums(tensor for _, tensor in tensors if _has_bytes(tensor))
        sums, told = hashlib.blake2b(_read(pieces), digest_size=32), functools.cache(_told)
        return {
            **self._facts,
            "modules": digest_of([[name, *map(told, _code(one)), dict(_values(one, steady))] for name, one in modules]),
            "tensors": digest_of(shapes),
            "weights": fresh_salt() if hidden or drawn else sums.hexdigest(),
            "adapters": plain([[name, *_switched(module)] for name, module in _adapted(self._model)]),
            "hooks": f"{_PROCESS}:{os.getpid()}:{numbers}" if numbers else "",
            "forwards": self._forwards_name,
        }

    def _sums(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The sums of tensors, as bytes; those of before where a tensor counts writes in place and has had none since:
        adapters are switched from request to request."""
        known, self._summed = self._summed, {}
        for tensor in tensors:
            found, place, writes = known.get(id(tensor)), tensor.data_ptr(), _writes(tensor)
            if found is None or found[0]() is not tensor or found[1:3] != (place, writes) or tensor.is_inference():
                found = weakref.ref(tensor), place, writes, _sums(tensor).view(torch.uint8)
            self._summed[id(tensor)] = found
        return [sums for *_, sums in self._summed.values()]


def nameless(facts: Mapping[str, object]) -> bool:
    """Whether an identity's weights could not be looked at, or what they compute is drawn at random."""
    return str(facts["weights"]).startswith(FRESH)


def _stamp(model: torch.nn.Module, steady: bool = True) -> list[object]:
    """A cheap value that stays equal while no module and no tensor is exchanged or written in place, and no adapter or
    hook switched. `steady`: calls leave the buffers that are not saved alone."""
    found: list[object] = [*_numbers(_EVERY), *_forwards(model.modules())]
    found += map(_own, dict.fromkeys(map(type, model.modules())))  # methods of a class are exchanged in place, too
    for module in model.modules():
        found += (weakref.ref(module), *_code(module), _values(module, steady))
        tensors: list[torch.Tensor | None] = list(module._parameters.values())
        if module._buffers:
            volatile = module._non_persistent_buffers_set
            tensors += [one for name, one in module._buffers.items() if steady or name not in volatile]
            found += [one.dtype for one in module._buffers.values() if one is not None]
        found += [(id(one), _has_bytes(one) and one.data_ptr(), _writes(one)) for one in tensors if one is not None]
        if "_disable_adapters" in module.__dict__:
            found.append(_switched(module))
        found += map(id, _hooks(module))  # code that removes all hooks may put other tables in their place
        if module._forward_hooks or module._forward_pre_hooks:
            found += _numbers(_hooks(module))
    return found


def _writes(tensor: torch.Tensor) -> int:
    """A tensor's count of writes in place; one that was made in inference mode has none."""
    return 0 if tensor.is_inference() else tensor._version


def _tensors(model: torch.nn.Module, steady: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, each tensor once, by name. Without `steady` only the buffers that are saved."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        volatile = () if steady else module._non_persistent_buffers_set
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None and name not in volatile and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield f"{prefix}.{name}", tensor


def _hooks(module: torch.nn.Module) -> tuple[Mapping[int, object], Mapping[int, object]]:
    return module._forward_hooks, module._forward_pre_hooks


def _numbers(tables: Iterable[Mapping[int, object]]) -> list[int]:
    """The numbers of hooks that may change what a module computes."""
    # other threads hook modules meanwhile
    return [n for hooks in tables if hooks for n, hook in list(hooks.items()) if not _module(hook).startswith(_KNOWN)]


def _code(module: torch.nn.Module) -> tuple[object, ...]:
    """A module's class, the class's forward, which libraries exchange, and the method that libraries put before it."""
    if isinstance(module, torch.jit.ScriptModule):  # its class has no forward; types are numbered as they are made
        code = module.code if hasattr(module, "forward") else ""
        return type(module), re.sub(r"___torch_mangle_\d+\.", "", code)
    own = vars(module).get("forward")
    return type(module), type(module).forward, *([own.__func__] if _is_method(own) else [])


def _own(kind: type) -> list[object]:
    """The functions (properties, too), numbers and texts of a class, and of its bases, that no library has."""
    bases = [one for one in kind.__mro__ if one.__module__.partition(".")[0] not in _LIBRARIES]
    held = [getattr(one, "fget", getattr(one, "__func__", one)) for base in bases for one in [*vars(base).values()]]
    return [*(one for one in held if isinstance(one, FunctionType)), *(_values(base, steady=True) for base in bases)]


def _told(code: object) -> object:
    """A class, a function or a text as plain data. A class that a notebook writes again keeps its name, and a function
    may take another's: so their own code counts, unless a library has it."""
    return [plain(code), *map(_written, _own(code) if isinstance(code, type) else [code])]


def _written(one: object) -> object:
    """A function's own code as plain data: bytecode, defaults, and the numbers, texts and functions that it holds."""
    if not isinstance(one, FunctionType):
        return plain(one)
    if one.__globals__.get("__name__", "").partition(".")[0] in _LIBRARIES:
        return [plain(one), _written(getattr(one, "__wrapped__", None))]
    held = [cell.cell_contents for cell in one.__closure__ or () if cell != CellType()]
    held += [*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]
    codes = [one.__code__, *(inner.__code__ for inner in held if isinstance(inner, FunctionType))]
    return [*map(_bytecode, codes), [value for value in held if type(value) in _VALUES]]


def _bytecode(code: CodeType) -> object:
    consts = [_bytecode(one) if isinstance(one, CodeType) else plain(one) for one in code.co_consts]
    return [code.co_code.hex(), code.co_names, consts]


def _is_method(forward: object) -> TypeGuard[MethodType]:
    """Whether a module's own forward is a library's method, which its name tells."""
    return isinstance(forward, MethodType) and "<" not in plain(forward) and forward.__module__ != "__main__"


def _values(owner: torch.nn.Module | type, steady: bool) -> list[tuple[str, object]]:
    """The numbers and texts of a module, or a class, that may change its results. Without `steady` calls set the rope's
    scaling, which follows the configuration."""
    return [
        (name, value)
        for name, value in list(vars(owner).items())  # other threads set some meanwhile
        if type(value) in _VALUES
        and name[:1] != "_"
        and name not in _IDLE
        and not name.endswith(_TOKENS)
        and (steady or name != "attention_scaling")
    ]


def _forwards(modules: Iterable[torch.nn.Module]) -> list[object]:
    """The forwards of single modules, put in place of their classes', whose code no name tells."""
    own = [(type(module), one) for module in modules if (one := vars(module).get("forward")) is not None]
    return [
        one
        for kind, one in own
        if not _is_method(one)
        and not _is_compiled(kind, one)
        and (not _module(one).startswith(_KNOWN) or _module(one) == _PRECISION)
    ]


def _is_compiled(kind: type, forward: object) -> bool:
    """Whether a forward is the class's own behind `torch.compile`, of a module that it wraps, or TorchScript's."""
    behind = getattr(forward, "_torchdynamo_orig_callable", None)
    behind = behind.__func__ if isinstance(behind, MethodType) else behind
    return (
        kind.__module__.startswith("torch._dynamo")
        or isinstance(forward, torch.ScriptMethod)
        or (behind is not None and behind is getattr(kind, "forward", None))
    )


def _module(hook: object) -> str:
    """The name of the module that a hook's code is from."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", ""))


def _random(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str]]:
    """The numbers by which a module draws at random in training (dropout, dropped layers, noise), its own and those of
    its children: attention has its dropout in a child, whose mode it does not ask."""
    for owner in (module, *module.children()):
        for name, value in list(vars(owner).items()):
            if type(value) in (int, float) and _RANDOM.search(name):
                yield owner, name


def _adapted(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules with adapters, by name."""
    return ((name, module) for name, module in model.named_modules() if "_disable_adapters" in module.__dict__)


def _switched(module: torch.nn.Module) -> list[object]:
    names = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
    return [plain(module.__dict__.get(name)) for name in names]


def _is_packed(module: torch.nn.Module) -> bool:
    """Whether a module keeps weights in an object of torch, as its dynamic quantisation does."""
    own = vars(module).values()
    return not isinstance(module, torch.jit.ScriptModule) and any(isinstance(one, torch.ScriptObject) for one in own)


def _has_bytes(tensor: torch.Tensor) -> bool:
    plain_memory = tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type != "meta"
    return plain_memory and not hasattr(tensor, "__tensor_flatten__")


def _place(name: str, tensor: torch.Tensor) -> tuple[int, int]:
    """A place in a tensor's memory, drawn from its name: the first element, and the number of elements in `PROBE`
    bytes."""
    there = _there(tensor)
    count = min(there, max(1, PROBE // tensor.element_size()))
    drawn = int.from_bytes(hashlib.blake2b(f"{PROBE}:{name}".encode(), digest_size=8).digest(), "little")
    return int(tensor.storage_offset()) + drawn % (there - count + 1), count


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """Sums over all bytes of a tensor, in which each word has a weight by its place; of a small one the bytes."""
    memory = tensor.as_strided((_there(tensor),), (1,)).view(torch.uint8)
    if len(memory) <= SAMPLE:
        return memory.clone()
    if memory.storage_offset() % 8:
        memory = memory.clone()
    return torch.cat([_sums_of_piece(piece) for piece in torch.split(memory, PIECE)])


def _sums_of_piece(memory: torch.Tensor) -> torch.Tensor:
    words = memory[: len(memory) // 8 * 8].view(torch.int64)
    # Sums wrap, and two changed signs in a row or a column would cancel: a word's first bit counts below it, too.
    words = words.add(words >> 32, alpha=3)
    table = words[: len(words) // COLUMNS * COLUMNS].view(-1, COLUMNS)
    parts = table.sum(0), table.sum(1), words[table.numel() :], memory[len(words) * 8 :]
    return torch.stack([(one * (2 * torch.arange(len(one), device=one.device) + 1)).sum() for one in parts])


def _there(tensor: torch.Tensor) -> int:
    """The elements of memory from a tensor's first one to its last one: fewer than it has, if it is expanded."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * step for size, step in steps) if tensor.numel() else 0


def _read(pieces: list[torch.Tensor]) -> bytes:
    """The bytes of all pieces, with one copy from each device of each type's."""
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for piece in pieces:
        if piece.element_size() == 1:
            piece = piece.view(torch.uint8)  # not all devices join float8
        alike.setdefault((piece.device, piece.dtype), []).append(piece)
    return b"".join(torch.cat(some).view(torch.uint8).cpu().numpy().tobytes() for some in alike.values())
