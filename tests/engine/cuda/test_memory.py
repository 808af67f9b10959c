import gc
import logging
import mmap

import pytest
import torch

from gdscache.cuda import host_memory as memory
from gdscache.cuda.host_memory import HostBuffer
from gdscache.errors import CapacityError, DeviceError, EngineClosedError, NoMemoryError, PinnedMemoryError

NO_CUDA = not torch.cuda.is_available()


def mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        for line in maps:
            low, _, high = line.split()[0].partition("-")
            if int(low, 16) <= address < int(high, 16):
                return True
    return False


class FakeDriver:
    """Counts registrations, and refuses those of these numbers."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.calls = 0
        self.refused: tuple[int, ...] = ()

    def page_lock(self, address: int, size: int) -> None:
        self.calls += 1
        if self.calls - 1 in self.refused:
            raise DeviceError("cuMemHostRegister_v2 answered 2 (CUDA_ERROR_OUT_OF_MEMORY)")
        self.live[address] = size

    def page_unlock(self, address: int) -> None:
        del self.live[address]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The driver of a GPU that there seems to be."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    made = FakeDriver()
    monkeypatch.setattr(memory, "current_driver", lambda: made)
    return made


@pytest.mark.parametrize("nbytes", [1, 4096, 12289, 3 << 20])
def test_size_alignment_and_sharing(nbytes: int) -> None:
    with HostBuffer(nbytes, "off") as buffer:
        assert buffer.nbytes == len(buffer.view) == buffer.tensor.numel() == nbytes
        assert buffer.tensor.dtype == torch.uint8
        assert buffer.tensor.data_ptr() == buffer.address
        assert buffer.address % mmap.PAGESIZE == 0
        assert not buffer.pinned
        assert not any(buffer.view[:4096])
        buffer.view[nbytes - 1] = 7
        assert buffer.tensor[-1] == 7
        buffer.tensor[0] = 9
        assert buffer.view[0] == 9


@pytest.mark.parametrize("nbytes", [0, -1])
def test_nothing_is_no_buffer(nbytes: int) -> None:
    with pytest.raises(CapacityError, match=str(nbytes)):
        HostBuffer(nbytes)


def test_more_than_there_is_names_what_asked_for_it() -> None:
    with pytest.raises(NoMemoryError, match=rf"cpu.capacity asks for {1 << 50:,} bytes .* are available") as caught:
        HostBuffer(1 << 50, "off", setting="cpu.capacity")
    assert "lower cpu.capacity" in caught.value.hint


def test_close_frees_the_memory_and_is_idempotent() -> None:
    buffer = HostBuffer(1 << 20, "off")
    address = buffer.address
    assert mapped(address)
    buffer.close()
    assert not mapped(address)
    buffer.close()
    for name in ("tensor", "view"):
        with pytest.raises(EngineClosedError):
            getattr(buffer, name)


@pytest.mark.parametrize("kind", ["tensor", "tensor slice", "view", "view slice", "numpy"])
def test_memory_outlives_close_until_the_last_view_goes(kind: str) -> None:
    buffer = HostBuffer(1 << 20, "off")
    address = buffer.address
    buffer.tensor[5] = 42
    held = {
        "tensor": lambda: buffer.tensor,
        "tensor slice": lambda: buffer.tensor[1:],
        "view": lambda: buffer.view,
        "view slice": lambda: buffer.view[1:],
        "numpy": lambda: buffer.tensor.numpy(),
    }[kind]()
    buffer.close()
    gc.collect()
    assert mapped(address)
    assert held[4 if "slice" in kind else 5] == 42
    del held
    gc.collect()
    assert not mapped(address)


def test_releasing_the_view_does_not_unmap_the_tensor() -> None:
    buffer = HostBuffer(1 << 20, "off")
    tensor = buffer.tensor
    buffer.view.release()
    buffer.close()
    assert mapped(tensor.data_ptr())
    assert tensor.sum() == 0


@pytest.mark.skipif(not NO_CUDA, reason="needs a machine without CUDA")
def test_pin_without_cuda(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(PinnedMemoryError, match="CUDA is not available"):
        HostBuffer(4096, "on")
    with caplog.at_level(logging.WARNING), HostBuffer(4096) as buffer:
        assert not buffer.pinned
    assert not caplog.records


def test_registration_covers_all_bytes_in_chunks_of_whole_units(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "MAX_REGISTRATION", 4 << 12)
    nbytes, unit = 23 << 12, 3 << 12
    buffer = HostBuffer(nbytes, "on", unit=unit)
    assert buffer.pinned
    end = buffer.address
    for address, size in sorted(fake.live.items()):
        assert address == end
        assert size <= 4 << 12
        assert (address - buffer.address) % unit == 0
        end += size
    assert end == buffer.address + nbytes
    buffer.close()
    assert not fake.live
    assert not buffer.pinned


def test_a_refused_registration_leaves_nothing_registered(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "MAX_REGISTRATION", 1 << 12)
    fake.refused = 2, 5
    with pytest.raises(PinnedMemoryError, match="OUT_OF_MEMORY"):
        HostBuffer(4 << 12, "on")
    assert not fake.live
    with caplog.at_level(logging.WARNING), HostBuffer(4 << 12, "auto") as buffer:
        assert not buffer.pinned
        assert not fake.live
    assert sum("OUT_OF_MEMORY" in record.message for record in caplog.records) == 1


def test_pin_off_asks_cuda_nothing(fake: FakeDriver) -> None:
    HostBuffer(4096, "off").close()
    assert fake.calls == 0


@pytest.mark.gpu
@pytest.mark.skipif(NO_CUDA, reason="needs a CUDA GPU")
def test_pinned_bytes_reach_the_gpu_and_back() -> None:
    with HostBuffer(64 << 20, "on") as buffer:
        assert buffer.pinned
        assert buffer.tensor.is_pinned()
        buffer.tensor.random_(0, 256)
        there = buffer.tensor.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        want = buffer.tensor.clone()
        buffer.tensor.zero_()
        buffer.tensor.copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(buffer.tensor, want)


@pytest.mark.gpu
@pytest.mark.skipif(NO_CUDA, reason="needs a CUDA GPU")
def test_a_refusal_by_the_driver_is_not_raised_again_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    with HostBuffer(1 << 20, "on") as buffer:
        with pytest.raises(DeviceError, match="ALREADY_REGISTERED"):
            memory.current_driver().page_lock(buffer.address, buffer.nbytes)
        assert int(torch.ones(3, device="cuda").sum()) == 3
