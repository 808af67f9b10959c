#!/usr/bin/env bash
# torch 2.13.0, torch.distributed with gloo: what MIN and MAX make of a NaN depends on the rank that has it and on the
# element's place in the tensor. Of one element, a NaN of rank 0 is the result, and one of rank 1 gives way to rank 0's
# number. Of more, a part of the elements says NaN and the other part a number, for the same values everywhere. All
# ranks get the same, so none can notice. `torch.maximum` and `torch.amax` give NaN always. Ranks that agree by such a
# reduction on how long to wait, or on what a page is worth, may drop one rank's "not known" and go on with the other's
# number. Likewise `reduce`: documentation gives the result to the destination alone, and the tensor of the other rank
# does not stay as it was; a part of its elements is the sum.
#
# Seen with torch 2.13.0 on a CPU, two ranks, float32 and bfloat16, one rank with NaN and the other with numbers, MIN
# and MAX alike. 1 element: NaN on both ranks if rank 0 has it, else the number. 8 elements: 4 NaN and 4 numbers,
# whichever rank has it. `reduce` of 1 and 2 to rank 0: rank 1 has [2, 2, 3, 3] behind it. Fails (exit 1) where that is
# no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "torch==2.13.0" "numpy==2.4.6"
cd "$folder"
cat > ranks.py <<'PY'
import math
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

OPS = {"MIN": dist.ReduceOp.MIN, "MAX": dist.ReduceOp.MAX}


def rank_of_two(rank, results):
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/meeting", rank=rank, world_size=2)
    seen = {}
    for op, reduction in OPS.items():
        for dtype in (torch.float32, torch.bfloat16):
            for owner in (0, 1):
                for elements in (1, 8):
                    tensor = torch.full((elements,), math.nan if rank == owner else 1.0 + rank, dtype=dtype)
                    dist.all_reduce(tensor, reduction)
                    case = f"all_reduce {op} {str(dtype)[6:]}, {elements} elements, NaN on rank {owner}"
                    seen[case] = str(tensor.tolist())
    tensor = torch.full((4,), 1.0 + rank)
    dist.reduce(tensor, 0)
    seen["reduce SUM to rank 0"] = str(tensor.tolist())
    results.put((rank, seen))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__)
    results = mp.get_context("spawn").Queue()
    ranks = mp.spawn(rank_of_two, (results,), 2, join=False)
    seen = dict(results.get(timeout=100) for _ in range(2))
    ranks.join()
    for case in seen[0]:
        print(f"{case}: {seen[0][case]}, {seen[1][case]}")
    reduced = [seen[rank].pop("reduce SUM to rank 0") for rank in (0, 1)]
    good = seen[0] == seen[1] and reduced == ["[3.0, 3.0, 3.0, 3.0]", "[2.0, 2.0, 3.0, 3.0]"]
    for case, got in seen[0].items():
        nans, owner, elements = got.count("nan"), int(case[-1]), 8 if " 8 " in case else 1
        good &= nans == (4 if elements == 8 else 1 - owner)
    sys.exit(not (good and torch.maximum(torch.tensor(math.nan), torch.tensor(1.0)).isnan()))
PY
GLOO_SOCKET_IFNAME=lo "$folder/env/bin/python" ranks.py
