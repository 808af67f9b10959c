"""SGLang: a cache linker (`linker`), and a storage backend for HiCache (`storage`).

These two, `events` and `junctions` import SGLang; the other modules read its objects by their attributes.
"""
