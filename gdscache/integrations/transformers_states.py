"""Layers of a transformers cache with a state: linear attention, Mamba-2, short convolutions.

A state stands for all earlier tokens, and each call replaces it. So it exists only where a call ends: states at which a
later request may begin are copied there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from gdscache.errors import GeometryError, UnsupportedRequestError
from gdscache.integrations.transformers_layers import SECTION, FixedRows, Layer
from gdscache.integrations.transformers_parts import STATE_PLANES, state_tensors
from gdscache.pages.layout import Plane


class _Uncut(FixedRows):
    """A layer whose tokens cannot be taken back."""

    is_croppable = False

    def check_crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise UnsupportedRequestError(
                f"crop({tokens_to_remove}): a state stands for all tokens before, and none is taken back", _ANEW
            )

    def crop(self, tokens_to_remove: int) -> None:
        self.check_crop(tokens_to_remove)

    def activate_past_recording(self) -> None:
        raise UnsupportedRequestError("a state cannot go back to tokens before, as assisted generation asks", _ANEW)


class StateLayer(_Uncut, LinearAttentionLayer):
    """A layer that keeps a state alone."""


class FullStateLayer(_Uncut, Layer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc,no-untyped-call]
    """A layer that keeps a state, and keys and values of all tokens."""


class States:
    """The state of a layer, and copies of it at lengths where a request may begin. The layer is of a cache of `rows`
    rows, on `device`; a page is the state behind `page_tokens` more tokens."""

    def __init__(
        self, layer: LinearAttentionLayer, planes: Sequence[Plane], rows: int, page_tokens: int, device: torch.device
    ) -> None:
        self._layer, self._planes, self._rows = layer, planes, rows
        self._page_tokens, self._device = page_tokens, device
        self._copies: dict[int, list[torch.Tensor]] = {}  # by page
        self._passing = -1  # the page that the next copy replaces

    def begin(self, pages: Sequence[torch.Tensor], tokens: int) -> None:
        """Start behind `tokens` tokens, with their state: of each plane, (rows, 1, 1, *row)."""
        layer = self._layer
        for plane, page in zip(self._planes, pages, strict=True):
            state = page[:, 0, 0].to(self._device).contiguous()
            if plane.name == STATE_PLANES[0]:
                layer.lazy_initialization(conv_states=state)
                layer.conv_states[0] = state
            else:
                layer.lazy_initialization(recurrent_states=state)
                layer.recurrent_states[0] = state
        layer.has_previous_state[0] = True

    def take(self, tokens: int, *, passing: bool) -> None:
        """Copy the state behind `tokens` tokens, where a call has ended. `passing`: only until the next copy."""
        self._copies.pop(self._passing, None)
        page = tokens // self._page_tokens - 1
        self._passing = page if passing else -1
        self._copies[page] = [state.detach().clone() for state in self._states()]

    def reset(self) -> None:
        self._copies = {}

    def forget(self, tokens: int) -> None:
        """Drop copies behind `tokens` tokens, or fewer."""
        self._copies = {page: one for page, one in self._copies.items() if (page + 1) * self._page_tokens > tokens}

    def has(self, first: int, stop: int) -> bool:
        return stop // self._page_tokens - 1 in self._copies

    def pages(self, row: int, numbers: Sequence[int], page_tokens: int) -> list[torch.Tensor]:
        """The states of held pages, of each plane (pages, 1, *row)."""
        copies = [self._copies[number] for number in numbers]
        return [torch.stack([one[row] for one in plane]).unsqueeze(1) for plane in zip(*copies, strict=True)]

    def _states(self) -> list[torch.Tensor]:
        """The layer's states, in the order of its planes. Raises for states of other rows or dtype."""
        found = [one for one in state_tensors(self._layer) if one is not None]
        made = [(str(one.dtype).removeprefix("torch."), tuple(one.shape)) for one in found]
        kept = [(plane.dtype, (self._rows, *plane.shape)) for plane in self._planes]
        if made != kept:
            raise GeometryError(f"the model makes states {made}, the engine keeps {kept}", SECTION)
        return found


_ANEW = "reset() the cache and compute the prompt again, or run the request without the cache"
