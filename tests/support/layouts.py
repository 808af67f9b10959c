"""Layouts that hypothesis draws."""

from __future__ import annotations

from hypothesis import strategies as st

from gdscache.pages.layout import DTYPE_BYTES, MAX_PAGE_TOKENS, PageLayout, Plane

shapes = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)


@st.composite
def layouts(draw: st.DrawFn) -> PageLayout:
    layers = []
    for _ in range(draw(st.integers(1, 6))):
        count = draw(st.integers(1, 4))
        layers.append(
            tuple(Plane(f"p{i}", draw(shapes), draw(st.sampled_from(sorted(DTYPE_BYTES)))) for i in range(count))
        )
    return PageLayout(tuple(layers), draw(st.integers(1, MAX_PAGE_TOKENS)))
