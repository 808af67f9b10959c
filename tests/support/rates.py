"""Rates of a GPU's ways to and from host memory, as measured once: loads by the kernel are faster up to 64 KiB."""

from __future__ import annotations

from gdscache.kernels.choice import COPY_ENGINE_FROM, Rates

UP = Rates(
    {4096: 3.0, 16384: 12.0, 65536: 40.0, 262144: 50.0, 1048576: 54.0},
    {COPY_ENGINE_FROM: 44.0, 4 * COPY_ENGINE_FROM: 52.0, 16 * COPY_ENGINE_FROM: 54.5},
    51.0,
)

DOWN = Rates(
    {4096: 2.0, 16384: 8.0, 65536: 30.0, 262144: 52.0, 1048576: 53.0},
    {COPY_ENGINE_FROM: 28.0, 4 * COPY_ENGINE_FROM: 54.0, 16 * COPY_ENGINE_FROM: 56.5},
    30.0,
)
