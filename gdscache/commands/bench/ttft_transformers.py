"""The second client of `gdscache bench ttft`: a Llama of Hugging Face transformers, by `integrations.transformers`.

The cache owns the pool, and a prefix is loaded as a whole before the forward pass, which is what the integration does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from gdscache import CacheEngine, Config
from gdscache.commands.bench.ssd_tier import forget
from gdscache.commands.bench.ttft_answers import Answer, stored_bytes
from gdscache.commands.bench.ttft_cells import CACHED, Cell, cached_tokens
from gdscache.commands.bench.ttft_client import EngineClient
from gdscache.errors import IOFailedError, MissingPackageError


class TransformersClient(EngineClient):
    """See `EngineClient`. It has what the integration has: hits without overlap, from the CPU tier or the SSD."""

    def _make(self) -> None:
        try:
            from transformers import AutoModelForCausalLM, LlamaConfig
        except ImportError as error:
            raise MissingPackageError("transformers is not installed", 'pip install "gdscache[hf]"') from error
        shape = self.shape
        config = LlamaConfig(
            vocab_size=shape.vocab,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=self._longest + self.settings.new_tokens,
            tie_word_embeddings=shape.tied,
            bos_token_id=None,
            eos_token_id=None,
        )
        cuda = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(cuda), self.device:
            torch.manual_seed(self.settings.seed)
            self.model: Any = AutoModelForCausalLM.from_config(config, dtype=self._dtype).eval()  # type: ignore[no-untyped-call]

    def _unmake(self) -> None:
        del self.model

    def section(self) -> dict[str, Any]:
        from gdscache.integrations.transformers import model_section

        dtype, size = self.settings.dtype, self.settings.page_tokens
        return model_section(self.model.config, dtype=dtype, name=self.shape.name, page_tokens=size)

    def _open(self, config: Config) -> CacheEngine:
        return CacheEngine.from_config(config)

    def vacate(self) -> None:
        if self._cache is not None:
            forget(self._cache.manager, self._cache.gpu)

    def prime(self, length: int) -> int:
        cached = cached_tokens(length, max(CACHED), self.settings.page_tokens)
        tokens = self.prompt(length, cached)[: cached + 1]
        self._run(tokens, cached=True, commit=True)
        return stored_bytes(self.cache, tokens)

    def plain(self, cell: Cell) -> Answer:
        return self._run(self.of(cell)[0], cached=False)

    def resident(self, cell: Cell) -> Answer:
        tokens, cached = self.of(cell)
        with self.cache.sequence(tokens[: cached + 1]) as sequence:  # one token more: these pages are all full
            if sequence.verify() != cached:
                raise IOFailedError(f"{sequence.cached_tokens} of {cached} tokens are cached", "see the log")
            sequence.commit()
        self.cache.drain()
        return self._run(tokens, cached=True)

    def hit(self, cell: Cell) -> Answer:
        tokens, cached = self.of(cell)
        self.place(tokens, cached, cell.where)
        return self._run(tokens, cached=True)

    def _bring(self, tokens: Sequence[int], cached: int) -> None:
        with self.cache.sequence(tokens[: cached + 1]) as sequence:
            sequence.verify()

    @torch.no_grad()
    def _run(self, tokens: Sequence[int], *, cached: bool, commit: bool = False) -> Answer:
        from transformers import DynamicCache

        from gdscache.integrations.transformers import PrefixCache

        ids = torch.tensor([list(tokens)], device=self.device)
        self.idle()
        start = time.perf_counter()
        past: Any = PrefixCache(self.cache, self.model).open(ids) if cached else DynamicCache()
        first = past.cached_tokens if cached else 0
        found: list[int] = []
        margins: list[float] = []
        ttft, given = 0.0, ids[:, first:]
        try:
            for _ in range(self.settings.new_tokens):
                output = self.model(given, past_key_values=past, use_cache=True, logits_to_keep=1)
                best = output.logits[0, -1].float().topk(2)
                (token, _), (high, low) = best.indices.tolist(), best.values.tolist()
                ttft = ttft or time.perf_counter() - start
                found.append(token)
                margins.append(high - low)
                given = torch.tensor([[token]], device=self.device)
            sources = past.sources if cached else {}
            if commit:
                past.commit([list(tokens)])
        finally:
            if cached:
                past.close()
        whole = time.perf_counter() - start
        if cached:
            self.cache.drain()
        named = {"pool" if tier == "gpu" else tier: count for tier, count in sources.items()}
        return Answer(ttft, whole, tuple(found), tuple(margins), named, (), 0)
