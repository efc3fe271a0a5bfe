// The keys that a query sees: [first_key(), end_key()), which may be empty. Neither bound decreases
// with the query.
//
// Included inside a namespace of one translation unit.

FLASHMOE_INLINE int64_t first_key(const AttentionProblem& p, int64_t query) {
  const int64_t key = p.bounded_left ? query + p.left_offset : 0;
  return key < 0 ? 0 : key > p.seq_k ? p.seq_k : key;
}

FLASHMOE_INLINE int64_t end_key(const AttentionProblem& p, int64_t query) {
  const int64_t key = p.bounded_right ? query + p.right_offset + 1 : p.seq_k;
  return key < 0 ? 0 : key > p.seq_k ? p.seq_k : key;
}
