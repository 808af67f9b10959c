"""Kernels that gather, scatter and checksum fragmented pages, and SGLang's operations over them."""
