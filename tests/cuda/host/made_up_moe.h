// What tests tell the made-up kernels of experts.
#pragma once

namespace flashmoe::made_up {

extern int few_token_bytes_more;  // of shared memory that a block of the few-token family wants

}  // namespace flashmoe::made_up
