// The arguments of kernels of pages: layers, planes, and the block indices of pages.

#pragma once

#include "xxh3.cuh"

#ifndef TABLE_WORDS
#define TABLE_WORDS 1536  // layers and planes that fit are read from shared memory
#endif

struct Layer {
    long long first_plane, planes, start, bytes;  // start: of the layer in the extent
};

// A plane's pages consist of runs: whole blocks of adjacent tokens, else single rows.
struct Plane {
    long long base, block_stride, run_stride, run_bytes, runs_per_block, end;  // end: of the plane in its layer
};

struct Call {
    const Layer* layers;
    const Plane* planes;
    const void* blocks;  // [pages][blocks_per_page]; null in the call's arguments if they are in `listed`
    const void* rows;  // [pages], null for 0, 1, 2, ...
    char* extents;
    long long stride, origin, slots, pool_blocks;
    u32 pages, n_layers, first_plane, n_planes, tiles, blocks_per_page, wide;
    unsigned long long* skipped;
};

// Block indices among the launch's arguments, for calls with few: a copy for them would delay larger copies.
struct Listed {
    long long words[440];
};

// Tables are in GPU memory or among the kernel's arguments.
__device__ __forceinline__ long long index_at(const void* table, u32 i, u32 wide) {
    return wide ? *((const long long*)table + i) : (long long)*((const int*)table + i);
}

__device__ __forceinline__ const Plane* plane_of(const Call& c, const Layer& layer, u32 byte, u32& start) {
    const Plane* plane = c.planes + layer.first_plane;
    start = 0;
    while (byte >= (u32)plane->end) {
        start = (u32)plane->end;
        ++plane;
    }
    return plane;
}

// The address of a byte of a plane's page, or null for a block outside the pool.
__device__ __forceinline__ char* plane_address(const Call& c, const Plane* plane, u32 page, u32 run, u32 offset) {
    const u32 per_block = (u32)plane->runs_per_block;
    u32 number = run;
    long long inside = offset;
    if (per_block > 1) {
        number = run / per_block;
        inside += (long long)(run - number * per_block) * plane->run_stride;
    }
    const long long block = index_at(c.blocks, page * c.blocks_per_page + number, c.wide);
    if (block < 0 || block >= c.pool_blocks) return nullptr;
    return (char*)plane->base + block * plane->block_stride + inside;
}

__device__ __forceinline__ char* byte_address(const Call& c, const Layer& layer, u32 page, u32 byte) {
    u32 start;
    const Plane* plane = plane_of(c, layer, byte, start);
    const u32 inside = byte - start, run = inside / (u32)plane->run_bytes;
    return plane_address(c, plane, page, run, inside - run * (u32)plane->run_bytes);
}

// Every index out of range is counted once a call, by the warp with the first span of its page.
__device__ __forceinline__ void count_skipped(const Call& c, u32 page, long long row, u32 lane) {
    u32 bad = lane == 0 && (row < 0 || row >= c.slots);
    for (u32 i = lane; i < c.blocks_per_page; i += 32) {
        const long long block = index_at(c.blocks, page * c.blocks_per_page + i, c.wide);
        bad += block < 0 || block >= c.pool_blocks;
    }
    if (bad) atomicAdd(c.skipped, (unsigned long long)bad);
}

// Read the layers and planes of a call into shared memory, if they fit.
__device__ __forceinline__ void fetch_table(Call& c, long long* table) {
    const u32 layer_words = c.n_layers * 4, plane_words = c.n_planes * 6;
    if (layer_words + plane_words > TABLE_WORDS) return;
    for (u32 i = threadIdx.x; i < layer_words; i += blockDim.x) table[i] = ((const long long*)c.layers)[i];
    for (u32 i = threadIdx.x; i < plane_words; i += blockDim.x) {
        table[layer_words + i] = ((const long long*)(c.planes + c.first_plane))[i];
    }
    __syncthreads();
    c.layers = (const Layer*)table;
    c.planes = (const Plane*)(table + layer_words) - c.first_plane;
}

#define ARGUMENTS                                                                                                      \
    const Layer *layers, const Plane *planes, const void *blocks, const void *rows, char *extents, long long stride,   \
        long long origin, long long slots, long long pool_blocks, u32 pages, u32 n_layers, u32 first_plane,            \
        u32 n_planes, u32 tiles, u32 blocks_per_page, u32 wide, unsigned long long *skipped,                           \
        const __grid_constant__ Listed listed
// clang-format off
#define CALL \
    {layers, planes, blocks ? blocks : listed.words, rows, extents, stride, origin, slots, pool_blocks, pages, n_layers, \
     first_plane, n_planes, tiles, blocks_per_page, wide, skipped}
// clang-format on
