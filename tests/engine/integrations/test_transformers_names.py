"""Which pages a transformers model finds: those of the same model as it is in memory now, and no others."""

from __future__ import annotations

import functools
import json
import logging
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from gdscache import CacheEngine, HybridEngine
from gdscache.errors import GeometryError, SequenceStateError, UnsupportedRequestError
from gdscache.integrations import live_model
from gdscache.integrations.live_model import LiveModel
from gdscache.integrations.transformers import PrefixCache
from tests.support.tiny_transformers import SLIDING, SMALL, build, cached, hybrid_options, options, serve, tokens

FAMILIES = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma", "deepseek_v2", "deepseek_v3"),
    *("gemma2", "gemma3_text", "gpt_oss", "cohere2", "olmo3", "llama4_text"),
)
Change = Callable[[PreTrainedModel], object]


@pytest.fixture
def model(device: str) -> PreTrainedModel:
    return build("llama", device)


@pytest.fixture
def engine(model: PreTrainedModel, tmp_path: Path) -> Iterator[CacheEngine]:
    with CacheEngine.from_config(options(model, tmp_path)) as engine:
        serve(engine, model, tokens())
        yield engine


def test_the_same_model_is_found_after_a_restart(tmp_path: Path, device: str) -> None:
    for expected in (0, 40):
        model = build("llama", device)
        with CacheEngine.from_config(options(model, tmp_path)) as engine:
            assert serve(engine, model, tokens())["found"] == expected


# -- tensors -----------------------------------------------------------------------------------------------------------


def weight(model: PreTrainedModel) -> torch.nn.Parameter:
    found: torch.nn.Parameter = model.model.layers[1].self_attn.k_proj.weight
    return found


@torch.no_grad()
def _in_place(model: PreTrainedModel) -> None:
    weight(model).mul_(2)


def _by_data(model: PreTrainedModel) -> None:
    weight(model).data.mul_(2)  # not counted by torch as a change


def _by_another(model: PreTrainedModel) -> None:
    if model.device.type == "cpu":
        weight(model).detach().numpy()[:] = 0.5
    else:
        torch.from_dlpack(torch.utils.dlpack.to_dlpack(weight(model).detach()))[:] = 0.5


def _replaced(model: PreTrainedModel) -> None:
    model.model.layers[1].self_attn.k_proj.weight = torch.nn.Parameter(weight(model).detach() * 2)


def _trained(model: PreTrainedModel) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = tokens().to(model.device)
    model(ids, labels=ids).loss.backward()
    optimizer.step()


def _adapter(model: PreTrainedModel) -> None:
    """As PEFT puts a layer of its own around one of the model's, and switches it."""
    model.model.layers[0].mlp._disable_adapters = False


def _steer(model: PreTrainedModel) -> torch.utils.hooks.RemovableHandle:
    """As a steering vector is added to what a layer computes."""
    handle: torch.utils.hooks.RemovableHandle = model.model.layers[0].register_forward_hook(lambda *call: call[2] + 5.0)
    return handle


def _forward(model: PreTrainedModel, times: float = 2.0) -> None:
    """As libraries put another forward into one module."""
    module = model.model.layers[0].mlp
    inner = type(module).forward
    module.forward = MethodType(lambda self, states: times * inner(self, states), module)


class Quick(LlamaMLP):  # type: ignore[misc]
    """A library's module, whose forward is put into others."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states


@torch.no_grad()
def _one_row(model: PreTrainedModel) -> None:
    """As one token's embedding is trained."""
    model.model.embed_tokens.weight[17] *= 2


def _rope(model: PreTrainedModel) -> torch.Tensor:
    found: torch.Tensor = model.model.rotary_emb.inv_freq
    return found


CHANGES: dict[str, Change] = {
    "in place": _in_place,
    "one row of the embeddings": _one_row,
    "through .data": _by_data,
    "by another library": _by_another,
    "replaced": _replaced,
    "trained": _trained,
    "loaded": lambda model: model.load_state_dict(build("llama", seed=8).state_dict()),
    "one module more": lambda model: model.model.add_module("more", torch.nn.Linear(2, 2, device=model.device)),
    "another type": lambda model: model.to(torch.float64),
    "a buffer": lambda model: model.model.register_buffer("scale", torch.ones(3, device=model.device)),
    "an adapter": _adapter,
    "frequencies in place": lambda model: _rope(model).div_(4),
    "frequencies replaced": lambda model: setattr(model.model.rotary_emb, "inv_freq", _rope(model) / 4),
    "frequencies of another type": lambda model: model.model.rotary_emb.to(torch.float64),
    "the attention": lambda model: model.set_attn_implementation("eager"),
    "kernels": lambda model: setattr(model, "_use_kernels", True),
    "the configuration": lambda model: setattr(model.config, "rms_norm_eps", 0.5),
    "a field of the configuration that nobody knows": lambda model: setattr(model.config, "sliding_window", 16),
    "a module without tensors": lambda model: setattr(model.model.layers[0].mlp, "act_fn", torch.nn.ReLU()),
    "a forward": _forward,
    "a library's forward": lambda model: setattr(
        (module := model.model.layers[0].mlp), "forward", MethodType(Quick.forward, module)
    ),
    "a scale": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.5),
    "a hook": _steer,
    "a hook before a module": lambda model: model.model.layers[0].mlp.register_forward_pre_hook(lambda *call: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changed_in_memory_finds_nothing(model: PreTrainedModel, engine: CacheEngine, change: str) -> None:
    prefixes = PrefixCache(engine, model)
    before = prefixes.salt()
    assert prefixes.salt() == before
    CHANGES[change](model)
    assert prefixes.salt() != before, "noticed by a cache that was made before"
    assert cached(engine, model, tokens()[0]) == 0


@pytest.mark.parametrize("change", ["in place", "an adapter"])
def test_what_another_model_has_computed_is_not_stored(
    model: PreTrainedModel, engine: CacheEngine, change: str
) -> None:
    """The change comes between `open` and the forward call, whose keys are not those of the pages' names."""
    other, before = tokens().flip(1), engine.stats()["tiers"]["gpu"]["pages"]
    with PrefixCache(engine, model).open(other) as cache:
        CHANGES[change](model)
        model(other.to(model.device), past_key_values=cache)
        with pytest.raises(SequenceStateError, match="other weights or adapters"):
            cache.commit(other)
    tier = engine.stats()["tiers"]["gpu"]
    assert (tier["pages"], tier["private_slots"]) == (before, 0)


def test_what_an_adapter_computed_that_was_switched_for_one_call_is_not_stored(
    model: PreTrainedModel, engine: CacheEngine
) -> None:
    """At `open` and at `commit` the model is the one that names the pages."""
    other, layer = tokens().flip(1).to(model.device), model.model.layers[0].mlp
    layer.__dict__.update(_disable_adapters=False, _active_adapter=["a"])
    with PrefixCache(engine, model).open(other) as cache, torch.no_grad():
        layer.__dict__.update(_disable_adapters=True)
        model(other, past_key_values=cache)
        layer.__dict__.update(_disable_adapters=False)
        with pytest.raises(SequenceStateError, match="other weights or adapters"):
            cache.commit(other)
        cache.reset()
        model(other, past_key_values=cache)
        cache.commit(other)
    assert cached(engine, model, other[0]) == 40


def test_an_adapter_that_was_switched_for_a_call_of_the_whole_prompt_is_noticed(
    model: PreTrainedModel, engine: CacheEngine
) -> None:
    """Such a call lets the prefix go, and empties the cache."""
    layer, longer = model.model.layers[0].mlp, torch.cat([tokens(), tokens(30, seed=3)], 1).to(model.device)
    layer.__dict__.update(_disable_adapters=False, _active_adapter=["a"])
    serve(engine, model, tokens())
    with PrefixCache(engine, model).open(longer) as cache, torch.no_grad():
        assert cache.cached_tokens == 40
        layer.__dict__.update(_disable_adapters=True)
        model(longer, past_key_values=cache)
        layer.__dict__.update(_disable_adapters=False)
        with pytest.raises(SequenceStateError, match="other weights or adapters"):
            cache.commit(longer)


def test_weights_that_were_swapped_for_one_call_are_noticed(model: PreTrainedModel, engine: CacheEngine) -> None:
    """As an average of the weights is (EMA): at `commit` they are those of `open` again."""
    other, swapped = tokens().flip(1).to(model.device), model.model.layers[0].mlp.down_proj.weight
    kept = swapped.detach().clone()
    with PrefixCache(engine, model).open(other) as cache, torch.no_grad():
        swapped.mul_(3)
        model(other, past_key_values=cache)
        swapped.copy_(kept)
        with pytest.raises(SequenceStateError, match="other weights or adapters"):
            cache.commit(other)
    assert cached(engine, model, other[0]) == 0


def test_hooks_that_were_there_for_one_call_are_noticed(model: PreTrainedModel, engine: CacheEngine) -> None:
    other = tokens().flip(1).to(model.device)
    with PrefixCache(engine, model).open(other) as cache, torch.no_grad():
        handle = _steer(model)
        model(other, past_key_values=cache)
        handle.remove()
        with pytest.raises(SequenceStateError, match="or other hooks"):
            cache.commit(other)
    assert cached(engine, model, other[0]) == 0


@pytest.mark.parametrize("within", ["open", "the call"])
def test_pages_of_autocast_are_others(tmp_path: Path, device: str, within: str) -> None:
    """An MLA model's latent is of the weights' type behind its norm, also where its products are of another."""
    model, ids = build("deepseek", device), tokens().to(device)
    autocast = functools.partial(torch.autocast, device, dtype=torch.bfloat16)
    with CacheEngine.from_config(options(model, tmp_path)) as engine, torch.no_grad():
        with autocast() if within == "open" else nullcontext(), PrefixCache(engine, model).open(ids) as cache:
            with autocast():
                model(ids, past_key_values=cache)
            with nullcontext() if within == "open" else pytest.raises(SequenceStateError, match="or autocast"):
                cache.commit(ids)
        assert cached(engine, model, ids[0]) == 0
        with autocast():
            assert cached(engine, model, ids[0]) == (40 if within == "open" else 0)


@pytest.mark.parametrize("other", [3.0, 2.0])
def test_forwards_of_equal_names_are_other_models(model: PreTrainedModel, engine: CacheEngine, other: float) -> None:
    _forward(model)
    prefixes = PrefixCache(engine, model)
    first, again = prefixes.salt(), prefixes.salt()
    _forward(model, other)
    assert first == again != prefixes.salt() != PrefixCache(engine, model).salt()


def test_a_librarys_forward_is_found_after_a_restart() -> None:
    def name() -> dict[str, object]:
        model = build("llama")
        CHANGES["a library's forward"](model)
        return LiveModel(model).identity()

    assert name() == name()


def _compile_forward(model: PreTrainedModel) -> torch.nn.Module:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def _compile_layer(model: PreTrainedModel) -> torch.nn.Module:
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    return model


def _script(model: PreTrainedModel, of: type[torch.nn.Module] = torch.nn.SiLU) -> torch.nn.Module:
    model.model.layers[0].mlp.act_fn = torch.jit.script(of())
    model.model.layers[1].mlp.act_fn = torch.jit.trace(of(), torch.ones(2))
    return model


@pytest.mark.parametrize(
    "compiled",
    [_compile_forward, _compile_layer, lambda model: torch.compile(model, backend="eager"), _script],
    ids=["forward", "layer", "model", "TorchScript"],
)
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_compiled_model_is_found_after_a_restart(compiled: Callable[[PreTrainedModel], torch.nn.Module]) -> None:
    assert LiveModel(compiled(build("llama"))).identity() == LiveModel(compiled(build("llama"))).identity()


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_other_code_that_is_compiled_is_another_model(model: PreTrainedModel) -> None:
    live = LiveModel(_script(model))
    names = [live.identity()]
    _script(model, torch.nn.ReLU)
    names.append(live.identity())
    model.forward = torch.compile(lambda *given, **named: None, backend="eager")
    names.append(live.identity())
    assert all(names.count(name) == 1 for name in names)


def test_a_model_with_accelerates_mixed_precision_is_another() -> None:
    """`Accelerator.prepare` puts autocast into the forward of a model."""

    def name(home: str) -> dict[str, object]:
        model = build("llama")
        within = type(model).forward

        def forward(*given: Any, **named: Any) -> Any:
            return within(*given, **named)

        forward.__module__ = home
        model.forward = MethodType(forward, model)
        return LiveModel(model).identity()

    assert name("accelerate.hooks") == LiveModel(build("llama")).identity() != name("accelerate.utils.operations")


def test_a_forward_that_was_there_for_one_call_is_noticed(model: PreTrainedModel, engine: CacheEngine) -> None:
    other = tokens().flip(1).to(model.device)
    with PrefixCache(engine, model).open(other) as cache, torch.no_grad():
        _forward(model)
        model(other, past_key_values=cache)
        del model.model.layers[0].mlp.forward
        with pytest.raises(SequenceStateError, match="or other hooks"):
            cache.commit(other)


def _twice(states: Any) -> Any:
    return 2 * states


def _thrice(states: Any) -> Any:
    return 3 * states


AFTER: dict[str, Callable[[float, Callable[[Any], Any]], Any]] = {  # what a class has as `after`
    "a closure's number": lambda times, _: lambda self, states: times * states,
    "a keyword's default": lambda times, _: _with_keyword(times),
    "a method": lambda _, after: after,
    "a static method": lambda _, after: staticmethod(after),
    "a property": lambda _, after: property(after),
    "a number": lambda times, _: times,
}


def _with_keyword(given: float) -> Any:
    def after(self: object, states: torch.Tensor, *, times: float = given) -> torch.Tensor:
        return times * states

    return after


def _written(times: int, what: str) -> type[LlamaMLP]:
    """A class as a notebook's cell makes it anew, by one name."""

    class Mlp(LlamaMLP):  # type: ignore[misc]
        pass

    Mlp.after = AFTER[what](times, _twice if times == 2 else _thrice)
    return Mlp


@pytest.mark.parametrize("what", AFTER)
def test_a_class_that_is_written_again_is_another_model(model: PreTrainedModel, what: str) -> None:
    names, mlp = [], model.model.layers[1].mlp
    for times in (2, 3, 2):
        mlp.__class__ = _written(times, what)
        names.append(LiveModel(model).identity())
    assert names[0] == names[2] != names[1]
    live = LiveModel(model)
    assert live.identity() == names[0]
    type(mlp).after = vars(_written(3, what))["after"]
    assert live.identity() == names[1], "the class is there, and has another one"


def test_a_forward_that_takes_the_name_of_a_librarys_is_another_model(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, live = LlamaMLP.forward, LiveModel(model)
    known: list[object] = []
    for times in (1.0, 2.0):

        @functools.wraps(inner)
        def forward(self: torch.nn.Module, states: torch.Tensor, times: float = times) -> torch.Tensor:
            return times * inner(self, states)

        known.append(live.identity())
        monkeypatch.setattr(LlamaMLP, "forward", forward)
    known.append(live.identity())
    assert all(known.count(name) == 1 for name in known)


@pytest.mark.filterwarnings("ignore")
def test_weights_that_are_packed_in_other_memory_are_never_found_again(model: PreTrainedModel) -> None:
    packed = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    assert not any("down_proj" in name for name, _ in packed.named_parameters())
    assert LiveModel(packed).identity()["weights"] != LiveModel(packed).identity()["weights"]


ODD = {
    "sparse": torch.Tensor.to_sparse,
    "rows": torch.Tensor.to_sparse_csr,
    "mkldnn": torch.Tensor.to_mkldnn,
    "quantised": lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD)
def test_tensors_of_other_layouts_are_never_found_again(model: PreTrainedModel, kind: str) -> None:
    model.model.register_buffer("odd", ODD[kind](weight(model).detach().cpu()))
    live = LiveModel(model)
    assert live.identity() == live.identity() != LiveModel(model).identity()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64])
@pytest.mark.parametrize("shape", [(61, 1030), (1, 5000), (3, 4096 * 8), (2000, 3)])
def test_one_element_anywhere_is_another_model(
    shape: tuple[int, int], dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_model, "PIECE", 1 << 16)
    bare, rng = torch.nn.Module(), random.Random(3)
    # behind three elements: words of 8 bytes begin elsewhere
    memory = torch.randint(1, 50, (3 + shape[0] * shape[1],), device=device).to(dtype)
    bare.register_buffer("weight", memory[3:].view(shape))
    known = LiveModel(bare)
    names = {str(known.identity())}
    for _ in range(20):
        place = rng.randrange(shape[0]), rng.randrange(shape[1])
        bare.weight[place] += 1
        names.add(str(known.identity()))
    bare.weight.copy_(bare.weight.flip(0).clone())
    names.add(str(known.identity()))
    assert len(names) == (22 if shape[0] > 1 else 21)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_other_signs_are_another_model(dtype: torch.dtype, device: str) -> None:
    bare = torch.nn.Module()
    bare.register_buffer("weight", torch.rand(64, 4096, device=device).to(dtype))
    live, names = LiveModel(bare), []
    columns = (bare.weight[:, column] for column in range(1, 9))  # 8 elements, at least, are a word
    for some in (bare.weight[:0], bare.weight, bare.weight[3:5], bare.weight[:, :2048], *columns):
        some.neg_()
        names.append(live.identity())
    assert all(names.count(name) == 1 for name in names)


def test_a_hook_is_of_this_process_alone(
    model: PreTrainedModel, engine: CacheEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it does is in its code, and in objects that its code has."""
    handle = _steer(model)
    assert [serve(engine, model, tokens())["found"] for _ in range(2)] == [0, 40]
    with monkeypatch.context() as restarted:
        restarted.setattr(live_model, "_PROCESS", "another")
        assert cached(engine, model, tokens()[0]) == 0
    handle.remove()
    _steer(model).remove()
    assert cached(engine, model, tokens()[0]) == 40, "without hooks it is the model of before"
    every = torch.nn.modules.module.register_module_forward_hook(lambda *call: None)
    found = cached(engine, model, tokens()[0])
    every.remove()
    assert found == 0


def test_hooks_of_libraries_that_change_no_keys_are_no_change(model: PreTrainedModel, engine: CacheEngine) -> None:
    prefixes = PrefixCache(engine, model)
    before = prefixes.salt()
    with prefixes.open(tokens()), torch.no_grad():
        model(tokens().to(model.device), output_hidden_states=True)
        model.enable_input_require_grads()
        assert prefixes.salt() == before, "hooks of transformers, and of this cache"
    assert any(one._forward_hooks for one in model.modules())


def test_hook_tables_that_were_replaced_are_looked_at(model: PreTrainedModel) -> None:
    """As code does that removes all hooks of a module."""
    module, known = model.model.layers[0], LiveModel(model)
    plain, names = known.identity(), []
    for _ in range(2):
        module._forward_hooks = OrderedDict()
        assert known.identity() == plain
        module.register_forward_hook(lambda *call: None)
        names.append(str(known.identity()))
    assert len({str(plain), *names}) == 3


def test_hooks_that_only_count_and_values_that_do_not_compare_are_no_change(model: PreTrainedModel) -> None:
    known = LiveModel(model)
    model.config.mine = torch.ones(3)
    before = known.identity()
    with FlopCounterMode(display=False):
        assert known.identity() == before


# -- training ----------------------------------------------------------------------------------------------------------


def _dropping(model: PreTrainedModel) -> None:
    model.model.layers[0].self_attn.attention_dropout = 0.5


def _child(model: PreTrainedModel) -> None:
    """As GPT-2's attention asks its own mode, and has the number in a child."""
    model.model.layers[0].self_attn.attn_dropout = torch.nn.Dropout(0.5).eval()


@pytest.mark.parametrize("change", [_dropping, _child])
def test_pages_with_dropout_are_never_found(
    model: PreTrainedModel, engine: CacheEngine, change: Change, caplog: pytest.LogCaptureFixture
) -> None:
    change(model)
    prefixes = PrefixCache(engine, model)
    before = prefixes.salt()
    model.train()
    if change is _child:
        model.model.layers[0].self_attn.attn_dropout.eval()
    assert [serve(engine, model, tokens(seed=4))["found"] for _ in range(2)] == [0, 0]
    assert len({before, prefixes.salt(), prefixes.salt()}) == 3
    assert caplog.text.count("draws at random") == 3, "once for each cache of the model's"
    assert cached(engine, model.eval(), tokens(seed=4)[0]) == 0
    assert prefixes.salt() == before


def test_gpt2_in_training_is_another_model() -> None:
    config = transformers.GPT2Config(**{**SMALL, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64})
    live = LiveModel(AutoModelForCausalLM.from_config(config).train())
    assert live.identity() != live.identity()
    live._model.eval()
    assert live.identity() == live.identity()


def test_training_without_dropout_is_no_change(model: PreTrainedModel, engine: CacheEngine) -> None:
    prefixes = PrefixCache(engine, model)
    before = prefixes.salt()
    model.train()
    assert prefixes.salt() == before
    assert serve(engine, model, tokens())["found"] == 40


def test_dropout_that_was_switched_on_for_one_call_is_noticed(model: PreTrainedModel, engine: CacheEngine) -> None:
    _dropping(model)
    other = tokens().flip(1).to(model.device)
    with PrefixCache(engine, model).open(other) as cache, torch.no_grad():
        model.train()
        model(other, past_key_values=cache)
        model.eval()
        with pytest.raises(SequenceStateError, match="another configuration or mode"):
            cache.commit(other)


# -- tensors in other places -------------------------------------------------------------------------------------------


def test_old_weights_are_let_go_and_what_takes_their_place_is_noticed(model: PreTrainedModel) -> None:
    """`model.to` gives each tensor other memory. Weights may come to lie where others lay."""
    live = LiveModel(model)
    before, old = live.identity(), [StorageWeakRef(one.untyped_storage()) for one in model.parameters()]
    for one in model.parameters():
        one.data = one.data.clone()
    assert all(one.expired() for one in old)
    assert live.identity() == before
    name, moved = "model.layers.0.self_attn.k_proj.weight", model.model.layers[0].self_attn.k_proj.weight
    first, count = live_model._place(name, moved)
    moved.data = moved.data.clone()
    moved.data.view(-1)[(first + count) % moved.numel()] += 1
    live._stamp = live_model._stamp(model)  # as where its address is that of before
    assert live.identity() != before


def test_a_call_whose_adapters_are_told_by_hooks_is_refused(model: PreTrainedModel, engine: CacheEngine) -> None:
    """As PEFT does it with `adapter_names`, whose rows may be another adapter's, and with activated LoRAs, whose first
    token depends on later ones. A hook that was there at `open` is no matter."""
    other, layer = tokens().flip(1).to(model.device), model.model.layers[0].mlp
    layer.__dict__.update(_disable_adapters=False, _active_adapter=["a"])
    layer.register_forward_pre_hook(lambda module, given: None)
    with PrefixCache(engine, model).open(other) as cache, torch.no_grad():
        told = layer.register_forward_pre_hook(lambda module, given: None)
        with pytest.raises(UnsupportedRequestError, match="a hook tells adapters what to do"):
            model(other, past_key_values=cache)
        told.remove()
        model(other, past_key_values=cache)
        cache.commit(other)
    assert cached(engine, model, other[0]) == 40


def test_weights_that_are_away_between_calls_are_no_change(model: PreTrainedModel, engine: CacheEngine) -> None:
    """As accelerate's hooks leave them: a new tensor on `meta` behind each call. Later requests find none of its
    pages."""
    model.register_buffer("away", torch.empty(3, device="meta"))
    prefixes, other = PrefixCache(engine, model), tokens().flip(1)
    with prefixes.open(other) as cache:
        model(other.to(model.device), past_key_values=cache)
        model.away = torch.empty(3, device="meta")
        assert len(cache.commit(other)) == 1
    assert cached(engine, model, other[0]) == 0


def test_an_adapter_that_is_switched_off_is_another_model(model: PreTrainedModel, engine: CacheEngine) -> None:
    layer, prefixes, salts = model.model.layers[0].mlp, PrefixCache(engine, model), set()
    for state in (
        {"_disable_adapters": False, "_active_adapter": ["a"]},
        {"_disable_adapters": True, "_active_adapter": ["a"]},
        {"_disable_adapters": False, "_active_adapter": ["b"]},
        {"_disable_adapters": False, "_active_adapter": ["b"], "merged_adapters": ["a"]},
        {"_disable_adapters": False, "_active_adapter": ["b"], "scaling": {"b": 2.0}},
    ):
        layer.__dict__.update(state)
        salts.add(prefixes.salt())
    assert len(salts) == 5


def test_what_changes_back_is_found_again(model: PreTrainedModel, engine: CacheEngine) -> None:
    kept = weight(model).detach().clone()
    _in_place(model)
    assert cached(engine, model, tokens()[0]) == 0
    with torch.no_grad():
        weight(model).copy_(kept)
    assert cached(engine, model, tokens()[0]) == 40


def test_ropes_that_are_recomputed_are_no_change(model: PreTrainedModel, engine: CacheEngine) -> None:
    """Longrope writes its frequencies anew for each call; buffers that are not saved do not count."""
    prefixes = PrefixCache(engine, model)
    before = prefixes.salt()
    model.model.rotary_emb.inv_freq.mul_(1)
    assert prefixes.salt() == before


def test_numbers_that_calls_set_are_no_change(model: PreTrainedModel) -> None:
    """A rope counts its tokens; bitsandbytes looks at the type of the first call."""
    layer = model.model.layers[0].mlp.down_proj
    layer.compute_type_is_set, layer.full_attention_max_seq_len_cached = False, 32
    live = LiveModel(model)
    before = live.identity()
    layer.compute_type_is_set, layer.full_attention_max_seq_len_cached = True, 64
    assert live.identity() == before


def test_a_switch_reads_no_weights_again(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    read: list[int] = []
    sums = live_model._sums
    monkeypatch.setattr(live_model, "_sums", lambda tensor: read.append(id(tensor)) or sums(tensor))
    model = build("llama", device)
    live, layer = LiveModel(model), model.model.layers[0].self_attn
    first, every = live.identity(), len(read)
    assert every == len({id(one) for one in (*model.parameters(), *model.buffers())})
    for scaling in (0.5, layer.scaling):
        layer.scaling = scaling
        second = live.identity()
        assert (second == first) == (scaling != 0.5)
    assert len(read) == every
    with torch.no_grad():
        model.lm_head.weight[:, 0] += 1  # counted
    third = live.identity()
    assert third["weights"] != first["weights"]
    assert read[every:].count(id(model.lm_head.weight)) == 1
    read.clear()
    layer.q_proj.weight.data.mul_(2)  # not counted
    assert live.identity()["weights"] != third["weights"]
    assert len(read) == every


def test_a_dynamic_ropes_scaling_is_no_change(device: str) -> None:
    """Of a rope for each kind of layer a call beyond the limit sets it, such as one without the cache."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    ropes = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    config = transformers.Gemma3TextConfig(
        **{**SLIDING, "max_position_embeddings": 32},
        head_dim=16,
        rope_parameters=ropes,
        layer_types=["full_attention"] * 3,
    )
    model = transformers.Gemma3ForCausalLM(config).eval().to(device)
    live = LiveModel(model)
    before = live.identity()
    with torch.no_grad():
        model(torch.arange(60, device=device).unsqueeze(0) % 30)
    assert "attention_scaling" in vars(model.model.rotary_emb)
    assert live.identity() == before


def test_a_model_that_was_made_in_inference_mode_is_known_and_its_changes_are_noticed(device: str) -> None:
    with torch.inference_mode():
        model = build("llama", device)
    live = LiveModel(model)
    before = live.identity()
    assert live.identity() == before == LiveModel(build("llama", device)).identity()
    with torch.inference_mode():
        weight(model).mul_(2)
    assert live.identity() != before


def test_a_buffer_that_is_one_value_for_many_is_known(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.register_buffer("more", torch.ones(1, device=model.device).expand(4))
    live = LiveModel(model)
    before = live.identity()
    model.model.layers[0].mlp.more.data[0] = 2
    assert live.identity() != before


def test_tensors_without_bytes_are_never_found_again(model: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    with torch.device("meta"):
        model.model.layers[0].mlp.more = torch.nn.Linear(2, 2)
    one, other = LiveModel(model), LiveModel(model)
    assert one.identity()["weights"] == one.identity()["weights"]
    assert one.identity()["weights"] != other.identity()["weights"]
    assert "2 tensors or modules have no bytes to look at" in caplog.text


# -- facts -------------------------------------------------------------------------------------------------------------


def facts(**changes: Any) -> dict[str, object]:
    config = SimpleNamespace(to_dict=lambda: {**dict.fromkeys(fields("held", "harmless"), "x"), **changes})
    config.get_text_config = lambda decoder: config
    module = torch.nn.Module()
    module.config = config  # type: ignore[assignment]
    return live_model._facts(*live_model._settings(module))


def fields(*kinds: str) -> list[str]:
    return [name.split(".")[1] for name, kind in live_model.table().kinds.items() if kind in kinds]


@pytest.mark.parametrize("field", fields("held"))
def test_another_value_of_a_line_is_another_model(field: str) -> None:
    before, after = facts(), facts(**{field: "another"})
    assert {name for name in before if before[name] != after[name]} == {f"TextConfig.{field}"}


@pytest.mark.soak
@pytest.mark.parametrize("field", fields("held"))
def test_a_line_that_is_taken_out_is_missed(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = live_model._facts

    def some(*given: Any) -> dict[str, object]:
        return {name: value for name, value in kept(*given).items() if name != f"TextConfig.{field}"}

    monkeypatch.setattr(live_model, "_facts", some)
    with pytest.raises(AssertionError):
        test_another_value_of_a_line_is_another_model(field)


def test_what_is_harmless_is_no_fact() -> None:
    assert facts(**dict.fromkeys(fields("harmless"), "another")) == facts()
    assert facts(new=1)["TextConfig.new"] == 1, "what nobody knows is held"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_a_family_is_known(family: str) -> None:
    config = CONFIG_MAPPING[family]().to_dict()
    assert live_model.table().unknown([live_model.TextConfig(**config)]) == []


def test_fields_that_nobody_knows_are_told_once(model: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    model.config.something_new = 1
    with caplog.at_level(logging.INFO, "gdscache"):
        live = LiveModel(model)
        assert live.identity() is live.identity()
    assert caplog.text.count("something_new") == 1


def test_experts_that_generate_exchanges_for_others_are_one_model(model: PreTrainedModel) -> None:
    """For its decoding, on a GPU. Others may quantise."""
    names = []
    for experts in ("grouped_mm", "batched_mm", "eager", "deepgemm", None):
        model.config._experts_implementation = experts
        names.append(json.dumps(LiveModel(model).identity()))
    assert [names.index(name) for name in names] == [0, 0, 0, 3, 4]


def test_windows_that_were_changed_are_looked_at_again(device: str, tmp_path: Path) -> None:
    model = build("mistral", device)
    with HybridEngine.from_config(hybrid_options(model, tmp_path)) as engine:
        prefixes = PrefixCache(engine, model)
        prefixes.open(tokens()).close()
        model.config.sliding_window += 8
        with pytest.raises(GeometryError, match="other tokens"):
            prefixes.open(tokens())


HELD = {
    "router_jitter_noise": 0.5,
    "hidden_act": "relu",
    "rms_norm_eps": 0.5,
    "attention_bias": True,
    "max_position_embeddings": 100,
}


@pytest.mark.parametrize("field", HELD)
def test_another_configuration_finds_nothing(model: PreTrainedModel, engine: CacheEngine, field: str) -> None:
    before = cached(engine, model, tokens()[0])
    setattr(model.config, field, HELD[field])
    assert (before, cached(engine, model, tokens()[0])) == (40, 0)


def test_another_version_and_another_class_find_nothing(
    model: PreTrainedModel, engine: CacheEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cached(engine, model, tokens()[0]) == 40
    model.__class__ = type("Other", (type(model),), {})
    assert cached(engine, model, tokens()[0]) == 0
    model.__class__ = type(model).__mro__[1]
    assert cached(engine, model, tokens()[0]) == 40
    monkeypatch.setattr(live_model.transformers, "__version__", "9")
    assert cached(engine, model, tokens()[0]) == 0


def test_salts_and_sides_are_lines_of_their_own(model: PreTrainedModel, engine: CacheEngine) -> None:
    prefixes = PrefixCache(engine, model)
    plain, tenant, long = (
        json.loads(text) for text in (prefixes.salt(), prefixes.salt("t"), prefixes.salt(rope="long"))
    )
    assert (tenant.pop("salt"), long.pop("rope")) == ("t", "long")
    assert (plain.pop("salt"), plain.pop("rope")) == ("", "")
    assert {**plain, "rope": ""} == tenant
    assert {**plain, "salt": ""} == long
