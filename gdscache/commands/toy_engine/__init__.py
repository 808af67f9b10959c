"""The engine of `examples/engine.py` and of `gdscache bench ttft`: a small one, whose paged KV cache is attached to
gdscache.

shape.py       what a model looks like: presets, and the config.json of a checkpoint
model.py       the model in plain torch, over paged planes
checkpoint.py  weights from safetensors, or random ones
pool.py        the engine's own paged tensors and their blocks
request.py     a request, and the options of an engine
batching.py    what goes into a step
prefills.py    what prefills take, for the cache's gate
serving.py     steps, and all that is asked of gdscache
"""

from gdscache.commands.toy_engine.checkpoint import fingerprint, load_checkpoint, random_model
from gdscache.commands.toy_engine.model import Batch, Span, Transformer
from gdscache.commands.toy_engine.pool import KVPool
from gdscache.commands.toy_engine.request import EngineOptions, Request, State
from gdscache.commands.toy_engine.serving import InferenceEngine
from gdscache.commands.toy_engine.shape import PRESETS, CheckpointError, ModelShape

__all__ = [
    "PRESETS",
    "Batch",
    "CheckpointError",
    "EngineOptions",
    "InferenceEngine",
    "KVPool",
    "ModelShape",
    "Request",
    "Span",
    "State",
    "Transformer",
    "fingerprint",
    "load_checkpoint",
    "random_model",
]
