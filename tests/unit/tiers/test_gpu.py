"""Who takes slots of the pool over waits for the work that still uses them."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from gdscache.pages.layout import PageLayout, Plane
from gdscache.tiers.gpu import GpuTier

LAYOUT = PageLayout.uniform([Plane("k", (1, 8), "float16")], n_layers=1, page_tokens=4)


def test_a_stream_waits_for_what_uses_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    gpu, event = GpuTier(LAYOUT, 4 * LAYOUT.page_bytes, torch.device("cpu")), mock.Mock()
    gpu.used((0, 1), event)
    gpu.order_after((1, 2))
    assert event.wait.mock_calls == [mock.call("stream")]
    gpu.order_after((2, 3))
    gpu.order_after((0, 1), forget=True)
    gpu.order_after((0, 1))
    assert len(event.wait.mock_calls) == 2


def test_each_stream_that_uses_a_slot_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences share a slot: who takes it over waits for the one that left first, too."""
    gpu = GpuTier(LAYOUT, 4 * LAYOUT.page_bytes, torch.device("cpu"))
    early, first, last = (mock.Mock() for _ in range(3))
    for stream, event in (("a", early), ("a", first), ("b", last)):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, stream=stream: stream)
        gpu.used((0,), event)
    gpu.order_after((0,), forget=True)
    assert first.wait.mock_calls == last.wait.mock_calls == [mock.call("b")]
    assert early.wait.mock_calls == []
