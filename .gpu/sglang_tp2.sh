#!/bin/bash
# Two GPUs: SGLang's real engine with tensor parallelism under the linker. Run in the checkout's root, with SGLang 0.5.23,
# a built native library, and PYTHON naming its interpreter.
set -e
PYTHON=${PYTHON:-python}
export GDSCACHE_SGLANG_PYTHON=$(which $PYTHON) GDSCACHE_SGLANG_TP=2
# 1. Tokens: prefixes and a restart, other weights, 2,000 requests twice (each against a run without a cache), MHA then MLA.
for kind in mha mla; do
  GDSCACHE_SGLANG_KIND=$kind GDSCACHE_SGLANG_REQUESTS=2000 $PYTHON -m pytest -q -s -m engines --timeout 900 \
    tests/engines/test_sglang_engine.py -k linker
done
# 2. Speed: HiCache first, in turns with the linker; 32k tokens of which 90 % are cached, then traffic of 64 clients.
#    --at-once 1: one engine (two GPUs) at a time. Compare `cpu` of hicache and linker, `resident`, requests a second.
$PYTHON tools/serving/bench.py sglang --tp 2 --gpus 2 --graphs --at-once 1 --ways none,hicache,linker \
  --json ${OUT:-.}/sglang-tp2.json --plot ${OUT:-.}/sglang-tp2.png
# Lookups of the other ranks answer every length (one int a page): look at `lookup` in shared_calls_s (rank 0's own time).
