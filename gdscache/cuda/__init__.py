"""CUDA: the driver by ctypes, streams and fences, page-locked host memory."""
