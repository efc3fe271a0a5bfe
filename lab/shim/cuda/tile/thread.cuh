#pragma once
#include "cuda/tile/extents.h"
namespace flashmoe { inline constexpr uint32_t kFullWarp=~0u;
inline int thread_index(){return cur_lane;} inline int lane_index(){return cur_lane;}
namespace reread { inline int lane_index(){return cur_lane;} inline int thread_index(){return cur_lane;} } }
