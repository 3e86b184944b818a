/* Blocks of a row's words, as checksum.py has them: their size, and a block's number for a key. */
#ifndef ELAS_BLOCKS_H
#define ELAS_BLOCKS_H

#include <stdint.h>

#define BLOCK 4096

static uint64_t block_factor(uint64_t key, uint64_t block) {
    uint64_t x = key + block * UINT64_C(0x9E3779B97F4A7C15);
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return (x ^ (x >> 31)) | 1;
}

#endif
