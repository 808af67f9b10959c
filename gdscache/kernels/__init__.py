"""Kernels that gather, scatter and checksum fragmented pages, and the choice between them and the copy engine."""
