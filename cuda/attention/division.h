// How the two kernels of a mixed batch share the multiprocessors. Decoding is bound by the memory,
// prompts are by the tensor cores, and no multiprocessor has room for a block of each. So decoding
// has no more blocks than it needs, and prompts the multiprocessors that it leaves free and, when
// it has ended, all of them: whoever is free takes the next tile.
//
// The kernel that tells the sequences apart (lengths/) writes a division for each call, in the
// workspace. Behind it each block of the prompts' kernel keeps a chain of the tiles that it has
// taken: a number for each block, that of its first tile, and one for each tile, that of the
// block's next one.
#pragma once

#include <cstdint>

namespace flashmoe {

struct Division {
  int32_t decode_blocks;  // so many of decoding's blocks have a share, the others none
  uint32_t next_tile;     // of the prompts: the number of the next that a block takes
};

}  // namespace flashmoe
