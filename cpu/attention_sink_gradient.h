// The gradient of a head's sink, whose weight in a row is exp(sink - lse):
//
//   sum over the rows of weight (dlse - delta),  delta = sum of dOut Out over a row
//
// Rows are added in order and in fp64. A sink of -inf is no sink. A sink of +inf has weight 1: lse
// is then +inf, too, if the forward had the sink. A row that sees no key has an Out of 0, whatever
// its dOut.
//
// Included inside a namespace of one translation unit. `dout_out(batch, query)` is delta. The rows
// are added to `sum`.
template <typename Number, typename SeesKeys, typename DoutOut>
double sink_gradient(const AttentionBackwardProblem& p, int64_t head, double sink, double sum,
                     const SeesKeys& sees_keys, const DoutOut& dout_out) {
  constexpr double kInfinite = __builtin_inf();
  if (sink == -kInfinite) return sum;
  const Number* const lse = static_cast<const Number*>(p.lse);
  const Number* const dlse = static_cast<const Number*>(p.dlse);
  const auto of_row = [head](const RowStrides& strides, int64_t batch, int64_t query) {
    return batch * strides.batch + query * strides.seq + head * strides.head;
  };
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    for (int64_t query = 0; query < p.seq_q; ++query) {
      const double total = static_cast<double>(lse[of_row(p.lse_strides, batch, query)]);
      const double weight = sink == total ? 1.0 : __builtin_exp(sink - total);
      if (sees_keys(batch, query)) sum -= weight * dout_out(batch, query);
      if (dlse != nullptr) {
        sum += weight * static_cast<double>(dlse[of_row(p.dlse_strides, batch, query)]);
      }
    }
  }
  return sum;
}
