#pragma once
namespace flashmoe::numeric { inline float tanh(float x){return ::tanhf(x);} inline float tanh_brief(float x){return ::tanhf(x);} }
