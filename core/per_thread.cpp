#include "core/per_thread.h"

#include <pthread.h>

#include <cstdlib>

namespace flashmoe {
namespace {

// The header in front of the requested memory.
struct alignas(kThreadAlignment) Block {
  Block* next;  // of the same thread
  void** slot;
};

void free_blocks(void* first) {
  for (Block* block = static_cast<Block*>(first); block != nullptr;) {
    Block* const next = block->next;
    *block->slot = nullptr;
    std::free(block);
    block = next;
  }
}

// A key's destructor, unlike a thread_local object's, is called again if a later destructor
// allocates.
struct Key {
  pthread_key_t key = {};
  bool made = pthread_key_create(&key, &free_blocks) == 0;
};

const Key& blocks_of_thread() {
  static const Key key;
  return key;
}

// Made when the library loads: a fork while another thread makes the key would leave it half made.
[[maybe_unused]] const bool kMade = blocks_of_thread().made;

}  // namespace

void* allocate_for_thread(size_t bytes, void** slot) {
  const Key& key = blocks_of_thread();
  if (!key.made) return nullptr;
  const size_t rounded = (bytes + kThreadAlignment - 1) / kThreadAlignment * kThreadAlignment;
  Block* const block =
      static_cast<Block*>(std::aligned_alloc(kThreadAlignment, sizeof(Block) + rounded));
  if (block == nullptr) return nullptr;
  block->next = static_cast<Block*>(pthread_getspecific(key.key));
  block->slot = slot;
  if (pthread_setspecific(key.key, block) != 0) {
    std::free(block);
    return nullptr;
  }
  return block + 1;
}

}  // namespace flashmoe
