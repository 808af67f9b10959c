"""SGLang: a cache linker (`linker`), and a storage backend for HiCache (`storage`)."""
