// How the two kernels of a mixed batch share the multiprocessors. Memory bounds decoding, tensor
// cores bound prompts, and no multiprocessor has room for a block of each. So decoding gets no more
// blocks than it needs. Prompts get the multiprocessors that it leaves free and, after it has
// ended, all of them: a free block takes the next tile.
//
// The kernel that separates the sequences (lengths/) writes a division for each call into the
// workspace. Behind it each block of the prompts' kernel keeps a chain of the tiles that it has
// taken: one number per block, that of its first tile, and one number per tile, that of the block's
// next tile.
#pragma once

#include <cstdint>

namespace flashmoe {

struct Division {
  int32_t decode_blocks;  // blocks of decoding that have a range; the others have none
  uint32_t next_tile;     // of prompts: the number of the tile that the next block takes
};

}  // namespace flashmoe
