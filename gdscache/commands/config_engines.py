"""The files of `gdscache config init` for each inference engine, and the commands that use them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from enum import Enum
from typing import Any

from gdscache.sizes import format_size


class SupportedEngine(Enum):
    """The engines with an integration."""

    VLLM = "vllm"
    SGLANG = "sglang"  # the cache linker
    HICACHE = "sglang-hicache"  # the storage below HiCache


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The tiers' bytes, and the reasons for them."""

    cpu: int
    ssd: int
    cpu_reason: str
    ssd_reason: str


@dataclasses.dataclass(frozen=True)
class WrittenFor:
    """An inference engine. `room`: its setting for GPU memory. `option`: JSON of `command`'s last argument. `cpu`:
    whether the configuration has a CPU tier; `gate`: whether the engine reports its computing times."""

    name: str
    room: str
    option: str
    command: Callable[[str], list[str]]
    cpu: bool = True
    gate: bool = False

    def text(self, sizes: Sizes, directory: str) -> str:
        """The file: the keys that a user may change, each with its purpose."""
        own = [_GPU, _CPU, _SSD, _BUFFER, _STORE] if self.cpu else [_SSD, _HICACHE_BUFFER, _HICACHE_STORE]
        return "\n".join([_HEAD, *own, _LOAD]).format(
            name=self.name,
            room=self.room,
            optional=_OPTIONAL if self.cpu else "",
            gate=_GATE if self.gate else "",
            cpu=f"capacity: {format_size(sizes.cpu)}",
            cpu_reason=sizes.cpu_reason,
            ssd=f"capacity: {format_size(sizes.ssd)}",
            ssd_reason=sizes.ssd_reason,
            directory=json.dumps(directory),
        )


def _vllm(file: str) -> list[str]:
    transfer = {
        "kv_connector": "GdsCacheConnector",
        "kv_connector_module_path": "gdscache.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"config": file},
    }
    return ["vllm", "serve", "MODEL", "--block-size", "64", "--kv-transfer-config", json.dumps(transfer)]


_SGLANG = ["python", "-m", "sglang.launch_server", "--model-path", "MODEL", "--page-size", "64"]


def _linker(file: str) -> list[str]:
    config: dict[str, Any] = {
        "linker": "GdsCacheLinker",
        "linker_module_path": "gdscache.integrations.sglang.linker",
        "linker_extra_config": {"config": file},
    }
    flags = ["--schedule-policy", "lpm", "--enable-unified-cache-external-linker"]
    flags += ["--unified-cache-external-linker-backend", "dynamic"]
    return [*_SGLANG, *flags, "--unified-cache-external-linker-config", json.dumps(config)]


def _hicache(file: str) -> list[str]:
    config = {
        "backend_name": "gdscache",
        "module_path": "gdscache.integrations.sglang.storage",
        "class_name": "GdsCacheStorage",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "config": file,
    }
    flags = ["--enable-hierarchical-cache", "--hicache-mem-layout", "page_first"]
    flags += ["--hicache-storage-backend", "dynamic"]
    return [*_SGLANG, *flags, "--hicache-storage-backend-extra-config", json.dumps(config)]


WRITTEN_FOR = {
    SupportedEngine.VLLM: WrittenFor("vLLM", "--gpu-memory-utilization", "kv_transfer_config", _vllm, gate=True),
    SupportedEngine.SGLANG: WrittenFor("SGLang", "--mem-fraction-static", "linker_config", _linker),
    SupportedEngine.HICACHE: WrittenFor("SGLang", "--mem-fraction-static", "storage_config", _hicache, cpu=False),
}


_HEAD = """\
# gdscache under {name}, which describes the model. Omitted keys have their defaults: docs/configuration.md has
# all keys, with their meaning. With an unknown key {name} does not start.

# model:
#   weights: "2026-11-23"     # names the weights where no files do: dummy weights, a remote store
"""

_GPU = """\
gpu:
  staging: 256MiB             # GPU memory for copies, beside {name}'s own ({room})
"""

_CPU = """\
cpu:
  {cpu:<27} # page-locked host memory: {cpu_reason};
                              # half of it at most is for pages of requests that wait for their turn
"""

_OPTIONAL = "                          # take the section out to have no SSD tier: then nothing outlives a restart"

_SSD = """\
ssd:{optional}
  # On a fast local disk, a directory for each server. ~ and $VARS are replaced.
  path: {directory}
  {ssd:<27} # reserved when {name} starts, and never exceeded: {ssd_reason}
  durability: process         # a stored page survives: process (any kill) | power (a power cut; slower stores)
  endurance: null             # bytes that may be written in any 24 hours, e.g. 2TiB; null is no limit
"""

_BUFFER = """\
host_buffer: 256MiB           # host memory for pages that find no room in the CPU tier
"""

_HICACHE_BUFFER = """\
host_buffer: 256MiB          # host memory that pages pass through between HiCache's and the SSD
"""

_STORE = """\
store:
  queue: 2GiB                 # bytes on their way to the CPU tier, and as many to the SSD; further pages are not stored
  write_policy: write_through # when a page goes on to the SSD: write_through (when it is stored) |
                              # write_through_selective (after two hits) | write_back (before the CPU tier gives it up)
  admission: all              # pages that are written there: all | second_offer (seen twice) | tinylfu
"""

_HICACHE_STORE = """\
store:
  queue: 2GiB                 # bytes on their way to the SSD; further pages are not stored
  admission: all              # pages that are written: all | second_offer (seen twice) | tinylfu
"""

_GATE = (
    "  gate: enforcing             # compute hits that would load more slowly: enforcing | advisory (loaded) | off\n"
)

_LOAD = """\
load:
  verify: once                # checksums are compared when bytes come from the SSD, and not again for each load
{gate}
deadline: 30                  # seconds until a read or a write of the SSD that hangs is given up
"""
