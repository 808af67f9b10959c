"""The engine over a GPU that is not there: each way of its copies, with and without kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gdscache import PageStatus
from gdscache.errors import DeviceError
from gdscache.extents import HostExtents
from gdscache.kernels.cuda import CopyRoute
from gdscache.pages.checksum import layer_checksums
from gdscache.pages.planes import PagedPlanes
from tests.support import fake_gpu
from tests.support.helpers import EXTRA, MHA, WAIT, OpenHost, drop_from, kept, layout_of, prompt, settle

ROUTES: list[CopyRoute] = ["staged", "zero_copy", "copy_engine"]


@pytest.mark.parametrize("model", [MHA, EXTRA], ids=["mha", "extra"])
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "no kernels"])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("cpu", [None, 8])
def test_pages_come_back_from_every_tier(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch, cpu: int | None, route: CopyRoute, kernels: bool, model: Any
) -> None:
    fake_gpu.use(monkeypatch, route, kernels=kernels)
    host, tokens = kept(open_host, 4, cpu=cpu, ssd=24, bounce=16, model=model)
    assert host.load(tokens).tokens == 16
    if cpu is not None:
        drop_from(host.engine, "cpu")
        assert host.load(tokens).tokens == 16
    settle(host.engine)


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "no kernels"])
def test_a_page_of_the_cpu_tier_that_changed_is_noticed(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch, kernels: bool
) -> None:
    fake_gpu.use(monkeypatch, kernels=kernels)
    host, tokens = kept(open_host, 3, cpu=8, load={"verify": "always"})
    cpu = host.engine.manager.cpu
    entry = cpu.index.get(host.engine.pages(tokens)[1].key)
    cpu.extents.memory(entry.slot)[7] ^= 1
    load, blocks, _ = host.begin(tokens)
    assert load.result(WAIT).pages == (PageStatus.LOADED, PageStatus.CHECKSUM, PageStatus.LOADED)
    host.give(blocks)
    settle(host.engine)


@pytest.mark.parametrize("function", ["cuLaunchKernel", "cuMemcpyAsync", "cuStreamWaitEvent", "cuEventRecord"])
def test_a_load_says_what_the_driver_refused(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    fake_gpu.use(monkeypatch)
    host, tokens = kept(open_host, 3, cpu=8)
    with fake_gpu.failing(function):
        load, blocks, _ = host.begin(tokens)
        with pytest.raises(DeviceError, match="FAKE_ERROR"):
            load.result(WAIT)
    for layer in range(host.layout.n_layers):
        load.wait(layer, WAIT)
    load.release_event.synchronize(WAIT)
    host.give(blocks)
    settle(host.engine)
    assert host.load(tokens).tokens == 12


def test_a_store_that_the_driver_refused_gives_everything_back(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu.use(monkeypatch)
    host = open_host(cpu=8, bounce=8)
    tokens = prompt(1, 3)
    with fake_gpu.failing("cuLaunchKernel"):
        handle = host.store(tokens)
        assert set(handle.result(WAIT).dropped.values()) == {"error"}
    settle(host.engine)
    host.keep(tokens)
    assert host.load(tokens).tokens == 12


def test_layers_are_ready_when_their_copies_are_queued(open_host: OpenHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """`wait` orders a stream after the copies, and does not wait for them; the release does."""
    fake_gpu.use(monkeypatch)
    host, tokens = kept(open_host, 3, cpu=8)
    with fake_gpu.held():
        load, blocks, keys = host.begin(tokens)
        event = load._layers.event(0, WAIT)
        assert not event.query()
        assert not load.done()
        assert not load.release_event.done()
    assert host.finish(load, blocks, keys).tokens == 12
    settle(host.engine)


def test_an_engine_closes_with_copies_under_way(open_host: OpenHost, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu.use(monkeypatch)
    host, tokens = kept(open_host, 3, cpu=8)
    driver = fake_gpu.driver()
    driver.fake_delay(2000)
    try:
        load, _, _ = host.begin(tokens)
        host.engine.close()
    finally:
        driver.fake_delay(0)
    assert load.done()
    assert load.release_event.done()


@pytest.mark.parametrize("route", ROUTES)
def test_copies_outside_of_moves_bring_bytes_and_checksums(route: CopyRoute) -> None:
    """Those of the calibration and of `bench copy`: into extents and back, of all pages and of none."""
    layout = layout_of(MHA)
    layers, slots, blocks = range(layout.n_layers), np.array([2, 0, 1]), np.array([[3], [1], [0]])
    planes = PagedPlanes.allocate(layout, 4, torch.device("cpu"))
    bytes_of = [tensor.view(torch.uint8) for some in planes.tensors for tensor in some]
    for plane in bytes_of:
        plane.random_(0, 256)
    before = [plane.clone() for plane in bytes_of]
    fake_gpu.driver()
    copies, extents = fake_gpu.FakeGpuCopies(planes, route), HostExtents(layout, 3 * layout.extent_bytes, "off")
    try:
        for load in (False, True):
            point, ticket = copies.gpu.copy(extents, slots, blocks, layers, (), route, load=load, sums=True)
            point.synchronize()
            expected = [layer_checksums(extents.memory(slot), layout.layer_bounds) for slot in slots.tolist()]
            assert np.array_equal(copies.gpu.finish(ticket), expected)
            for plane in bytes_of if not load else ():
                plane.zero_()
        for plane, was in zip(bytes_of, before, strict=True):
            assert torch.equal(plane[blocks[:, 0]], was[blocks[:, 0]])
        _, ticket = copies.gpu.copy(extents, slots[:0], blocks[:0], layers, (), route, load=True, sums=True)
        assert copies.gpu.finish(ticket).shape == (0, layout.n_layers)
    finally:
        copies.close()
        extents.close()
