#!/usr/bin/env bash
# zstandard 0.25.0 and lz4 4.4.5: `decompress` of data with several frames returns the first one, and says nothing of
# the rest. Both formats let frames follow each other, and say that what they decompress to does so, too: a page whose
# layers are compressed one by one, a file that was appended to, one that several threads wrote (pzstd, seekable zstd).
# So all but the first layer is lost where it is read, and the size in the frame's header agrees with what is returned.
# The readers of the same packages (`stream_reader`, `open`) return all of it, and so do pyzstd, zstd, cramjam and
# backports.zstd, which is Python's own module since 3.14. zstandard raises with `allow_extra_data=False`, and
# `read_across_frames=True`, which would read on, raises that it is not implemented. lz4 has no such argument; the
# number of bytes used (`return_bytes_read=True`) tells. zlib's `decompress` stops there too, gzip's does not.
#
# Seen with zstandard 0.25.0, lz4 4.4.5, pyzstd 0.20.0, zstd 1.5.7.2, cramjam 2.14.0 and backports.zstd 1.8.0, a page of
# four layers of 1,000 bytes, a frame each: 1,000 bytes from `decompress` of zstandard and of lz4.frame, 4,000 from all
# others. Fails (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile --no-deps "zstandard==0.25.0" "lz4==4.4.5" "pyzstd==0.20.0" \
    "zstd==1.5.7.2" "cramjam==2.14.0" "backports.zstd==1.8.0" "typing_extensions==4.16.0"
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import gzip
import importlib.metadata
import io
import sys
import zlib

import backports.zstd
import cramjam
import lz4.frame
import pyzstd
import zstandard
import zstd

for name in ("zstandard", "lz4", "pyzstd", "zstd", "cramjam", "backports.zstd"):
    print(name, importlib.metadata.version(name))
LAYERS = [bytes([layer]) * 1000 for layer in range(4)]
page = b"".join(LAYERS)
compressor = zstandard.ZstdCompressor()
of_zstd = b"".join(compressor.compress(layer) for layer in LAYERS)
of_lz4 = b"".join(lz4.frame.compress(layer) for layer in LAYERS)
plain = zstandard.ZstdDecompressor()
ways = {
    "zstandard decompress": lambda: plain.decompress(of_zstd),
    "zstandard decompress, no extra data": lambda: plain.decompress(of_zstd, allow_extra_data=False),
    "zstandard decompress, across frames": lambda: plain.decompress(of_zstd, read_across_frames=True),
    "zstandard stream_reader": lambda: plain.stream_reader(io.BytesIO(of_zstd)).read(),
    "zstandard open": lambda: zstandard.open(io.BytesIO(of_zstd), "rb").read(),
    "pyzstd": lambda: pyzstd.decompress(of_zstd),
    "zstd": lambda: zstd.decompress(of_zstd),
    "cramjam": lambda: bytes(cramjam.zstd.decompress(of_zstd)),
    "backports.zstd": lambda: backports.zstd.decompress(of_zstd),
    "lz4 decompress": lambda: lz4.frame.decompress(of_lz4),
    "lz4 open": lambda: lz4.frame.open(io.BytesIO(of_lz4)).read(),
    "cramjam, lz4": lambda: bytes(cramjam.lz4.decompress(of_lz4)),
    "zlib": lambda: zlib.decompress(b"".join(map(zlib.compress, LAYERS))),
    "gzip": lambda: gzip.decompress(b"".join(map(gzip.compress, LAYERS))),
}
seen = {}
for name, read in ways.items():
    try:
        got = read()
    except zstandard.ZstdError as error:
        seen[name] = "raises"
        print(f"{name:36} {error}")
    else:
        assert page.startswith(got)
        seen[name] = len(got)
        print(f"{name:36} {len(got)} of {len(page)} bytes")
first = {"zstandard decompress", "lz4 decompress", "zlib"}
raising = {"zstandard decompress, no extra data", "zstandard decompress, across frames"}
assert lz4.frame.decompress(of_lz4, return_bytes_read=True)[1] < len(of_lz4)
assert zstandard.frame_content_size(of_zstd) == 1000
sys.exit(seen != {name: "raises" if name in raising else 1000 if name in first else 4000 for name in ways})
PY
