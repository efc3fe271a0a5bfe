// Factors between natural logarithms and powers of two.
#pragma once

namespace flashmoe {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.69314718055994530942f;

}  // namespace flashmoe
