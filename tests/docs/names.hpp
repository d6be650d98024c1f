// SPDX-License-Identifier: Apache-2.0
// The names that the C++ blocks of the manuals use without declaring them.
#pragma once
#include <muster/muster.hpp>

#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

struct CUstream_st;
inline std::shared_ptr<muster::Group> group;
inline std::vector<int> ranks;
inline int rank, size, step;
inline std::string run_id, text;
inline std::int64_t first;
inline muster::Config layer;
inline std::vector<muster::Config> layers;
inline muster::Tensor weight, gradient, shard, norm;
inline const void *data, *device_pointer;
inline CUstream_st* stream;
inline std::vector<float> scales;
muster::Config quantized(const muster::Config&);
void train_one_step();
std::string name_of(int rank, const std::string& path);
template <class... Values>
void use(const Values&...) {}
